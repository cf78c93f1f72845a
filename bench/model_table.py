"""The rows of :mod:`bench.model_sweep` as a page: how many came how far, and the reason of every one that did not."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from bench.sweep_workers import OWN

Rows = dict[str, dict[str, Any]]
NOTES = Path(__file__).parent / "measured" / "models_notes.md"
"""What is to be said about the rows that the file has now."""
NO_TEST = {
    "eager": "the tiny model does not run by itself with the example inputs",
    "build": "no tiny model can be built from its configuration class",
}
CAPTURE = {
    "captured": "captured: the graph gives the eager loss and gradients",
    "capture": "refused by capture, with a reason",
    "differs": "captured, but the graph gives other numbers (the replay shows it)",
    "replay": "captured, but the graph does not run",
    "time limit": "not finished within the time limit",
    "crash": "the process died",
}
VERIFY = {
    "verified": "planned as `megatron` and `fsdp` and equal to one process in float64",
    "capture in float64": "refused by capture in float64",
    "one process in float64": "no truth: the model does not run in float64 on one process",
    "plan": "refused by the planner",
    "run": "refused when parallelized or run",
    "differs": "other numbers than one process (verification says so)",
    "time limit": "not finished within the time limit",
    "crash": "the process died",
}


def table(captured: Rows, verified: Rows, called: Rows, pieces: Rows) -> str:
    """All phases as Markdown."""
    types = {name: row for name, row in captured.items() if not name.startswith(OWN)}
    parts = [_HEAD, NOTES.read_text(), *_calls(types, called)]
    for title, own in (("Architectures of `transformers`", False), ("Models that are not Hugging Face's", True)):
        one = {name: row for name, row in captured.items() if name.startswith(OWN) == own}
        two = {name: row for name, row in verified.items() if name.startswith(OWN) == own}
        parts += [f"## {title}", "", *_section(one, two)]
    parts += ["## In micro-batches", "", *_pieces(pieces)]
    return "\n".join(parts)


_HEAD = """# Any model

Made by `python -m bench.model_sweep table` from `bench/measured/models.jsonl`; `python -m bench.model_sweep call`,
`... capture`, `... verify` and `... pieces` run what is missing there. Every model is tiny and otherwise as its
configuration class makes it, caches on. Rows marked ° are of an earlier sweep than the newest, by an older state of the
code; every reason names the commit that its row is of.
"""


def _calls(captured: Rows, called: Rows) -> list[str]:
    """How many types are built and called at all, which every row of capture says; rows of ``call`` say with what."""
    good = [name for name, row in captured.items() if row["stage"] not in NO_TEST]
    known = [row for name, row in called.items() if name in good and row["stage"] == "called"]
    text = sorted(_short(row["model"]) for row in known if row.get("text alone"))
    share = f"{len(good)} ({len(good) / max(1, len(captured)):.1%})"
    return [
        "## Built and called",
        "",
        f"{len(captured)} types of `transformers` have a model class; {share} are built at tiny sizes and called, forward "
        "and backward, with inputs from `zoo/hf_types.toml`; the rest stands below by name and reason. "
        f"Of {len(known)} the row says what they were given"
        + (f"; of these {len(text)} that read more were given text alone: {', '.join(text)}." if text else "."),
        "",
        *_made_by(called),
    ]


def _pieces(rows: Rows) -> list[str]:
    """Trained in micro-batches: through two stages, and added up on one mesh."""
    if not rows:
        return ["No rows yet.", ""]
    right = sum(row["stage"] == "verified" for row in rows.values())
    lines = [
        f"{len(rows)} types of `transformers`, the first in an order drawn at random from all captured ones, in four "
        "micro-batches, as a pipeline of two stages (1F1B) and with gradients added up under `fsdp`, in float64 on two "
        f"processes: {right} agree in both ways with one process on the whole batch.",
        "",
    ]
    for stage, words in VERIFY.items():
        lines += _reasons(rows, stage, words) if stage != "verified" else []
    return [*lines, *_names(rows), *_made_by(rows)]


def _names(rows: Rows) -> list[str]:
    older = _older(rows)
    names = sorted(_short(name) + older[name] for name, row in rows.items() if row["stage"] == "verified")
    return ["### Verified", "", ", ".join(names) + ".", ""]


def _made_by(rows: Rows) -> list[str]:
    """Which code the rows are of, and what they took."""
    commits = Counter(row["commit"] for row in rows.values())
    lines = ["Rows by commit: " + ", ".join(f"{name} ({count})" for name, count in commits.most_common()) + "."]
    costs = [(row["cpu_seconds"], row["peak_mb"], name) for name, row in rows.items() if "peak_mb" in row]
    if costs:
        seconds = statistics.median(cost[0] for cost in costs)
        slowest, largest = max(costs), max(costs, key=lambda cost: cost[1])
        lines.append(
            f"Processor seconds of a worker for one model: {seconds:.1f} in the median of {len(costs)}, {slowest[0]:.0f} at "
            f"most ({_short(slowest[2])}); memory at the peak: at most {largest[1]:,} MB ({_short(largest[2])})."
        )
    older = sum(map(bool, _older(rows).values()))
    return [*lines, *([f"{older} of {len(rows)} rows are of an earlier sweep."] if older else []), ""]


def _older(rows: Rows) -> dict[str, str]:
    """A mark for every row of an earlier sweep than the newest, which may have gone on past midnight."""
    newest = max((row["date"] for row in rows.values() if row.get("date")), default="")
    since = newest and str(datetime.date.fromisoformat(newest) - datetime.timedelta(days=1))
    return {name: "" if since and row.get("date", "") >= since else "°" for name, row in rows.items()}


def _section(captured: Rows, verified: Rows) -> list[str]:
    tried = {name: row for name, row in captured.items() if row["stage"] not in NO_TEST}
    good = sum(row["stage"] == "captured" for row in tried.values())
    # Only what was captured counts for the second figure; without a truth in float64 there is nothing to compare.
    judged = {n: r for n, r in verified.items() if n in tried and r["stage"] != "one process in float64"}
    right = sum(row["stage"] == "verified" for row in judged.values())
    wrong = sum(bool(row.get("traceback")) for row in (*tried.values(), *judged.values()))
    random = sum(bool(row.get("random")) for row in tried.values())
    lines = [
        f"{len(captured)} models; {len(tried)} of them run by themselves. Of these {len(tried)}, {good} "
        f"({good / max(1, len(tried)):.1%}) are captured"
        + (f" ({random} draw random numbers, so that only their capture is judged, not their replay)" if random else "")
        + f". Of {len(judged)} that were verified, {right} ({right / max(1, len(judged)):.1%}) agree under both strategies. "
        f"Tracebacks in place of a sentence: {wrong}.",
        "",
        *_newest(captured, verified),
    ]
    lines += ["| models | outcome of capture |", "|---|---|", *_counts(captured, {**CAPTURE, **NO_TEST}), ""]
    lines += ["| models | outcome of verification |", "|---|---|", *_counts(verified, VERIFY), ""]
    for stage, words in {**CAPTURE, **NO_TEST}.items():
        lines += _reasons(captured, stage, words) if stage != "captured" else []
    for stage, words in VERIFY.items():
        lines += _reasons(verified, stage, words) if stage != "verified" else []
    made = [
        part
        for title, rows in (("Capture.", captured), ("Verification.", verified))
        for part in (title, *_made_by(rows))
    ]
    return [*lines, *_names(verified), *made]


def _newest(captured: Rows, verified: Rows) -> list[str]:
    """The same figures of the newest sweep alone, where not all rows are of it."""
    older = {**_older(captured), **{f"{name} verified": mark for name, mark in _older(verified).items()}}
    if not any(older.values()):
        return []
    tried = [row for name, row in captured.items() if not older[name] and row["stage"] not in NO_TEST]
    judged = [row for name, row in verified.items() if not older[f"{name} verified"]]
    judged = [row for row in judged if row["stage"] != "one process in float64"]
    good, right = (
        sum(row["stage"] == what for row in rows) for rows, what in ((tried, "captured"), (judged, "verified"))
    )
    return [
        f"By the newest sweep alone: {good} of {len(tried)} captured, {right} of {len(judged)} verified.",
        "",
    ]


def _counts(rows: Rows, stages: dict[str, str]) -> list[str]:
    counts = Counter(row["stage"] for row in rows.values())
    return [f"| {counts[stage]} | {words} |" for stage, words in stages.items() if counts[stage]]


def _reasons(rows: Rows, stage: str, words: str) -> list[str]:
    found = sorted((name, row) for name, row in rows.items() if row["stage"] == stage)
    if not found:
        return []
    older = _older(rows)
    lines = [f"### {words[0].upper()}{words[1:]}", "", "| model | commit | why |", "|---|---|---|"]
    for name, row in found:
        why = row.get("why") or f"largest relative difference {row.get('difference', row.get('relative', 0)):.1e}"
        mark = "**traceback** " if row.get("traceback") else ""
        lines.append(
            f"| {_short(name)}{older[name]} | {row['commit']} | {mark}{' '.join(why.replace('|', '/').split())[:260]} |"
        )
    return [*lines, ""]


def _short(name: str) -> str:
    return name.removeprefix(OWN).removeprefix("hf:").removesuffix(":small")
