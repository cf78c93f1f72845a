"""Why a plan is as it is, as data: how every operator is split, what else there was and what that would cost.

``shardwright explain`` prints these documents; from Python, :func:`explain` returns them. The graph is the one the plan
holds, so that neither needs the model.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph, Op
from shardwright.graph.repeats import representatives
from shardwright.operators.rules import OpRules, Window, input_layouts, output_layouts
from shardwright.planner.restate import restate
from shardwright.plans import Plan
from shardwright.plans.serial import layout_text, placement_text
from shardwright.reports.pipelined import stage_plans
from shardwright.search.alternatives import alternatives
from shardwright.search.limits import limit_of
from shardwright.units import bytes_text

MOST = 8
"""Operators explained at once."""

BINDS = 0.97
"""The share of the memory allowed from which on memory is what holds a plan back."""

SHOWN = 4
"""Up to this many inputs (outputs) each has its layout shown; of more, the different ones."""


def explain(plan: Plan, operator: str | None = None, *, graph: Graph | None = None) -> Any:
    """Every decision of a plan, or, of operators by name, module path or pattern, their options with prices.

    >>> shardwright.explain(plan)["operators"][0]["split"]                        # doctest: +SKIP
    >>> shardwright.explain(plan, "blocks.0.*")[0]["options"]                     # doctest: +SKIP
    """
    graph = plan.graph() if graph is None else graph
    return explained_plan(plan, graph) if operator is None else explained_operators(plan, graph, operator)


def explained_plan(plan: Plan, graph: Graph) -> dict[str, Any]:
    """Every decision once: operators and parameters of repeated blocks stand for the first block, stage by stage."""
    if not plan.whole:
        parts = [explained_plan(*part) for part in stage_plans(plan, graph)]
        return {
            "operators": [{**row, "stage": n} for n, part in enumerate(parts) for row in part["operators"]],
            "parameters": [{**row, "stage": n} for n, part in enumerate(parts) for row in part["parameters"]],
            "replicated": plan.replicated,
            "binding": binding(plan),
            "asked": vars(plan.asked),
        }
    strategy, standing = plan.stages[0].strategy, representatives(graph)
    alike = {op.name: strategy.splits[op.name] == strategy.splits[standing[op.name]] for op in graph.ops}
    times: dict[str, int] = {}
    for name, first in standing.items():
        times[first] = times.get(first, 0) + alike[name]
    rows = [
        {
            "operator": op.name,
            "target": op.target,
            "module": op.module,
            "source": op.source,
            "split": strategy.splits[op.name],
            "times": times[op.name] if standing[op.name] == op.name else 1,
        }
        for op in graph.ops
        if standing[op.name] == op.name or not alike[op.name]
    ]
    parameters = [
        {"parameter": p.paths[0], "resting": layout_text(strategy.resting[p.tensor])} for p in graph.parameters
    ]
    return {
        "operators": rows,
        "parameters": parameters,
        "replicated": plan.replicated,
        "binding": binding(plan),
        "asked": vars(plan.asked),
    }


def _matches(graph: Graph, pattern: str) -> list[Op]:
    return [op for op in graph.ops if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)]


def matching(graph: Graph, pattern: str) -> list[Op]:
    """The operators that a name, a module path or a pattern means."""
    found = _matches(graph, pattern)
    if not found:
        raise ShardwrightError(f"No operator or module matches {pattern!r}.", "`shardwright explain PLAN` lists them.")
    return found


def explained_operators(plan: Plan, graph: Graph, pattern: str) -> list[dict[str, Any]]:
    """Operators with their splits, their costs, the next-best options and their totals; of a pipeline, in their stage."""
    if not plan.whole:
        matching(graph, pattern)
        parts = [(n, *part) for n, part in enumerate(stage_plans(plan, graph)) if _matches(part[1], pattern)]
        rows = [{**row, "stage": n} for n, one, part in parts for row in explained_operators(one, part, pattern)]
        return rows[:MOST]
    found = matching(graph, pattern)
    stated = restate(plan, graph)
    choice = stated.choice(plan.stages[0].strategy)
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
    return document


def binding(plan: Plan) -> str:
    """Which constraints hold the plan back: memory, what a user asked for, or nothing but the prices."""
    device, asked, strategy = plan.meshes[0].device, plan.asked, plan.stages[0].strategy
    limit = limit_of(device, asked.memory_limit)
    whose = "memory limit" if limit < device.usable_memory else f"memory of one {device.name}"
    share = plan.prediction.memory_bytes / limit
    used = f"{bytes_text(plan.prediction.memory_bytes)} of {bytes_text(limit)}, the {whose}"
    held = [f"memory binds ({used})"] if share > BINDS else []
    held += [f"the pin {text!r} holds" for text in asked.pins] + [f"{text!r} is forbidden" for text in asked.forbidden]
    if strategy.recomputed:
        light = len(strategy.lightly)
        held += [f"activations of {len(strategy.recomputed) - light} blocks are recomputed to save memory"] * (
            light < len(strategy.recomputed)
        )
        held += [f"what is cheap to compute of {light} blocks is recomputed to save memory"] * bool(light)
    free = f"no constraint binds (memory: {used}); the prices decide"
    sentence = ", ".join(held) or free
    return sentence[0].upper() + sentence[1:] + "."


def _layouts_text(rules: OpRules, split: Any, op: Op) -> str:
    """What a split needs of every input and leaves of every output, per mesh axis: ``S0 R, R R → S0 R``."""

    def text(layouts: Any) -> str:
        one = (" ".join(f"S{p.dim}+halo" if isinstance(p, Window) else placement_text(p) for p in x) for x in layouts)
        return ", ".join(dict.fromkeys(one)) if len(layouts) > SHOWN else ", ".join(one)

    return (
        f"{text(input_layouts(rules, split, len(op.inputs)))} → {text(output_layouts(rules, split, len(op.outputs)))}"
    )
