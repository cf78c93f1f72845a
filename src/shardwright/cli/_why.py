"""What ``shardwright explain`` says about a plan's operators: how each is split, what that costs, what else there was."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.cli._show import console, mesh_text, print_json, seconds_text, table
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def explain_plan(plan: Plan, graph: Graph, as_json: bool) -> None:
    """Every decision once: operators of repeated blocks are shown for the first block."""
    from shardwright.graph.repeats import representatives
    from shardwright.plans.serial import layout_text

    standing = representatives(graph)
    times: dict[str, int] = {}
    for first in standing.values():
        times[first] = times.get(first, 0) + 1
    rows = [
        {
            "operator": op.name,
            "target": op.target,
            "module": op.module,
            "source": op.source,
            "split": plan.strategy.splits[op.name],
            "times": times[op.name],
        }
        for op in graph.ops
        if standing[op.name] == op.name
    ]
    parameters = [
        {"parameter": p.paths[0], "resting": layout_text(plan.strategy.resting[p.tensor])} for p in graph.parameters
    ]
    if as_json:
        print_json({"operators": rows, "parameters": parameters, "replicated": plan.replicated})
        return
    shown = [
        [str(r["operator"]), str(r["target"]), str(r["module"]), _split_text(r["split"]), f"×{r['times']}"]
        for r in rows
    ]
    axes = mesh_text(plan.strategy.axes)
    table(f"Splits over {axes}", ["operator", "target", "module", "cuts per axis", "repeated"], shown)
    for name, what, seconds in plan.replicated:
        console.print(f"{name} runs whole on every rank for want of a rule ({what}): {seconds_text(seconds)}.")


def explain_operator(plan: Plan, graph: Graph, pattern: str, as_json: bool) -> None:
    """One operator (by name, module path or pattern): its split, its cost, the next-best options and their totals."""
    from shardwright.planner import describe_graph
    from shardwright.search.alternatives import alternatives
    from shardwright.search.strategies import find_strategy

    found = [op for op in graph.ops if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)]
    if not found:
        raise ShardwrightError(f"No operator or module matches {pattern!r}.", "`shardwright explain PLAN` lists them.")
    mesh = plan.mesh
    searched = find_strategy(
        describe_graph(graph), mesh, optimiser=plan.optimiser, memory_limit=float(mesh.device.usable_memory)
    )
    stated = searched.formulation
    choice = stated.choice(plan.strategy)
    document = []
    for op in found[:8]:
        node = stated.stands_for["op", op.name]
        rows = alternatives(stated, choice, node)
        document.append(
            {
                "operator": op.name,
                "target": op.target,
                "module": op.module,
                "source": op.source,
                "binding": _binding(stated, choice),
                "options": [
                    {
                        "split": row.option,
                        "own_seconds": row.own_seconds,
                        "total_seconds": row.total_seconds,
                        "chosen": row.chosen,
                    }
                    for row in rows
                ],
            }
        )
    if as_json:
        print_json(document)
        return
    for entry in document:
        options: list[dict[str, Any]] = entry["options"]  # type: ignore[assignment] # built above
        table(
            f"{entry['operator']} ({entry['target']}) in {entry['module'] or 'the model'}, {entry['source']}",
            ["cuts per axis", "operator itself", "total of the best plan with it", "chosen"],
            [
                [
                    _split_text(o["split"]),
                    seconds_text(o["own_seconds"]),
                    seconds_text(o["total_seconds"]) if np.isfinite(o["total_seconds"]) else "does not fit",
                    "◀" if o["chosen"] else "",
                ]
                for o in options
            ],
            caption=str(entry["binding"]),
        )


def _binding(stated: Any, choice: np.ndarray) -> str:
    """Which constraint holds the plan back: memory, or nothing but the prices."""
    from shardwright.search.choose import evaluate

    limit = stated.problem.usage_limit
    if limit is None:
        return "No memory limit."
    share = evaluate(stated.problem, choice).peak / limit
    binds = "memory binds" if share > 0.97 else "memory does not bind; the prices decide"
    return f"The plan uses {100 * share:.0f} % of the memory the search allows: {binds}."


def _split_text(split: Any) -> str:
    return ", ".join("–" if loop is None else str(loop) for loop in split)
