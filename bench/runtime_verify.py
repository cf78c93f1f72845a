"""Every model and every strategy that applies, on local processes, against the eager model on one.

The same comparison as `shardwright verify` (three AdamW steps; loss, gradients, parameters, buffers), in float64 and in
float32, for the whole zoo and seven models of Hugging Face with one start of the processes. Every result is appended to a
file as it comes, and pairs that the file has for the same sources are not run again, so an interrupted run is simply
started anew.

    python -m bench.runtime_verify --processes 4            # run what is missing
    python -m bench.runtime_verify --table                  # the results as a table
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwright
from shardwright.errors import Infeasible, RunError, ShardwrightError
from shardwright.runtime.launch import run_locally
from shardwright.search.baselines import BASELINES
from shardwright.zoo import ENTRIES
from shardwright.zoo.reference import resolve

HUGGING_FACE = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet")
MODELS = [f"{name}:small" for name in ENTRIES] + [f"hf:{name}:small" for name in HUGGING_FACE]
SEARCHES = ("auto", *BASELINES)
DTYPES = ("float64", "float32")
RESULTS = Path(__file__).parent / "measured" / "verify.jsonl"


def sources() -> str:
    """A digest of the code that decides the numbers: results of other code are not reused."""
    total = hashlib.sha256()
    for path in sorted(Path(shardwright.__file__).parent.rglob("*.py")):
        if path.parts[-2] not in ("cli", "reports", "simulator"):
            total.update(path.read_bytes())
    return total.hexdigest()[:10]


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last result of every pair, whatever sources it is of."""
    return {key(row)[1:]: row for row in recorded(path)}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["sources"], row["processes"], row["model"], row["search"], row["dtype"])


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    about = row.get("failed") or row.get("refused") or (f"same plan as {row['same_as']}" if "same_as" in row else "")
    numbers = " ".join(f"{what} {w['relative']:.1e} {w['times']:.2f}x" for what, w in row.get("worst", {}).items())
    verdict = {True: "agrees", False: "DIFFERS"}.get(row.get("agrees"), "")
    print(f"{row['model']:18s} {row['search']:16s} {row['dtype']} {verdict} {numbers} {about}"[:220], flush=True)


def build(reference: str):
    resolved = resolve(reference, device="cpu")
    return resolved.model, resolved.args, resolved.kwargs


def from_first(make):
    """What rank 0 makes, on every rank; its refusals too."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except ShardwrightError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], ShardwrightError):
        raise box[0]
    return box[0]


class Model:
    """One model in one precision: built and captured on every rank, trained alone on rank 0."""

    def __init__(self, reference: str, dtype: str, steps: int) -> None:
        from shardwright.verification.judging import truth_of
        from shardwright.verification.prepare import subject

        double = dtype == "float64"
        it = subject(functools.partial(build, reference), double)
        self.model, self.args, self.kwargs = it.model, it.args, it.kwargs
        self.graph = from_first(lambda: it.graph)
        own = double and dist.get_rank() == 0
        self.steps, self.shown = it.steps(steps), it.shown
        self.truth = truth_of(self.model, self.steps) if own else None


def strategies(graph: Any, cluster: str, searches: list[str]) -> Iterator[tuple[str, Any]]:
    """Per search its strategy, the name of an earlier search with the same one, or why it does not apply."""
    from shardwright.cluster import parse_cluster
    from shardwright.planner import Options, plan_graph

    known: dict[str, str] = {}
    for search in searches:
        options = Options(search=search, baselines=(), fewer_devices=False, time_limit=20.0)
        try:
            strategy = from_first(lambda: plan_graph(graph, parse_cluster(cluster), options).stages[0].strategy)  # noqa: B023
        except Infeasible as error:
            yield search, error
            continue
        text = str(readable(vars(strategy)))
        same = known.setdefault(text, search)
        yield search, same if same != search else strategy


def readable(value: Any) -> Any:
    """Mappings and sets in an order that depends on their contents only."""
    if isinstance(value, Mapping):
        return sorted((str(name), str(readable(item))) for name, item in value.items())
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value


@functools.lru_cache
def mesh_of(axes: tuple[tuple[str, int], ...]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))


def verify_all(
    missing: dict[str, list[tuple[str, str]]], steps: int, common: dict[str, Any], path: Path, started: Path
) -> None:
    """Runs on every rank. ``missing`` names per model the (search, dtype) pairs to run."""
    from shardwright.verification.compare import KINDS
    from shardwright.verification.verify import check

    first, cluster = dist.get_rank() == 0, f"local:{dist.get_world_size()}"

    def note(row: dict[str, Any]) -> None:
        if first:
            append(path, {**common, **row})

    for reference, wanted in missing.items():
        if first:
            started.write_text(json.dumps({"model": reference, "pairs": wanted}))
        models = {dtype: Model(reference, dtype, steps) for dtype in dict.fromkeys(dtype for _, dtype in wanted)}
        for dtype, model in models.items():
            searches = [search for search, wish in wanted if wish == dtype]
            for search, strategy in strategies(model.graph, cluster, searches):
                row = {"model": reference, "search": search, "dtype": dtype}
                began = time.perf_counter()
                if isinstance(strategy, Infeasible):
                    note({**row, "refused": strategy.message})
                    continue
                if isinstance(strategy, str):
                    note({**row, "same_as": strategy})
                    continue
                if first:
                    started.write_text(json.dumps({"model": reference, "pairs": [(search, dtype)]}))
                answer = check(
                    model.model,
                    tuple(model.args),
                    model.kwargs,
                    strategy,
                    steps=model.steps,
                    mesh=mesh_of(strategy.axes),
                    graph=model.graph,
                    truth=model.truth,
                    shown=model.shown,
                )
                if answer is not None:
                    worst = {what: item for what in KINDS if (item := answer.worst(what)) is not None}
                    note(
                        {
                            **row,
                            "agrees": answer.agrees,
                            "mesh": strategy.axes,
                            "compared": len(answer.comparisons),
                            "kinks": sum(item.kink for item in answer.comparisons),
                            "worst": {
                                what: {"name": item.name, "relative": item.relative, "times": item.times}
                                for what, item in worst.items()
                            },
                            "seconds": round(time.perf_counter() - began, 1),
                        }
                    )


def run(processes: int, models: list[str], searches: list[str], dtypes: list[str], steps: int, path: Path) -> None:
    """Run what the file lacks; a failure is recorded with its pair and the rest goes on in new processes."""
    common = {"sources": sources(), "commit": commit(), "date": time.strftime("%Y-%m-%d"), "processes": processes}
    started = path.with_suffix(f".{processes}.started")
    while True:
        done = {key(row) for row in recorded(path)}
        missing = {}
        for model in models:
            pairs = [(search, dtype) for dtype in dtypes for search in searches]
            lacking = [(s, d) for s, d in pairs if (common["sources"], processes, model, s, d) not in done]
            if lacking:
                missing[model] = lacking
        if not missing:
            break
        try:
            run_locally(verify_all, processes, missing, steps, common, path, started, seconds=7200)
        except RunError as error:
            where = json.loads(started.read_text())
            for search, dtype in where["pairs"]:
                row = {"model": where["model"], "search": search, "dtype": dtype, "failed": error.message[:2000]}
                append(path, {**common, **row})
    started.unlink(missing_ok=True)


def table(path: Path) -> str:
    """Per model: pairs that agree, of those that apply; largest relative difference, or multiple of one process's error."""
    rows = latest(path)
    columns = sorted(
        {(row["processes"], row["dtype"]) for row in rows.values()}, key=lambda c: (c[0], c[1] != "float64")
    )
    about = sorted({f"{row['date']}, commit {row['commit']}" for row in rows.values()})
    lines = ["; ".join(about), "", "| model | " + " | ".join(f"{n} processes, {dtype}" for n, dtype in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for model in dict.fromkeys(row["model"] for row in rows.values()):
        cells = []
        for processes, dtype in columns:
            mine = [r for k, r in rows.items() if k[:2] == (processes, model) and k[3] == dtype]
            cells.append(cell(mine, dtype))
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    for row in rows.values():
        if "failed" in row or row.get("agrees") is False:
            where = f"{row['model']}, {row['search']}, {row['processes']} processes, {row['dtype']}"
            lines.append(
                f"\n- {where}: {row.get('failed', 'differs').splitlines()[0]} {json.dumps(row.get('worst', ''))}"
            )
    return "\n".join(lines)


def cell(rows: list[dict[str, Any]], dtype: str) -> str:
    by_search = {row["search"]: row for row in rows}
    applying = [row for row in rows if "refused" not in row]
    agreeing = [row for row in applying if by_search.get(row.get("same_as", ""), row).get("agrees")]
    measured = [row["worst"] for row in rows if "worst" in row]
    if not measured:
        return f"{len(agreeing)}/{len(applying)}"
    if dtype == "float64":
        number = f"{max(item['relative'] for worst in measured for item in worst.values()):.0e}"
    else:
        number = f"{max(item['times'] for worst in measured for item in worst.values()):.1f}×"
    kinks = sum(row.get("kinks", 0) > 0 for row in rows)
    beside = f", {kinks} beside a kink" if kinks else ""
    return f"{len(agreeing)}/{len(applying)} ({len(measured)} plans), {number}{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--searches", nargs="*", default=list(SEARCHES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is recorded, run nothing")
    given = parser.parse_args()
    if not given.table:
        run(given.processes, given.models, given.searches, given.dtypes, given.steps, given.results)
    print(table(given.results))
    wrong = [row for row in latest(given.results).values() if row.get("agrees") is False or "failed" in row]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
