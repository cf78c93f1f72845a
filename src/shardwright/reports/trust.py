"""What a plan's numbers rest on: the calibration, its published error, the origin of every rule, what was verified."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.cluster import toml_text
from shardwright.errors import ShardwrightError
from shardwright.files import read_json
from shardwright.graph import Graph
from shardwright.operators.rules import OpRules
from shardwright.plans import Plan
from shardwright.plans.proof_text import warnings_text
from shardwright.reports.html import escape, table
from shardwright.units import seconds_text
from shardwright.version import __version__

ORIGINS = {
    "described": "derived from a description of what the operator computes",
    "elementwise": "elementwise: every loop may be cut",
    "probed": "found by running it whole and in pieces",
    "replicated": "no rule: runs whole on every rank",
}


def published(calibration: str) -> list[dict[str, Any]]:
    """The errors published for a calibration; none where it was never measured.

    >>> [row["median"] for row in published("datasheet, never calibrated")]
    []
    """
    text = Path(__file__).with_name("published.toml").read_text()
    return [row for row in toml_text.loads(text)["error"] if calibration.startswith(row["calibration"])]


def read_verification(path: Path) -> dict[str, Any]:
    """What ``shardwright verify … --json`` printed, with the day it was written."""
    said = read_json(path)
    if not isinstance(said, dict) or "agrees" not in said:
        raise ShardwrightError(
            f"{str(path)!r} is not what `shardwright verify --json` prints.",
            "Write it with `shardwright verify … --json`.",
        )
    return {**said, "date": f"{datetime.date.fromtimestamp(path.stat().st_mtime)}"}


def trust(plan: Plan, graph: Graph, rules: Mapping[str, OpRules], verified: Mapping[str, Any] | None) -> str:
    """The section as HTML."""
    fingerprint = escape(plan.signature.fingerprint[:16])
    rows = [
        ("prices", escape(plan.calibration)),
        ("published error", _errors(plan)),
        ("model", f"{escape(plan.model or 'made from Python objects')}, fingerprint <code>{fingerprint}</code>"),
        ("rules of operators", _origins(graph, rules)),
        ("verified", _verified(plan, verified)),
        ("made with", f"shardwright {escape(__version__)}, page written {datetime.date.today()}"),
    ]
    if plan.replicated:
        lost = sum(seconds for _, _, seconds in plan.replicated)
        rows.append(("without a rule", f"{len(plan.replicated)} operators run whole, {seconds_text(lost)} in all"))
    rows += [("note", escape(note)) for note in [*plan.notes, *warnings_text(plan)]]
    return table("What the numbers rest on", ["what", "where it comes from"], rows)


def _errors(plan: Plan) -> str:
    found = published(plan.calibration)
    if not found:
        return "none: nothing was measured with these prices, so the numbers are estimates from data sheets"
    said = (f"{row['what']}: median {row['median']:g} %, worst {row['worst']:g} %" for row in found)
    return f"{escape('; '.join(said))} ({escape(found[0]['source'])})"


def _origins(graph: Graph, rules: Mapping[str, OpRules]) -> str:
    counts = Counter(rules[op.name].origin for op in graph.ops)
    return escape("; ".join(f"{count} {ORIGINS.get(origin, origin)}" for origin, count in counts.most_common()))


def _verified(plan: Plan, verified: Mapping[str, Any] | None) -> str:
    if verified is None:
        reference = plan.model or "MODEL"
        return (
            f"not with this page: <code>shardwright verify {escape(reference)} --cluster local:2 --json &gt; verified.json"
            "</code>, then <code>shardwright report … --verified verified.json</code>"
        )
    runs = verified.get("strategies", [])
    dtypes = ", ".join(dict.fromkeys(str(run.get("dtype", "")) for run in runs))
    compared = sum(int(run.get("compared", 0)) for run in runs)
    outcome = "all numbers agree" if verified["agrees"] else "NUMBERS DIFFER"
    return escape(
        f"{outcome} with one process: {verified.get('model', '')} on {verified.get('processes', '?')} processes, "
        f"{len(runs)} strategies, {compared} comparisons, {dtypes}; {verified['date']}"
    )
