"""BERT and GPT-2 on two local processes, planned for latency: measured against predicted, outputs against one process.

    python bench/inference_local.py [--seconds 60 --calls 15] > bench/measured/inference_local.md

This machine is calibrated as ``local:2`` first, every time, because the state of the machine is part of what is measured
(see ``bench/accuracy_local.py``). All cases are then called in turn in the same two processes, one thread each. On a machine
that others use, wall-clock time says how long the others kept us waiting; the processor seconds of a call say what it took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CASES: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("BERT base, a text of 128", "hf:bert", {"batch": 1, "seq": 128}),
    ("BERT base, 4 texts of 64", "hf:bert", {"batch": 4, "seq": 64}),
    ("GPT-2 small, a text of 128", "hf:gpt2", {"batch": 1, "seq": 128}),
    ("GPT-2 small, next token after 256", "hf:gpt2", {"batch": 1, "cache": 256}),
)
SEARCHES = ("auto",)


def serve(cases: list[tuple[str, dict[str, int], str]], calls: int) -> list[tuple[list[float], list[float], float]]:
    """On one rank: every plan called in turn; per plan wall and processor seconds, and the largest relative difference."""
    import torch
    import torch.distributed as dist

    from shardwright._torch_compat import flatten_tree, map_tree
    from shardwright.frontend.containers import register_containers
    from shardwright.plans.serial import from_json
    from shardwright.runtime.parallelize import parallelize
    from shardwright.zoo.reference import resolve

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    engines: list[tuple[Any, Any, float]] = []
    for reference, sizes, text in cases:
        resolved = resolve(reference, **sizes, device="cpu", dtype="float32", inference=True)  # type: ignore[arg-type]
        again = map_tree(lambda leaf: leaf, dict(resolved.kwargs))  # a call makes the cache it is given longer
        output = resolved.model(**resolved.kwargs)
        register_containers(output)  # caches are opened here as they are in the parallel model's results
        truth = [x for x in flatten_tree(output)[0] if isinstance(x, torch.Tensor)]
        parallel = parallelize(resolved.model, from_json(text), (), again)
        fresh = map_tree(lambda leaf: leaf, again)
        ours = [x for x in flatten_tree(parallel(**fresh))[0] if isinstance(x, torch.Tensor)]
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(truth, ours, strict=True))
        engines.append((parallel, again, worst))
    times: list[list[float]] = [[] for _ in engines]
    cores: list[list[float]] = [[] for _ in engines]
    for number in range(-2, calls):
        order = list(range(len(engines)))
        for place in order if number % 2 else order[::-1]:
            parallel, again, _ = engines[place]
            given = map_tree(lambda leaf: leaf, again)
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            parallel(**given)
            ended = time.process_time() - used
            dist.barrier()
            if number >= 0:
                times[place].append(time.perf_counter() - began)
                cores[place].append(ended)
    return [(wall, core, worst) for wall, core, (_, _, worst) in zip(times, cores, engines, strict=True)]


def predict(reference: str, sizes: dict[str, int], search: str, cluster: Any) -> tuple[Any, float]:
    """The plan, and the processor seconds that one call of it is predicted to take."""
    from bench.accuracy_local import processor_seconds
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_serving
    from shardwright.simulator import simulate
    from shardwright.zoo.reference import resolve

    resolved = resolve(reference, **sizes, dtype="float32", inference=True)  # type: ignore[arg-type]
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    options = Options(search=search, baselines=(), fewer_devices=False)
    plan = plan_serving(lambda calls: graph, cluster, options, cache=sizes.get("cache", 0))
    return plan, processor_seconds(
        simulate(graph, plan.stages[0].strategy, plan.meshes[0], training=False), plan.meshes[0]
    )


def report(seconds: float, calls: int) -> None:
    """Calibrate, plan, measure, print the table."""
    from shardwright.cluster import Cluster, Node
    from shardwright.cluster.communication import calibrate_local
    from shardwright.plans.serial import to_json
    from shardwright.runtime.launch import run_locally

    load = os.getloadavg()[0]
    device, link, _ = calibrate_local(2, seconds)
    cluster = Cluster("local:2", (Node(device, 2, link),), link)
    cases = [(what, ref, sizes, search) for what, ref, sizes in CASES for search in SEARCHES]
    plans = [predict(reference, sizes, search, cluster) for _, reference, sizes, search in cases]
    given = [(ref, sizes, to_json(plan)) for (_, ref, sizes, _), (plan, _) in zip(cases, plans, strict=True)]
    measured = run_locally(serve, 2, given, calls)[0]
    print("| call | plan | fastest ms | predicted ms | error | processor ms | predicted | error | largest difference |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    wall_errors, core_errors = [], []
    for (what, _, _, search), (plan, core), (wall, used, worst) in zip(cases, plans, measured, strict=True):
        least, busy, guess = min(wall), statistics.median(used), plan.prediction.step_seconds
        wall_errors.append(abs(guess / least - 1))
        core_errors.append(abs(core / busy - 1))
        print(
            f"| {what} | {search} | {1e3 * least:.1f} | {1e3 * guess:.1f} | {100 * (guess / least - 1):+.0f} % "
            f"| {1e3 * busy:.1f} | {1e3 * core:.1f} | {100 * (core / busy - 1):+.0f} % | {worst:.1e} |"
        )
    for which, errors in (("the fastest call", wall_errors), ("processor time", core_errors)):
        print(
            f"\nAbsolute error to {which}: median {100 * statistics.median(errors):.0f} %, worst {100 * max(errors):.0f} %."
        )
    print(
        f"\n{calls} alternating calls; load average before: {load:.1f}. Differences are relative, float32, to one process."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--calls", type=int, default=15)
    asked = parser.parse_args()
    report(asked.seconds, asked.calls)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
