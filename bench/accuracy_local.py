"""Two local processes over gloo: measured and predicted step time, performed and predicted communication, of six plans.

    python bench/accuracy_local.py [--seconds 45]

This machine is calibrated as ``local:2`` first (``--seconds`` long, unless a calibration is cached). Each plan trains in two
processes with one thread each; the fastest of several steps is kept, because other programs share the cores.
"""

from __future__ import annotations

import argparse
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


def train(case: tuple, plan_text: str, steps: int) -> tuple[list[float], dict[str, int]]:
    """On one rank: train a few steps; the seconds of each and the bytes communicated in one."""
    import torch
    import torch.distributed as dist

    from shardwright.lowering.collectives import counting
    from shardwright.plans.serial import from_json
    from shardwright.runtime.parallelize import parallelize
    from shardwright.zoo.reference import resolve

    torch.set_num_threads(1)
    _, reference, batch, seq = case
    resolved = resolve(reference, batch=batch, seq=seq, device="cpu", dtype="float32")
    parallel = parallelize(resolved.model, from_json(plan_text), resolved.args, resolved.kwargs)
    optimiser = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    times = []
    for number in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        with counting() as performed:
            parallel(*resolved.args, **resolved.kwargs).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        dist.barrier()
        if number:
            times.append(time.perf_counter() - began)
    sizes: dict[str, int] = {}
    for (kind, _), size in performed.bytes.items():
        sizes[kind] = sizes.get(kind, 0) + size
    return times, sizes


def compare(case: tuple, steps: int) -> dict[str, Any]:
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph
    from shardwright.plans.serial import to_json
    from shardwright.runtime.launch import run_locally
    from shardwright.simulator import simulate
    from shardwright.zoo.reference import resolve

    name, reference, batch, seq = case
    resolved = resolve(reference, batch=batch, seq=seq, device="meta", dtype="float32")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    options = Options(search=name, baselines=(), fewer_devices=False, time_limit=20.0)
    plan = plan_graph(graph, parse_cluster("local:2"), options)
    timeline = simulate(graph, plan.strategy, plan.mesh)
    predicted: dict[str, int] = {}
    for (kind, _), (_, size) in timeline.walk.communication.items():
        predicted[kind] = predicted.get(kind, 0) + size
    times, performed = run_locally(train, 2, case, to_json(plan), steps)[0]
    return {
        "case": case,
        "measured": min(times),
        "median": statistics.median(times),
        "predicted": timeline.seconds,
        "performed": performed,
        "bytes": predicted,
    }


def report(seconds: float, steps: int) -> None:
    """Calibrate if need be, measure and predict all six, print the table."""
    from shardwright.cluster.calibrate import ensure_local

    ensure_local("local:2", seconds)
    print("| plan | model | fastest ms | median ms | predicted ms | error | MB performed | MB predicted |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    errors = []
    for case in CASES:
        row = compare(case, steps)
        errors.append(row["predicted"] / row["measured"] - 1)
        done, planned = sum(row["performed"].values()) / 1e6, sum(row["bytes"].values()) / 1e6
        print(
            f"| {case[0]} | {case[1]}, batch {case[2]} | {1e3 * row['measured']:.1f} | {1e3 * row['median']:.1f} "
            f"| {1e3 * row['predicted']:.1f} | {100 * errors[-1]:+.0f} % | {done:.2f} | {planned:.2f} |",
            flush=True,
        )
    print(f"\nStep time: median absolute error {100 * statistics.median(map(abs, errors)):.0f} %.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    report(asked.seconds, asked.steps)


if __name__ == "__main__":
    main()
