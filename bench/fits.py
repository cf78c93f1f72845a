"""What ``shardwright fits`` says against measured memory, and how long it takes.

    python bench/fits.py --run [--only unet llama]   # ask about every measured row, store raw rows: 20 CPU minutes
    python bench/fits.py --speed                     # a Llama of 70 billion parameters: CPU and wall seconds, stored
    python bench/fits.py                             # the tables, from the stored rows
    python bench/fits.py --write                     # into docs/benchmarks/fits.md

Every row is one question, ``account`` of one way on one cluster, beside bytes that were measured: our own H200
(``bench/measured/h200_steps.json``, one device; ``h200_ranks.json`` and ``device_models``, one rank of eight), and what
torchtitan published of Llama 3.1 (``bench/data/world/torchtitan_h100.csv``, reserved bytes in GiB). Eager steps are held to
what the allocator had handed out, recorded and compiled ones to what it had reserved, as each was measured. Nothing is
fitted. torchtitan's rows are asked about as ``--like`` would, in mixed precision; 8-bit floats are asked about as bfloat16,
and the logits as float32 before the loss, which is how its loss computes. Steps that were to be recorded and could not be
were run as eager ones, and are held to what the allocator had handed out.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.exchange import Configuration

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "bench" / "measured"
STORED = MEASURED / "fits"
PAGE = ROOT / "docs" / "benchmarks" / "fits.md"
BEGIN, END = "<!-- python bench/fits.py --write -->", "<!-- end -->"
BAR = 0.08
GIB = 2**30
TITAN = "titan:"
MODES = {
    "fsdp-eager": ("fsdp", "allocated_bytes"),
    "dp-eager": ("data-parallel", "allocated_bytes"),
    "fsdp": ("fsdp", "reserved_bytes"),
    "dp": ("data-parallel", "reserved_bytes"),
    "fsdp-compiled": ("fsdp", "reserved_bytes"),
    "dp-compiled": ("data-parallel", "reserved_bytes"),
}
KINDS = {
    "one": "H200, one device, eager: allocated",
    "rank": "H200, one rank of eight, our choice of plans: allocated",
    "eager": "H200, one rank of eight, eager: allocated",
    "recorded": "H200, one rank of eight, recorded as CUDA graphs: reserved",
    "compiled": "H200, one rank of eight, compiled and recorded: reserved",
    "torchtitan": "torchtitan's Llama 3.1, sequences of 8192 without pipelines: reserved",
    "torchtitan-long": "torchtitan's Llama 3.1, longer sequences or pipelines: reserved",
}
LEAST_CUT = ("2026-11-19_least_cut.jsonl", "2026-11-20.jsonl")
"""Measured since compiled regions keep the least cut for backward: what they took before is of no use now."""
NOT_RECORDED = "run without CUDA graphs"
SPEED_MODEL = "llama:layers=80,width=8192,heads=64,kv_heads=8,inner=28672,seq=4096"


@dataclass(frozen=True)
class Question:
    """One measured row: the model, the configuration's decisions, and the bytes."""

    kind: str
    name: str
    reference: str
    batch: int
    seq: int | None
    dtype: str
    cluster: str
    measured: float
    configuration: Configuration | None = None
    """Another engine's, where that was measured; ``ring``: so many ranks shared its sequences."""
    ring: int = 1
    way: str = ""
    squares: bool = False
    """The model gives no loss of its own, and was trained on the squares of what it gives."""


def one_device() -> Iterator[Question]:
    for row in json.loads((MEASURED / "h200_steps.json").read_text())["rows"]:
        if "error" not in row:
            yield Question(
                "one", f"{row['reference']}, batch {row['batch']}, {row['dtype']}", row["reference"], row["batch"],
                row["seq"], row["dtype"], "1xH200", row["peak_bytes"], way="one device", squares=row.get("squares", False),
            )  # fmt: skip


def ranks() -> Iterator[Question]:
    """Only plans that are a way of ours: of megatron and auto the mesh was the search's choice."""
    for row in json.loads((MEASURED / "h200_ranks.json").read_text()):
        search, reference, batch, seq, dtype = row["case"]
        if "error" not in row and search in ("data-parallel", "fsdp"):
            name = f"{search}, {reference}, batch {batch}"
            yield Question("rank", name, reference, batch, seq, dtype, "8xH200", row["peak_bytes"], way=search)


def models() -> Iterator[Question]:
    """The latest row of every model and mode."""
    import device_step

    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((MEASURED / "device_models").glob("*.jsonl")):
        for text in path.read_text().splitlines():
            row = json.loads(text)
            stale = "compiled" in row["mode"] and path.name not in LEAST_CUT
            known = row["model"] in device_step.MODELS  # others were of a file that is not here
            if known and row["mode"] in MODES and "error" not in row and not stale:
                latest[row["model"], row["mode"]] = row
    for (model, mode), row in latest.items():
        way, measured = MODES[mode]
        kind = "compiled" if "compiled" in mode else "eager" if "eager" in mode else "recorded"
        if any(NOT_RECORDED in note for note in row["notes"]):
            measured = "allocated_bytes"
        reference, rows, length = device_step.MODELS[model]
        yield Question(
            kind, f"{model}, {mode}", reference, rows * device_step.RANKS, length, "bfloat16", "8xH200", row[measured],
            way=way,
        )  # fmt: skip


def titan() -> Iterator[Question]:
    from shardwright.exchange import Configuration
    from shardwright.fitting.engines import of_one_rank
    from world_runs import LLAMA, WORLD

    with (WORLD / "torchtitan_h100.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["memory_gib"]]
    for row in rows:
        layers, hidden, heads, kv_heads, inner, vocabulary = LLAMA[row["model"]]
        gpus, shards, tensor, stages, context, local, batch, length = (
            int(row[key])
            for key in ("gpus", "fsdp", "tensor", "pipeline", "context", "local_batch", "global_batch", "sequence")
        )
        each = 2 if row["schedule"].startswith("Interleaved") else 1
        decisions: dict[str, Any] = {"shard": shards, "tensor": tensor, "sequence": tensor > 1, "context": context}
        decisions |= {"pipeline": stages, "stages_per_device": each, "batch": batch}
        decisions |= {"schedule": "interleaved-1f1b" if each > 1 else "1f1b"}
        if stages > 1:
            # As many micro-batches as pipeline ranks: the default of that year (its docs/pipeline_parallel.md).
            decisions |= {"microbatch": local // stages, "microbatches": stages, "reshard": False}
        decisions["recompute"] = "blocks" if row["recompute"] == "full" else "light"
        simple = length == 8192 and stages == 1
        words = [f"{row['model']} on {gpus}", f"{length} positions", f"fsdp {shards} tensor {tensor} context {context}"]
        words += [f"pipeline {stages} {row['schedule']}"] * (stages > 1) + [f"compile {row['compile']}"]
        words += ["float8"] * (row["float8"] != "no") + ["async tensor"] * (row["async_tp"] == "yes")
        own, ring = of_one_rank(Configuration("torchtitan", precision="bfloat16", length=length, **decisions))
        yield Question(
            "torchtitan" if simple else "torchtitan-long",
            ", ".join(words),
            f"{TITAN}layers={layers},width={hidden},heads={heads},kv_heads={kv_heads},inner={inner},vocab={vocabulary}",
            batch * ring,
            length // ring,
            "bfloat16",
            f"{gpus // 8}x8xH{'200' if row['gpu'].startswith('H200') else '100'}" if gpus > 8 else "8xH100",
            float(row["memory_gib"]) * GIB,
            own,
            ring,
        )


def full_precision_loss(reference: str, batch: int, seq: int | None, dtype: str) -> Any:
    """A Llama whose logits become float32 before the loss, as torchtitan's do."""
    import torch

    from shardwright.frontend import capture
    from shardwright.zoo.reference import resolve

    found = resolve(reference, batch=batch, seq=seq, dtype=dtype)
    head = found.model.head

    class Full(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).float()

    found.model.head = Full()
    return capture(found.model, found.args, found.kwargs)


@lru_cache(maxsize=1)
def captured(reference: str, batch: int, seq: int | None, dtype: str, squares: bool) -> Any:
    import accuracy_cases
    from shardwright.frontend import capture

    if reference.startswith(TITAN):
        return full_precision_loss(f"llama:{reference.removeprefix(TITAN)}", batch, seq, dtype)
    case = accuracy_cases.Case(reference, batch, dtype, seq)
    found = accuracy_cases.resolved_model(case, "meta", squares)
    return capture(found.model, found.args, found.kwargs)


def ask(question: Question) -> dict[str, Any]:
    """The answer to one question, raw."""
    from shardwright.cluster import parse_cluster
    from shardwright.fitting import account, taken
    from shardwright.fitting.ways import compiled_way, in_mixed_precision, usual_ways

    q = question
    graph, cluster = captured(q.reference, q.batch, q.seq, q.dtype, q.squares), parse_cluster(q.cluster)
    way = q.configuration or usual_ways(cluster, q.batch, "adamw")[q.way]
    way = compiled_way(way) if q.kind == "compiled" else way
    told = in_mixed_precision(way)
    began = time.process_time()
    settled = told.on(cluster.size, q.batch)
    found = account(graph, cluster, settled, ring=q.ring)
    return {
        "kind": q.kind,
        "name": q.name,
        "predicted": taken(graph, cluster, settled, ring=q.ring) if q.configuration else found.bytes,
        "handed_out": found.bytes,
        "measured": q.measured,
        "kinds": dict(found.kinds),
        "during": found.during,
        "whole": found.whole,
        "cpu_seconds": time.process_time() - began,
    }


def questions(only: Sequence[str] = ()) -> list[Question]:
    """All of them, those about one graph next to each other."""
    found = [*one_device(), *ranks(), *models(), *titan()]
    found = [q for q in found if not only or any(word in f"{q.kind} {q.name}" for word in only)]
    return sorted(found, key=lambda q: (q.reference, q.batch, q.seq or 0, q.dtype))


def run(only: Sequence[str]) -> None:
    from shardwright.errors import ShardwrightError

    STORED.mkdir(parents=True, exist_ok=True)
    path = STORED / "rows.jsonl"
    kept = [row for row in stored() if only and not any(word in f"{row['kind']} {row['name']}" for word in only)]
    rows, known = [*kept], dict[str, dict[str, Any]]()
    for number, question in enumerate(questions(only)):
        key = repr(replace(question, kind="compiled" * (question.kind == "compiled"), name="", measured=0.0))
        try:
            known.setdefault(key, {})
            known[key] = known[key] or ask(question)
            row = known[key] | {"kind": question.kind, "name": question.name, "measured": question.measured}
        except ShardwrightError as error:
            row = {
                "kind": question.kind,
                "name": question.name,
                "measured": question.measured,
                "refused": error.message,
            }
        rows.append(row)
        print(f"{number} {row['name']}: {row.get('refused') or shown(error_of(row))}", file=sys.stderr, flush=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(rows, key=_place)))


def _place(row: dict[str, Any]) -> tuple[int, str]:
    return list(KINDS).index(row["kind"]), row["name"]


def stored() -> list[dict[str, Any]]:
    path = STORED / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def error_of(row: dict[str, Any]) -> float:
    return row["predicted"] / row["measured"] - 1


def shown(error: float) -> str:
    return f"{100 * error:+.1f} %"


def speed() -> None:
    """Both answers, fitting and not, about 70 billion parameters."""
    from shardwright.cluster import parse_cluster
    from shardwright.fitting import fits_graph
    from shardwright.frontend import capture
    from shardwright.planner import Options
    from shardwright.zoo.reference import resolve

    rows = []
    for cluster, batch, optimizer in (("8x8xH100", 64, "adamw"), ("16x8xH100", 128, "adamw-float32")):
        found = resolve(SPEED_MODEL, batch=batch, dtype="bfloat16")
        began = time.process_time()
        graph = capture(found.model, found.args, found.kwargs)
        taken = {"capture_cpu_seconds": time.process_time() - began}
        for what in ("first", "again"):  # what short graphs and operators are known by then stays
            began, wall = time.process_time(), time.perf_counter()
            answer = fits_graph(graph, parse_cluster(cluster), Options(optimizer=optimizer))
            taken[f"{what}_cpu_seconds"] = time.process_time() - began
            taken[f"{what}_wall_seconds"] = time.perf_counter() - wall
        row = {"cluster": cluster, "batch": batch, "optimizer": optimizer, "fits": answer.fits, **taken}
        rows.append(row | {"ways": len(answer.ways), "changes": len(answer.changes)})
        print(rows[-1], flush=True)
    STORED.mkdir(parents=True, exist_ok=True)
    (STORED / "speed.json").write_text(json.dumps({"model": SPEED_MODEL, "rows": rows}, indent=1) + "\n")


def tables() -> str:
    """Errors by kind of measurement, the rows that miss the bar by name, and seconds."""
    rows = stored()
    lines = [
        f"| measured | rows | within {100 * BAR:.0f} % | median | worst | the worst one |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for kind, title in KINDS.items():
        mine = [row for row in rows if row["kind"] == kind and "refused" not in row]
        if mine:
            errors = [error_of(row) for row in mine]
            worst = max(mine, key=lambda row: abs(error_of(row)))
            near = sum(abs(error) <= BAR for error in errors)
            median = 100 * statistics.median(map(abs, errors))
            lines.append(
                f"| {title} | {len(mine)} | {near} | {median:.1f} % | {shown(error_of(worst))} | {worst['name']} |"
            )
    far = [row for row in rows if "refused" not in row and abs(error_of(row)) > BAR]
    far.sort(key=lambda row: (list(KINDS).index(row["kind"]), -abs(error_of(row))))
    parts = ["\n".join(lines), f"Rows that miss {100 * BAR:.0f} %:"]
    parts.append(
        "\n".join(
            f"- {KINDS[row['kind']]}: {row['name']}: {row['predicted'] / 1e9:.2f} GB said, "
            f"{row['measured'] / 1e9:.2f} measured ({shown(error_of(row))})"
            for row in far
        )
        or "none."
    )
    refused = [f"- {row['name']}: {row['refused']}" for row in rows if "refused" in row]
    parts += ["Rows without an answer:", "\n".join(refused)] if refused else []
    path = STORED / "speed.json"
    if path.exists():
        told = json.loads(path.read_text())
        for row in told["rows"]:
            parts.append(
                f"`{told['model']}` on {row['cluster']}, batch {row['batch']}, {row['optimizer']}: captured in "
                f"{row['capture_cpu_seconds']:.1f} CPU seconds, answered in {row['first_cpu_seconds']:.1f} "
                f"({row['ways']} ways, {row['changes']} changes that fit), asked again {row['again_cpu_seconds']:.1f}."
            )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="ask again, and store the answers")
    parser.add_argument("--only", nargs="*", default=(), help="with --run: rows that have one of these words")
    parser.add_argument("--speed", action="store_true", help="how long an answer takes")
    parser.add_argument("--write", action="store_true", help=f"the tables into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.run:
        run(asked.only)
    if asked.speed:
        speed()
    if asked.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}")
    if not (asked.run or asked.speed or asked.write):
        print(tables())


if __name__ == "__main__":
    main()
