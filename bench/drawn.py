"""How wrong predictions are on models that nobody chose: drawn at random, measured on a GPU, all of them reported.

Pool: every model type of ``transformers`` whose small version was captured (``bench/measured/models.jsonl``), in its
default configuration without dropout, and the zoo with random sizes. Drawn are a model, a batch, a length and a dtype from
one seed; a model of more than ``LARGEST`` parameters is first cut to four layers, then left out, and what was left out
is reported with its reason. Draw *after* prices and profile are frozen, with a seed that was not looked at before.

    python bench/drawn.py --seed 16 -o drawn.json                            # on a machine with a GPU: 4 minutes
    python bench/drawn.py --predict drawn.json --cluster device.toml         # anywhere: predictions, by some calibration
    python bench/drawn.py --table drawn.json                                 # anywhere: the table again
    python bench/drawn.py --seed 16 --list                                   # anywhere: what would be drawn
    python bench/drawn.py --families -o families.json                        # those named below, in place of a draw

Measuring runs in a process of its own, which a failing kernel may take down; the others are then measured in the next.
Needs torch (and transformers for its models). Device time is the sum of all kernels' seconds and, beside it, with the gaps
between kernels that a full queue has on that machine (:func:`accuracy_cases.launch_gap`): prices are those of kernels in a
full queue, gaps included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import accuracy_cases
from accuracy_cases import Case

HERE = Path(__file__).resolve().parent
LARGEST = 1_500_000_000  # parameters: with AdamW in float32 24 GB before the first activation
MODELS, OF_THE_ZOO = 20, 6
BATCHES, LENGTHS, DTYPES = (4, 8, 16, 32), (128, 256, 384), ("float32", "bfloat16")
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers")
REPEATS = 8


FAMILIES = tuple(
    Case(reference, batch, dtype, seq, family)
    for family, reference, batch, seq in (
        ("ConvNeXt", "hf:convnext", 64, None),
        ("DeBERTa", "hf:bench/data/configs/deberta_v3_base.json", 8, 512),
        ("U-Net", "bench/pipeline_models.py:diffusion", 16, None),
    )
    for dtype in DTYPES
)
"""Depthwise convolutions with norms over channels, disentangled attention, group norms: operators that once were far off.
Their paths are those from the repository's root."""


def _types() -> list[str]:
    rows = map(json.loads, (HERE / "measured" / "models.jsonl").read_text().splitlines())
    last = {row["model"]: row["stage"] for row in rows if row["phase"] == "capture"}
    return sorted(
        model.split(":")[1] for model, stage in last.items() if stage == "captured" and model.startswith("hf:")
    )


def _of_the_zoo(draw: random.Random) -> str:
    width, layers = 64 * draw.randint(6, 24), draw.randint(2, 16)
    kinds = (
        f"gpt:layers={layers},width={width},heads={width // 64}",
        f"bert:layers={layers},width={width},heads={width // 64}",
        f"llama:layers={max(2, layers // 2)},width={width},heads={width // 64},kv_heads={width // 64},inner={4 * width}",
        f"wresnet{draw.choice((50, 101))}:width={draw.choice((1, 2))}",
        f"inception:width={draw.choice((0.5, 1.0, 1.5))}",
        f"rnnlm:width={width},layers={draw.randint(1, 3)}",
        f"moe:layers={draw.randint(2, 4)},width={width},heads={width // 64},inner={2 * width}",
    )
    return draw.choice(kinds)


def _parameters(reference: str, batch: int, seq: int | None) -> int:
    from shardwright.zoo.reference import resolve

    return sum(p.numel() for p in resolve(reference, batch=batch, seq=seq, device="meta").model.parameters())


def draw_cases(seed: int) -> tuple[list[Case], list[dict[str, str]]]:
    """Twenty cases, and what was drawn but cannot be measured, with the reason."""
    draw, cases, refused = random.Random(seed), [], []
    types = _types()
    while len(cases) < MODELS:
        zoo = len(cases) >= MODELS - OF_THE_ZOO
        reference = _of_the_zoo(draw) if zoo else f"hf:{draw.choice(types)}:dropout=0"
        batch, length, dtype = draw.choice(BATCHES), draw.choice(LENGTHS), draw.choice(DTYPES)
        try:
            found = _fitting(reference, batch, length)
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            refused.append({"reference": reference, "why": f"cannot be built: {first[:200]}"})
            if "transformers" in first and "not installed" in first:
                raise SystemExit(f"{first} The draw is from its models too.") from None
            continue
        if found is None:
            refused.append({"reference": reference, "why": f"more than {LARGEST} parameters with four layers"})
            continue
        cases.append(Case(found[0], batch, dtype, found[1], "zoo" if zoo else "transformers"))
    return cases, refused


def _fitting(reference: str, batch: int, length: int) -> tuple[str, int | None] | None:
    """The reference, cut to four layers where it is too large, and the length where the model has one."""
    from shardwright.errors import ModelError

    seq: int | None = length
    try:
        count = _parameters(reference, batch, seq)
    except ModelError:
        seq = None  # images, or features of a fixed length
        count = _parameters(reference, batch, seq)
    for field in LAYER_FIELDS if count > LARGEST and reference.startswith("hf:") else ():
        try:
            shorter = f"{reference},{field}=4"
            if _parameters(shorter, batch, seq) < count:
                reference, count = shorter, _parameters(shorter, batch, seq)
        except ModelError:
            continue
    return (reference, seq) if count <= LARGEST else None


def _measure_all(cases: list[Case], log: Path) -> list[dict[str, Any]]:
    """Measure in a subprocess; where one dies, its case is recorded as failed and the next goes on with the others."""
    while True:
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        if len(rows) >= len(cases):
            return rows
        left = json.dumps([asdict(case) for case in cases[len(rows) :]])
        done = subprocess.run([sys.executable, __file__, "--measure", str(log)], input=left, text=True, check=False)
        after = len(log.read_text().splitlines()) if log.exists() else 0
        if after < len(cases) and (done.returncode or after == len(rows)):
            with log.open("a") as file:
                file.write(
                    json.dumps({**asdict(cases[after]), "error": f"the process ended with {done.returncode}"}) + "\n"
                )


def _measure(log: Path) -> None:
    import torch

    torch.set_float32_matmul_precision("highest")
    gap = accuracy_cases.launch_gap()
    for content in json.load(sys.stdin):
        began = time.perf_counter()
        row = accuracy_cases.measure(Case(**content), REPEATS)
        row["device"], row["torch"] = torch.cuda.get_device_properties(0).name, torch.__version__
        row["gap"], row["transformers"] = gap, _transformers()
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{content['reference']}: {row.get('error', 'measured')} ({time.perf_counter() - began:.0f} s)", flush=True
        )
        if "CUDA error" in row.get("error", "") or "AcceleratorError" in row.get("error", ""):
            raise SystemExit(0)  # the device is lost to this process; the row is written


def _transformers() -> str:
    """Its version, which is part of the models: masks that PyTorch's fused attention takes in one are refused in another."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "none"


def kernel_seconds(row: dict[str, Any]) -> float:
    """Seconds of all kernels of a step. Rows without their number counted the optimizer's annotation in, which spans its
    kernels and the gaps between them."""
    if "kernel_count" in row:
        return row["device_seconds"]
    spans = [kernel["device"] for kernel in row["kernels"] if kernel["name"].startswith(accuracy_cases.ANNOTATIONS)]
    return row["device_seconds"] - sum(spans)


def _predict(row: dict[str, Any], cluster: str) -> dict[str, Any]:
    """The row with predicted seconds of step and device, and bytes."""
    import paced
    from accuracy_table import predict
    from shardwright.cluster import mesh_of, parse_cluster

    if "error" in row and not row["error"].startswith("prediction"):
        return row
    row = {key: value for key, value in row.items() if key != "error"}
    mesh = mesh_of(parse_cluster(cluster))
    try:
        case = Case(row["reference"], row["batch"], row["dtype"], row["seq"], row["family"])
        timeline = predict(case, mesh, row.get("squares", False))
        times = paced.compare(row["repeats"], timeline.ranks[0].events, mesh.device)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return {**row, "error": f"prediction: {type(error).__name__}: {first[:300]}"}
    busy = sum(event.seconds for event in timeline.ranks[0].events if event.stream == "compute")
    return {
        **row,
        "predicted_seconds": statistics.median(times.predicted),
        "step_error": times.error,
        "fastest_error": times.unhurried / min(times.measured) - 1,
        "predicted_device_seconds": busy,
        "predicted_bytes": timeline.stage().memory.peak,
        "memory_error": timeline.stage().memory.peak / row["peak_bytes"] - 1,
    }


def device_error(row: dict[str, Any], gaps: bool) -> float | None:
    """Of the predicted device time against all kernels, or these with the gaps between them, where that was measured."""
    if gaps and "gap" not in row:
        return None
    between = row["gap"] * row["kernel_count"] if gaps else 0.0
    return row["predicted_device_seconds"] / (kernel_seconds(row) + between) - 1


def table(content: dict[str, Any]) -> str:
    """All rows, the failed ones too, and medians and worst of what was measured."""
    about = "Three families" if content["seed"] is None else f"Seed {content['seed']}"
    about += f", {content.get('cluster')}, {content.get('device')}, torch {content.get('torch')}."
    models = content.get("transformers"), content.get("predicted_with")
    about += f" Measured with transformers {models[0]}, predicted with {models[1]}." if models[0] != models[1] else ""
    lines = [about, "", "| model | batch | length | dtype | kernels ms | error | with gaps, error | step ms | error "
             "| peak GiB | error |", "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for row in content["rows"]:
        head = f"| {row['reference']} | {row['batch']} | {row['seq'] or '–'} | {row['dtype']} |"
        if "error" in row:
            lines.append(f"{head} not compared: {row['error']} | | | | | | |")
            continue
        step = statistics.median(wall for wall, _ in row["repeats"])
        alone, queued = (device_error(row, gaps) for gaps in (False, True))
        lines.append(
            f"{head} {1e3 * kernel_seconds(row):.2f} | {100 * (alone or 0.0):+.1f} % "
            f"| {'–' if queued is None else f'{100 * queued:+.1f} %'} | {1e3 * step:.2f} "
            f"| {100 * row['step_error']:+.1f} % | {row['peak_bytes'] / 2**30:.2f} | {100 * row['memory_error']:+.1f} % |"
        )
    good = [row for row in content["rows"] if "error" not in row]
    measures = {
        "Device time, kernels alone": [device_error(row, False) for row in good],
        "Device time, with gaps": [device_error(row, True) for row in good],
        "Step time": [row["step_error"] for row in good],
        "Step time, fastest repeat": [row["fastest_error"] for row in good],
        "Peak memory": [row["memory_error"] for row in good],
    }
    for name, found in measures.items():
        errors = [abs(error) for error in found if error is not None]
        if not errors:
            continue
        lines.append(f"\n{name}: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %.")
    lines.append(f"\n{len(good)} of {len(content['rows'])} compared; left out by the rule: {len(content['refused'])}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--cluster", default="1xH200", help="a preset or the file that `shardwright calibrate` wrote")
    parser.add_argument("--predict", type=Path, help="predict what an output measured")
    parser.add_argument("--processes", type=int, default=8, help="that predict side by side")
    parser.add_argument("--list", action="store_true", help="only draw")
    parser.add_argument("--families", action="store_true", help="ConvNeXt, DeBERTa and a U-Net instead of a draw")
    parser.add_argument("--table", type=Path, help="print the table of an output")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        return _measure(asked.measure)
    if asked.table:
        return print(table(json.loads(asked.table.read_text())))
    if asked.predict:
        content = json.loads(asked.predict.read_text())
        with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
            content["rows"] = list(pool.map(_predict, content["rows"], [asked.cluster] * len(content["rows"])))
        content["cluster"], content["predicted_with"] = asked.cluster, _transformers()
        asked.predict.write_text(json.dumps(content))
        return print(table(content))
    cases, refused = (list(FAMILIES), []) if asked.families else draw_cases(asked.seed)
    if asked.list or asked.output is None:
        return print(json.dumps({"cases": [asdict(case) for case in cases], "refused": refused}, indent=1))
    rows = _measure_all(cases, asked.output.with_suffix(".measured.jsonl"))
    content: dict[str, Any] = {"seed": None if asked.families else asked.seed, "refused": refused, "rows": rows}
    content |= {key: row[key] for row in rows for key in ("device", "torch", "transformers") if key in row}
    asked.output.write_text(json.dumps(content))
    print(f"{sum('error' not in row for row in rows)} of {len(rows)} measured; --predict {asked.output} compares them")


if __name__ == "__main__":
    main()
