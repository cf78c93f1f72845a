"""What ``shardwright explain`` says about a plan's operators: how each is split, what that costs, what else there was."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.cli._show import bytes_text, console, mesh_text, print_json, seconds_text, table
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.graph import Graph, Op
    from shardwright.operators.rules import OpRules
    from shardwright.plans import Plan

MOST = 8
"""Operators explained at once."""

BINDS = 0.97
"""The share of the memory allowed from which on memory is what holds a plan back."""

SHOWN = 4
"""Up to this many inputs (outputs) each has its layout shown; of more, the different ones."""


def explain_plan(plan: Plan, graph: Graph, as_json: bool) -> None:
    """Every decision once: operators and parameters of repeated blocks are shown for the first block."""
    from shardwright.graph.repeats import representatives
    from shardwright.plans.serial import layout_text

    standing = representatives(graph)
    alike = {op.name: plan.strategy.splits[op.name] == plan.strategy.splits[standing[op.name]] for op in graph.ops}
    times: dict[str, int] = {}
    for name, first in standing.items():
        times[first] = times.get(first, 0) + alike[name]
    rows = [
        {
            "operator": op.name,
            "target": op.target,
            "module": op.module,
            "source": op.source,
            "split": plan.strategy.splits[op.name],
            "times": times[op.name] if standing[op.name] == op.name else 1,
        }
        for op in graph.ops
        if standing[op.name] == op.name or not alike[op.name]
    ]
    parameters = [
        {"parameter": p.paths[0], "resting": layout_text(plan.strategy.resting[p.tensor])} for p in graph.parameters
    ]
    if as_json:
        print_json(
            {
                "operators": rows,
                "parameters": parameters,
                "replicated": plan.replicated,
                "binding": binding(plan),
                "asked": vars(plan.asked),
            }
        )
        return
    shown = [
        [str(r["operator"]), str(r["target"]), str(r["module"]), _split_text(r["split"]), f"×{r['times']}"]
        for r in rows
    ]
    axes = mesh_text(plan.strategy.axes)
    table(f"Splits over {axes}", ["operator", "target", "module", "cuts per axis", "repeated"], shown)
    folded: dict[tuple[str, str], int] = {}
    for p in parameters:
        key = (re.sub(r"\.\d+(?=\.|$)", ".*", str(p["parameter"])), ", ".join(p["resting"]))
        folded[key] = folded.get(key, 0) + 1
    table(
        f"Parameters at rest over {axes}",
        ["parameter", "layout", "repeated"],
        [[name, layout, f"×{count}"] for (name, layout), count in folded.items()],
        caption=binding(plan),
    )
    for name, what, seconds in plan.replicated:
        console.print(f"{name} runs whole on every rank for want of a rule ({what}): {seconds_text(seconds)}.")


def explain_operator(plan: Plan, graph: Graph, pattern: str, as_json: bool) -> None:
    """One operator (by name, module path or pattern): its split, its cost, the next-best options and their totals."""
    from shardwright.planner.restate import restate
    from shardwright.search.alternatives import alternatives

    found = [op for op in graph.ops if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)]
    if not found:
        raise ShardwrightError(f"No operator or module matches {pattern!r}.", "`shardwright explain PLAN` lists them.")
    stated = restate(plan, graph)
    choice = stated.choice(plan.strategy)
    document: list[dict[str, Any]] = []
    for op in found[:MOST]:
        node = stated.stands_for["op", op.name]
        document.append(
            {
                "operator": op.name,
                "target": op.target,
                "module": op.module,
                "source": op.source,
                "repeated": stated.nodes[node].times,
                "binding": binding(plan),
                "options": [
                    {
                        "split": row.option,
                        "layouts": _layouts_text(stated.rules[op.name], row.option, op),
                        "own_seconds": row.own_seconds,
                        "total_seconds": row.total_seconds,
                        "chosen": row.chosen,
                    }
                    for row in alternatives(stated, choice, node)
                ],
            }
        )
    if as_json:
        print_json(document)
        return
    for entry in document:
        count = entry["repeated"]
        table(
            f"{entry['operator']} ({entry['target']}) in {entry['module'] or 'the model'}, {entry['source']}"
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
    if len(found) > MOST:
        console.print(f"{len(found) - MOST} more operators match {pattern!r}.")
    console.print("To insist on another option: shardwright plan PLAN.json --pin 'OPERATOR=cut,cut,…' -o OTHER.json")


def binding(plan: Plan) -> str:
    """Which constraints hold the plan back: memory, what a user asked for, or nothing but the prices."""
    from shardwright.search.limits import limit_of

    device, asked = plan.mesh.device, plan.asked
    limit = limit_of(device, asked.memory_limit)
    whose = "memory limit" if limit < device.usable_memory else f"memory of one {device.name}"
    share = plan.prediction.memory_bytes / limit
    used = f"{bytes_text(plan.prediction.memory_bytes)} of {bytes_text(limit)}, the {whose}"
    held = [f"memory binds ({used})"] if share > BINDS else []
    held += [f"the pin {text!r} holds" for text in asked.pins] + [f"{text!r} is forbidden" for text in asked.forbidden]
    if plan.strategy.recomputed:
        held.append(f"activations of {len(plan.strategy.recomputed)} blocks are recomputed to save memory")
    free = f"no constraint binds (memory: {used}); the prices decide"
    sentence = ", ".join(held) or free
    return sentence[0].upper() + sentence[1:] + "."


def _layouts_text(rules: OpRules, split: Any, op: Op) -> str:
    """What a split needs of every input and leaves of every output, per mesh axis: ``S0 R, R R → S0 R``."""
    from shardwright.operators.rules import Window, input_layouts, output_layouts
    from shardwright.plans.serial import placement_text

    def text(layouts: Any) -> str:
        one = (" ".join(f"S{p.dim}+halo" if isinstance(p, Window) else placement_text(p) for p in x) for x in layouts)
        return ", ".join(dict.fromkeys(one)) if len(layouts) > SHOWN else ", ".join(one)

    return (
        f"{text(input_layouts(rules, split, len(op.inputs)))} → {text(output_layouts(rules, split, len(op.outputs)))}"
    )


def _split_text(split: Any) -> str:
    return ", ".join("–" if loop is None else str(loop) for loop in split)
