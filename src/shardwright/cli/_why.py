"""What ``shardwright explain`` prints about a plan's operators: how each is split, what that costs, what else there was."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.cli._show import console, mesh_text, print_json, seconds_text, table

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def explain_plan(plan: Plan, graph: Graph, as_json: bool) -> None:
    """Every decision once: operators and parameters of repeated blocks are shown for the first block."""
    from shardwright.reports.explaining import explained_plan

    document = explained_plan(plan, graph)
    if as_json:
        print_json(document)
        return
    rows, parameters = document["operators"], document["parameters"]
    for number, stage in enumerate(plan.stages):
        where = mesh_text(stage.strategy.axes) + (f", stage {number}" if len(plan.stages) > 1 else "")
        shown = [
            [str(r["operator"]), str(r["target"]), str(r["module"]), _split_text(r["split"]), f"×{r['times']}"]
            for r in rows
            if r["stage"] == number
        ]
        table(f"Splits over {where}", ["operator", "target", "module", "cuts per axis", "repeated"], shown)
        folded: dict[tuple[str, str], int] = {}
        for p in parameters:
            if p["stage"] == number:
                key = (re.sub(r"\.\d+(?=\.|$)", ".*", str(p["parameter"])), ", ".join(p["resting"]))
                folded[key] = folded.get(key, 0) + 1
        table(
            f"Parameters at rest over {where}",
            ["parameter", "layout", "repeated"],
            [[name, layout, f"×{count}"] for (name, layout), count in folded.items()],
            caption=document["binding"] if number == len(plan.stages) - 1 else "",
        )
    for name, what, seconds in plan.replicated:
        console.print(f"{name} runs whole on every rank for want of a rule ({what}): {seconds_text(seconds)}.")


def explain_operator(plan: Plan, graph: Graph, pattern: str, as_json: bool) -> None:
    """One operator (by name, module path or pattern): its split, its cost, the next-best options and their totals."""
    from shardwright.reports.explaining import explained_operators, matching

    document = explained_operators(plan, graph, pattern)
    if as_json:
        print_json(document)
        return
    for entry in document:
        count = entry["repeated"]
        table(
            f"{entry['operator']} ({entry['target']}) in {entry['module'] or 'the model'}, {entry['source']}"
            + (f", stage {entry['stage']}" if len(plan.stages) > 1 else "")
            + (f", one of {count} that decide together" if count > 1 else ""),
            ["cuts per axis", "reads → makes", "these operators" if count > 1 else "operator itself", "best total", ""],
            [
                [
                    _split_text(o["split"]),
                    o["layouts"],
                    seconds_text(o["own_seconds"]),
                    seconds_text(o["total_seconds"]) if np.isfinite(o["total_seconds"]) else "does not fit",
                    "◀ chosen" if o["chosen"] else "",
                ]
                for o in entry["options"]
            ],
            caption=f"Best total: the smallest sum of seconds with this option, all else decided anew. {entry['binding']}"
            + ("" if entry["options"][0]["chosen"] else " The chosen one is faster when simulated, with overlap."),
        )
    if (more := len(matching(graph, pattern)) - len(document)) > 0:
        console.print(f"{more} more operators match {pattern!r}.")
    console.print("To insist on another option: shardwright plan PLAN.json --pin 'OPERATOR=cut,cut,…' -o OTHER.json")


def _split_text(split: Any) -> str:
    return ", ".join("–" if loop is None else str(loop) for loop in split)
