"""One rank of an eight-way plan on a real device, measured with PyTorch's fake process group, and predicted.

    python bench/accuracy_ranks.py plan                       # anywhere: makes the plans (bench/measured/plans)
    python bench/accuracy_ranks.py measure -o ranks.json      # on one GPU, under 10 minutes; torch alone suffices
    python bench/accuracy_ranks.py predict -m ranks.json      # anywhere: prints the error table
    python bench/accuracy_ranks.py measure --tiny -o r.json   # plans and runs small models on a CPU, to see that it works

Collectives of the fake group return at once, so this isolates compute, dispatch and memory of the lowered program; the
prediction simulates the same events with communication that takes no time. The runtime's Python is predicted from its own
calibration (``bench/host_calibration.py``), not fitted to these rows. Since steps are recorded and replayed as CUDA graphs
no host is in their way, which the simulated step does not know; the device by itself is compared beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

PLANS = Path(__file__).resolve().parent / "measured" / "plans"
CLUSTER = "8xH200"
Case = tuple[str, str, int, int | None, str]
"""Name of the search, model, batch, sequence, dtype."""

CASES: tuple[Case, ...] = (
    ("data-parallel", "gpt", 64, 1024, "bfloat16"),
    ("fsdp", "gpt", 64, 1024, "bfloat16"),
    ("megatron", "gpt:layers=24,width=1024,heads=16", 16, 1024, "bfloat16"),
    ("auto", "gpt:layers=24,width=1024,heads=16", 16, 1024, "bfloat16"),
    ("data-parallel", "wresnet50:width=2", 256, None, "float32"),
    ("fsdp", "llama:layers=4,vocab=32000", 16, 2048, "bfloat16"),
    ("megatron", "llama:layers=4,vocab=32000", 4, 2048, "bfloat16"),
    ("auto", "bert", 128, 512, "bfloat16"),
)
TINY: tuple[Case, ...] = (
    ("fsdp", "gpt:small", 8, 16, "float32"),
    ("data-parallel", "bert:small", 8, 16, "float32"),
)


def _slug(case: Case) -> str:
    return "-".join(str(part) for part in case).replace(":", "_").replace(",", "_").replace("=", "")


def _model(case: Case, device: str) -> Any:
    from shardwright.zoo.reference import resolve

    _, reference, batch, seq, dtype = case
    return resolve(reference, batch=batch, seq=seq, device=device, dtype=dtype)


def make_plans(folder: Path, cases: tuple[Case, ...] = CASES) -> None:
    """Plan every case and save the plans."""
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph

    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        resolved = _model(case, "meta")
        graph = capture(resolved.model, resolved.args, resolved.kwargs)
        options = Options(search=case[0], baselines=(), fewer_devices=False, time_limit=30.0)
        plan = plan_graph(graph, parse_cluster(CLUSTER), options)
        plan.save(folder / f"{_slug(case)}.json")
        print(
            f"{_slug(case)}: {plan.stages[0].strategy.axes}, predicted {1e3 * plan.prediction.step_seconds:.1f} ms",
            flush=True,
        )


def measure_one(case: Case, folder: Path, device: str, repeats: int) -> dict[str, Any]:
    """Train rank 0 of one plan on this device."""
    import torch

    import fake_rank
    import paced
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.plans.plan import Signature
    from shardwright.runtime.parallelize import parallelize

    plan = Plan.load(folder / f"{_slug(case)}.json")
    fake_rank.join_fake_group(plan.stages[0].strategy.devices)
    resolved = _model(case, "meta")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    # Another PyTorch may fingerprint the same operators differently.
    plan = replace(plan, signature=Signature.of(graph))
    parallel = parallelize(resolved.model, plan, graph=graph, device=device)
    _, reference, batch, seq, dtype = case
    args, kwargs = fake_rank.inputs_of(reference, batch=batch, seq=seq, dtype=dtype, device=device)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5, foreach=True)

    def step(mark: Callable[[], None] = lambda: None) -> None:
        mark()
        out = parallel(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out[0]
        mark()
        loss.backward()
        del out, loss
        mark()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark()

    for _ in range(3):
        step()
    peak = fake_rank.peak_bytes(step, 0, device)
    repeated = paced.measure(step, device, repeats=repeats)
    marks: list[float] = []
    step(lambda: marks.append(time.perf_counter()))
    phases = [b - a for a, b in itertools.pairwise(marks)]
    return {
        "case": list(case),
        "repeats": repeated,
        "phases": phases,
        "peak_bytes": peak,
    }


def measure(cases: tuple[Case, ...], folder: Path, output: Path, limit: float, repeats: int) -> None:
    """Every case in a process of its own: a failed one must not spoil the device for the others."""
    import torch

    device = "cuda" if torch.cuda.is_available() and cases is not TINY else "cpu"
    began, rows = time.perf_counter(), []
    for case in cases:
        row: dict[str, Any] = {"case": list(case)}
        left = limit - (time.perf_counter() - began)
        command = [sys.executable, __file__, "one", str(folder), "--case", json.dumps(case), "--device", device]
        command += ["--repeats", str(repeats)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1.0))
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            row = json.loads(lines[-1]) if lines else row | {"error": _last_words(done.stderr)}
        except subprocess.TimeoutExpired:
            row["error"] = "ran out of time"
        rows.append(row)
        peak = row.get("peak_bytes")
        shown = row.get("error") or f"{1e3 * statistics.median(wall for wall, _ in row['repeats']):.2f} ms"
        shown += f", {peak / 2**30:.2f} GiB" if peak else ""
        print(f"{_slug(case)}: {shown}", flush=True)
        output.write_text(json.dumps(rows))


def _last_words(text: str) -> str:
    """What a failed process said last."""
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


def predict(folder: Path, measured: Path) -> str:
    """The error table in Markdown. Communication takes no time; the runtime's Python takes what its calibration says."""
    import paced
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.simulator import simulate
    from shardwright.simulator.engine import run

    stored = json.loads(measured.read_text())
    lines = [
        f"| plan | model | device alone ms | error | {paced.HEADINGS} | measured GiB | predicted GiB | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    times, sizes, devices = [], [], []
    for row in (row for row in stored if "error" not in row):
        plan = Plan.load(folder / f"{_slug(tuple(row['case']))}.json")
        resolved = _model(tuple(row["case"]), "meta")
        graph = capture(resolved.model, resolved.args, resolved.kwargs)
        timeline = simulate(graph, plan.stages[0].strategy, plan.meshes[0])
        events = [event._replace(seconds=0.0) if event.collective else event for event in timeline.ranks[0].events]
        alone = run([event._replace(host=0.0) for event in events]).seconds
        compared = paced.compare(row["repeats"], events, plan.meshes[0].device)
        times.append(compared.error)
        devices.append(alone / statistics.median(compared.measured) - 1)
        name, reference, batch, _, dtype = row["case"]
        held, gap = "–", "–"  # a CPU has no peak of its own
        if row["peak_bytes"]:
            sizes.append(timeline.stage().memory.peak / row["peak_bytes"] - 1)
            held, gap = f"{row['peak_bytes'] / 2**30:.2f}", f"{100 * sizes[-1]:+.2f} %"
        lines.append(
            f"| {name} | {reference}, batch {batch}, {dtype} | {1e3 * alone:.1f} | {100 * devices[-1]:+.2f} % "
            f"| {compared.cells} | {held} | {timeline.stage().memory.peak / 2**30:.2f} | {gap} |"
        )
    failed = [row["case"][:2] for row in stored if "error" in row]
    lines += [f"| {name} | {model} | did not run | | | | | | | | | |" for name, model in failed]
    found = [100 * abs(error) for error in devices]
    alone_too = f"The device alone: median {statistics.median(found):.1f} %, worst {max(found):.1f} %."
    return "\n".join([*lines, "", paced.summary(times, sizes), "", alone_too])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "measure", "predict", "one"))
    parser.add_argument("folder", type=Path, nargs="?", default=PLANS, help="where the plans are")
    parser.add_argument("-m", "--measured", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--case", type=json.loads)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    if asked.command == "plan":
        make_plans(asked.folder, TINY if asked.tiny else CASES)
    elif asked.command == "measure" and asked.tiny:
        with tempfile.TemporaryDirectory() as folder:
            make_plans(Path(folder), TINY)
            measure(TINY, Path(folder), asked.output, asked.limit, asked.repeats)
            print(predict(Path(folder), asked.output))  # of another device: only to see that this works too
    elif asked.command == "measure":
        measure(CASES, asked.folder, asked.output, asked.limit, asked.repeats)
    elif asked.command == "one":
        print(json.dumps(measure_one(tuple(asked.case), asked.folder, asked.device, asked.repeats)))
    else:
        print(predict(asked.folder, asked.measured))


if __name__ == "__main__":
    main()
