"""Two local processes over gloo: measured and predicted step time, performed and predicted communication, of six plans.

    python bench/accuracy_local.py [--seconds 60 --steps 15]

This machine is calibrated as ``local:2`` first, every time, because the state of the machine is part of what is measured.
All six plans then train in the same two processes with one thread each, one step each in turn, so that other
programs disturb all of them alike; both the fastest and the median step are shown.
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

CASES = (
    ("data-parallel", "gpt:layers=2,width=256,heads=4,vocab=2000", 8, 64),
    ("fsdp", "gpt:layers=2,width=256,heads=4,vocab=2000", 8, 64),
    ("megatron", "gpt:layers=2,width=256,heads=4,vocab=2000", 8, 64),
    ("auto", "gpt:layers=2,width=256,heads=4,vocab=2000", 8, 64),
    ("data-parallel", "bert:layers=2,width=256,heads=4,vocab=2000", 8, 64),
    ("auto", "alexnet:image=67,channels=32,hidden=256,classes=100", 16, None),
)


def train(plan_texts: list[str], steps: int) -> list[tuple[list[float], list[float], dict[str, int]]]:
    """On one rank: one step of every plan in turn; per plan wall and processor seconds of each, and bytes of one."""
    import torch
    import torch.distributed as dist

    from shardwright.lowering.collectives import counting
    from shardwright.plans.serial import from_json
    from shardwright.runtime.parallelize import parallelize
    from shardwright.zoo.reference import resolve

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # Adam's averages of vanishing gradients would be slow by chance
    engines = []
    for (_, reference, batch, seq), text in zip(CASES, plan_texts, strict=True):
        resolved = resolve(reference, batch=batch, seq=seq, device="cpu", dtype="float32")
        parallel = parallelize(resolved.model, from_json(text), resolved.args, resolved.kwargs)
        engines.append((parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4), resolved))
    times: list[list[float]] = [[] for _ in engines]
    cores: list[list[float]] = [[] for _ in engines]
    sizes: list[dict[str, int]] = [{} for _ in engines]
    for number in range(-2, steps):  # buckets are laid out in the first step and used from the second
        order = list(range(len(engines)))
        for place in order if number % 2 else order[::-1]:
            parallel, optimizer, resolved = engines[place]
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            with counting() as performed:
                parallel(*resolved.args, **resolved.kwargs).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            dist.barrier()
            if number >= 0:
                times[place].append(time.perf_counter() - began)
                cores[place].append(time.process_time() - used)
            sizes[place] = {}
            for (kind, _), size in performed.bytes.items():
                sizes[place][kind] = sizes[place].get(kind, 0) + size
    return list(zip(times, cores, sizes, strict=True))


def predict(case: tuple, cluster: Any) -> tuple[str, float, float, dict[str, int]]:
    """The plan of a case as JSON, predicted seconds of a step and of a processor, and bytes per kind of collective."""
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph
    from shardwright.plans.serial import to_json
    from shardwright.simulator import simulate
    from shardwright.zoo.reference import resolve

    name, reference, batch, seq = case
    resolved = resolve(reference, batch=batch, seq=seq, device="meta", dtype="float32")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    options = Options(search=name, baselines=(), fewer_devices=False, time_limit=20.0)
    plan = plan_graph(graph, cluster, options)
    timeline = simulate(graph, plan.stages[0].strategy, plan.meshes[0])
    predicted: dict[str, int] = {}
    for (kind, _), (_, size) in timeline.stage().priced.communication.items():
        predicted[kind] = predicted.get(kind, 0) + size
    return to_json(plan), timeline.seconds, processor_seconds(timeline, plan.meshes[0]), predicted


def processor_seconds(timeline: Any, mesh: Any) -> float:
    """The seconds for which a rank's processor is busy: computing, and what is not waiting in a collective."""
    axes = {axis.name: (axis.processor_seconds, axis.processor_share) for axis in mesh.axes}
    total = 0.0
    for event in timeline.ranks[0].events:
        first, share = axes.get(event.stream, (0.0, 1.0))
        first = min(first, event.seconds)
        total += first + share * (event.seconds - first)
    return total


def report(seconds: float, steps: int) -> None:
    """Calibrate, predict and measure all six, print the table. What ``local:2`` remembers is left as it is."""
    from shardwright.cluster import Cluster, Node
    from shardwright.cluster.communication import calibrate_local
    from shardwright.runtime.launch import run_locally

    load = os.getloadavg()[0]
    device, link, _ = calibrate_local(2, seconds)
    cluster = Cluster("local:2", (Node(device, 2, link),), link)
    predictions = [predict(case, cluster) for case in CASES]
    measured = run_locally(train, 2, [text for text, *_ in predictions], steps)[0]
    print(
        "| plan | model | fastest ms | median ms | predicted ms | to fastest | to median | processor ms | predicted | error "
        "| MB performed | MB predicted |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    errors: dict[str, list[float]] = {"the fastest step": [], "the median step": [], "processor time": []}
    for case, (_, guess, core, planned), (times, cores, performed) in zip(CASES, predictions, measured, strict=True):
        least, middle = min(times), statistics.median(times)
        busy = statistics.median(cores)
        found = (guess / least - 1, guess / middle - 1, core / busy - 1)
        for which, error in zip(errors, found, strict=True):
            errors[which].append(error)
        name, reference, batch, _ = case
        print(
            f"| {name} | {reference}, batch {batch} | {1e3 * least:.1f} | {1e3 * middle:.1f} | {1e3 * guess:.1f} "
            f"| {100 * found[0]:+.0f} % | {100 * found[1]:+.0f} % "
            f"| {1e3 * busy:.1f} | {1e3 * core:.1f} | {100 * found[2]:+.0f} % "
            f"| {sum(performed.values()) / 1e6:.2f} | {sum(planned.values()) / 1e6:.2f} |"
        )
    shown = "; ".join(
        f"{which}: median {100 * statistics.median(map(abs, values)):.0f} %, worst {100 * max(map(abs, values)):.0f} %"
        for which, values in errors.items()
    )
    print(f"\nAbsolute error to {shown} ({steps} alternating steps; load average before: {load:.1f}).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=15)
    asked = parser.parse_args()
    report(asked.seconds, asked.steps)


if __name__ == "__main__":
    main()
