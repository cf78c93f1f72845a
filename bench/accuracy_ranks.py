"""One rank of an eight-way plan on a real device, measured with PyTorch's fake process group, and predicted.

    python bench/accuracy_ranks.py plan -o plans/         # anywhere: makes the plans
    python bench/accuracy_ranks.py measure plans/ -o r.json   # on one GPU; torch alone suffices
    python bench/accuracy_ranks.py predict plans/ r.json

Collectives of the fake group return at once with whatever memory held, so this isolates compute, dispatch and memory of
the lowered program; the prediction simulates the same events with communication that takes no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CLUSTER = "8xH200"
CASES = (
    # name of the search, model, batch, sequence, dtype
    ("data-parallel", "gpt", 64, 1024, "bfloat16"),
    ("fsdp", "gpt", 64, 1024, "bfloat16"),
    ("megatron", "gpt:layers=24,width=1024,heads=16", 16, 1024, "bfloat16"),
    ("auto", "gpt:layers=24,width=1024,heads=16", 16, 1024, "bfloat16"),
    ("data-parallel", "wresnet50:width=2", 256, None, "float32"),
    ("fsdp", "llama:layers=4,vocab=32000", 16, 2048, "bfloat16"),
    ("megatron", "llama:layers=4,vocab=32000", 4, 2048, "bfloat16"),
    ("auto", "bert", 128, 512, "bfloat16"),
)


def _slug(case: tuple) -> str:
    return "-".join(str(part) for part in case).replace(":", "_").replace(",", "_").replace("=", "")


def _model(case: tuple, device: str) -> Any:
    from shardwright.zoo.reference import resolve

    _, reference, batch, seq, dtype = case
    return resolve(reference, batch=batch, seq=seq, device=device, dtype=dtype)


def make_plans(folder: Path) -> None:
    """Plan every case and save the plans."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph

    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        resolved = _model(case, "meta")
        graph = capture(resolved.model, resolved.args, resolved.kwargs)
        options = Options(search=case[0], baselines=(), fewer_devices=False, time_limit=30.0)
        plan = plan_graph(graph, parse_cluster(CLUSTER), options)
        plan.save(folder / f"{_slug(case)}.json")
        print(f"{_slug(case)}: {plan.strategy.axes}, predicted {1e3 * plan.prediction.step_seconds:.1f} ms", flush=True)


def measure_one(number: int, folder: Path, steps: int = 6) -> dict[str, Any]:
    """Train rank 0 of one plan on this GPU."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import (
        FakeStore,
    )  # the public way to this backend is a private module

    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.plans.plan import Signature
    from shardwright.runtime.parallelize import parallelize

    case = CASES[number]
    plan = Plan.load(folder / f"{_slug(case)}.json")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.strategy.devices)
    resolved = _model(case, "meta")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    plan = replace(
        plan, signature=Signature.of(graph)
    )  # another PyTorch may fingerprint the same operators differently
    parallel = parallelize(resolved.model, plan, graph=graph, device="cuda")
    args, kwargs = _on_device(resolved)
    optimiser = torch.optim.AdamW(parallel.parameters(), lr=1e-5)

    def step() -> None:
        out = parallel(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out[0]
        loss.backward()
        del out, loss
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    walls, hosts = [], []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        hosts.append((time.perf_counter() - began) / steps)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - began) / steps)
    row = {"case": list(case), "seconds": statistics.median(walls), "host_seconds": statistics.median(hosts)}
    return row | {"peak_bytes": torch.cuda.max_memory_allocated()}


def _on_device(resolved: Any) -> tuple[tuple, dict]:
    """Real inputs on the GPU in place of the meta ones; integers stay small enough to be valid tokens and classes."""
    import torch

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, dtype=value.dtype, device="cuda")
        return torch.randint(0, 8, value.shape, dtype=value.dtype, device="cuda")

    return tuple(real(a) for a in resolved.args), {k: real(v) for k, v in resolved.kwargs.items()}


def measure(folder: Path, output: Path) -> None:
    """Every case in a process of its own: a failed one must not spoil the device for the others."""
    rows = []
    for number, case in enumerate(CASES):
        command = [sys.executable, __file__, "one", str(folder), "--number", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        row = (
            json.loads(lines[-1])
            if lines
            else {"case": list(case), "error": done.stderr.strip().splitlines()[-1][:300]}
        )
        rows.append(row)
        shown = row.get("error", f"{1e3 * row.get('seconds', 0):.2f} ms, {row.get('peak_bytes', 0) / 2**30:.2f} GiB")
        print(f"{_slug(case)}: {shown}", flush=True)
        output.write_text(json.dumps(rows))


def _counts(timeline: Any) -> np.ndarray:
    """How often the runtime's Python runs: operators, parameters, collectives, exchanges inside operators."""
    events = timeline.events
    exchanges = sum(event.kind == "exchange" for event in events)
    collectives = sum(bool(event.collective) for event in events) - exchanges
    operators = sum(event.kind == "operator" for event in events)
    return np.array([operators, len(timeline.walk.nodes.graph.parameters), collectives, exchanges], dtype=float)


def _fit(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares on relative errors without negative seconds."""
    used = list(range(counts.shape[1]))
    while True:
        found = np.linalg.lstsq(counts[:, used] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            break
        used = [u for u, value in zip(used, found, strict=True) if value > 0]
    result = np.zeros(counts.shape[1])
    result[used] = found
    return result


def predict(folder: Path, measured: Path) -> str:
    """The error table in Markdown.

    The host's seconds of the runtime itself (per operator, parameter, collective and exchange) are fitted to the other
    rows for each row: leave-one-out, because the runtime was not calibrated separately.
    """
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.simulator import simulate
    from shardwright.simulator.engine import run

    rows = [row for row in json.loads(measured.read_text()) if "error" not in row]
    timelines = []
    for row in rows:
        plan = Plan.load(folder / f"{_slug(tuple(row['case']))}.json")
        resolved = _model(tuple(row["case"]), "meta")
        graph = capture(resolved.model, resolved.args, resolved.kwargs)
        timelines.append(simulate(graph, plan.strategy, plan.mesh))
    counts = np.stack([_counts(timeline) for timeline in timelines])
    hosts = np.array([row["host_seconds"] for row in rows])
    device = [run([replace(e, seconds=0.0) if e.collective else e for e in t.events]).seconds for t in timelines]
    lines = [
        "| plan | model | measured ms | its host ms | device alone ms | predicted ms | error "
        "| measured GiB | predicted GiB | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    times, sizes = [], []
    for number, (row, timeline) in enumerate(zip(rows, timelines, strict=True)):
        others = np.arange(len(rows)) != number
        issued = float(counts[number] @ _fit(counts[others], hosts[others]))
        seconds = max(device[number], issued)
        times.append(seconds / row["seconds"] - 1)
        sizes.append(timeline.peak_bytes / row["peak_bytes"] - 1)
        name, reference, batch, _, dtype = row["case"]
        lines.append(
            f"| {name} | {reference}, batch {batch}, {dtype} | {1e3 * row['seconds']:.1f} "
            f"| {1e3 * row['host_seconds']:.1f} | {1e3 * device[number]:.1f} | {1e3 * seconds:.1f} "
            f"| {100 * times[-1]:+.1f} % | {row['peak_bytes'] / 2**30:.2f} | {timeline.peak_bytes / 2**30:.2f} "
            f"| {100 * sizes[-1]:+.1f} % |"
        )
    failed = [row["case"][:2] for row in json.loads(measured.read_text()) if "error" in row]
    lines += [f"| {name} | {model} | did not run | | | | | | | |" for name, model in failed]
    worst = [100 * max(abs(v) for v in values) for values in (times, sizes)]
    middle = [100 * statistics.median(abs(v) for v in values) for values in (times, sizes)]
    constants = ", ".join(f"{1e6 * c:.0f} µs" for c in _fit(counts, hosts))
    lines.append("")
    lines.append(
        f"Step time: median absolute error {middle[0]:.1f} %, worst {worst[0]:.1f} %. "
        f"Peak memory: median {middle[1]:.1f} %, worst {worst[1]:.1f} %, lowest {100 * min(sizes):+.1f} %. "
        f"Host seconds per operator pass, parameter, collective and exchange, fitted to all rows: {constants}."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "measure", "predict", "one"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "plans")
    parser.add_argument("measured", type=Path, nargs="?")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--number", type=int)
    asked = parser.parse_args()
    if asked.command == "plan":
        make_plans(asked.output or asked.folder)
    elif asked.command == "measure":
        measure(asked.folder, asked.output)
    elif asked.command == "one":
        print(json.dumps(measure_one(asked.number, asked.folder)))
    else:
        print(predict(asked.folder, asked.measured))


if __name__ == "__main__":
    main()
