"""The README's table of results: eight claims, each with its figure, its least favourable figure and one link.

Every figure is read from what stands under ``bench/measured`` or from a table that another program rendered from there
(``docs/benchmarks``), so that the README contradicts neither. ``python -m bench.documents`` puts the table in its place.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy_page
import model_table

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "bench" / "measured"
BENCHMARKS = ROOT / "docs" / "benchmarks"
FACTOR = re.compile(r"\d\.\d\d")


def stored(name: str) -> list[dict[str, Any]]:
    """The rows of a file of one JSON object a line."""
    return [json.loads(line) for line in (MEASURED / name).read_text().splitlines()]


def results() -> str:
    """The table, as Markdown."""
    lines = ["| what | figure | least favourable | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def rows() -> Iterator[tuple[str, str, str, str]]:
    """What is claimed, its figure, its worst figure and where it comes from."""
    yield same_numbers()
    yield any_model()
    yield own_steps()
    yield published_runs()
    yield never_worse()
    yield one_rank()
    yield native()
    yield two_hosts()


def same_numbers() -> tuple[str, str, str, str]:
    latest = {}
    for row in stored("verify.jsonl"):
        latest[row["processes"], row["model"], row["search"], row["dtype"]] = row
    agree = [row["agrees"] for row in latest.values() if "agrees" in row]
    single = sum(key[3] == "float32" for key in latest)
    return (
        "Training gives the numbers of one process: zoo models × strategies on 2 and 4 processes",
        f"{sum(agree)} of {len(agree)} runs agree",
        f"{single} of them are float32 runs, held to 4 times one process's own error",
        "[verify](docs/benchmarks/verify.md)",
    )


def any_model() -> tuple[str, str, str, str]:
    captured, verified, older = {}, {}, {}
    for row in stored("models.jsonl"):
        if not row["model"].startswith(model_table.OWN):
            {"capture": captured, "verify": verified}.get(row["phase"], {})[row["model"]] = row["stage"]
            older |= {row["model"]: "date" not in row} if row["phase"] == "verify" else {}
    tried = [stage for stage in captured.values() if stage not in model_table.NO_TEST]
    good, agree = tried.count("captured"), list(verified.values()).count("verified")
    present = [verified[model] for model, before in older.items() if not before]
    return (
        "Model types of `transformers` 5, tiny: captured, and verified on 2 processes as Megatron and as FSDP",
        f"{good} of {len(tried)} captured, {agree} of {len(verified)} agree",
        f"{len(captured) - len(tried)} more types are not built or called; {sum(older.values())} of {len(older)} were "
        f"verified with an earlier state of the code, of the others {present.count('verified')} of {len(present)} agree",
        "[models](docs/models.md)",
    )


def own_steps() -> tuple[str, str, str, str]:
    found = next(row for row in accuracy_page.seconds() if "eager steps of 18" in row.what)
    drawn = [row for row in accuracy_page.seconds() if "the eager step, host included" in row.what][-1]  # a whole draw
    return (
        f"Predicted step time, one H200, {len(found.rows)} models of our choice",
        f"median error {percent(found, statistics.median)}, worst {percent(found, max)}",
        f"models drawn at random: {percent(drawn, statistics.median)} and {percent(drawn, max)}",
        "[accuracy](docs/accuracy.md)",
    )


def percent(errors: accuracy_page.Errors, of: Any) -> str:
    return f"{100 * of([abs(error) for _, error in errors.rows]):.1f} %"


def published_runs() -> tuple[str, str, str, str]:
    shares: dict[str, list[float]] = {}
    for way in accuracy_page.world.WAYS:
        for source in accuracy_page.SOURCES:
            pairs = accuracy_page._pairs(way, source)[1]
            if pairs:
                shares.setdefault(way, []).append(accuracy_page._figures(way, source)["right order"] / pairs)
    best, planner = shares["engine's"], shares["ours"]
    return (
        "Pairs of training runs published by others, put in the right order",
        f"{100 * min(best):.0f} to {100 * max(best):.0f} %, priced as their engine ran them",
        f"by the planner's own prices {100 * min(planner):.0f} to {100 * max(planner):.0f} %",
        "[accuracy](docs/accuracy.md#order)",
    )


def never_worse() -> tuple[str, str, str, str]:
    latest = {(row["model"], row["devices"]): row for row in stored("joint/never_worse.jsonl")}
    bounded = [row["step"] / row["bound"] - 1 for row in latest.values() if row.get("step") and row.get("bound")]
    slower = [
        row["model"]
        for row in latest.values()
        for seconds in row.get("baselines", {}).values()
        if row.get("step") and isinstance(seconds, float) and seconds < row["step"] * (1 - 1e-9)
    ]
    assert not slower, slower
    return (
        f"Plans beside every named recipe, {len(latest)} cases on 8, 64 and 512 H100, simulated",
        "none slower than a recipe",
        f"above the proved bound on the step by {100 * statistics.median(bounded):.1f} % in the median, "
        f"{100 * max(bounded):.0f} % at worst",
        "[joint](docs/benchmarks/joint.md#through-the-planner-never-worse-than-any-baseline)",
    )


def one_rank() -> tuple[str, str, str, str]:
    page = (BENCHMARKS / "device.md").read_text()
    cells = [row[8] for row in accuracy_page.table_rows(page, "| per step, ms")]
    factors = [[float(f) for f in FACTOR.findall(cell)] for cell in cells]
    return (
        f"Step of one rank of eight on an H200, compiled, against one device, {len(cells)} models (no network)",
        f"{min(map(min, factors)):.2f} times at best",
        f"{max(map(max, factors)):.2f} times",
        "[device](docs/benchmarks/device.md)",
    )


def native() -> tuple[str, str, str, str]:
    text = (MEASURED / "runtime_native_2026-11-17.txt").read_text()
    found = dict(re.findall(r"^(ddp|fully_shard|parallelize_module) .* ratio (\d\.\d+)", text, re.MULTILINE))
    return (
        "Step against PyTorch's own engines, GPT, 2 CPU processes",
        f"{found['parallelize_module']} times `parallelize_module`, {found['fully_shard']} times `fully_shard`",
        f"{found['ddp']} times DDP",
        "[running](docs/benchmarks/runtime.md)",
    )


def two_hosts() -> tuple[str, str, str, str]:
    text = (MEASURED / "two_hosts_2026-11-17.txt").read_text()
    ratios = re.findall(r"^\| DDP \|.* (\d+\.\d+) \| \d+\.\d+ \| [+-]\d+ % \|$", text, re.MULTILINE)
    worst = re.search(r"Worst error of prediction: .*speed-up (\d+) %", text)
    assert worst is not None
    return (
        "Found plans against DDP, two emulated hosts at 1 Gbit/s, AlexNet and RNNLM",
        " and ".join(ratios) + " times faster",
        f"predicted speed-ups up to {worst[1]} % off",
        "[two hosts](docs/benchmarks/two_hosts.md)",
    )
