"""Why a plan is as it is, as data: how every operator is split, what else there was and what that would cost.

``shardwright explain`` prints these documents; from Python, :func:`explain` returns them. The graph is the one the plan
holds, so that neither needs the model. Each answer takes a search, so a page asks for the operators that cost most first and
stops when its time is spent; those it could not ask about carry the command that does.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any

import numpy as np

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph, Op
from shardwright.operators.rules import OpRules, Window, input_layouts, output_layouts
from shardwright.planner.restate import restate
from shardwright.plans import Plan
from shardwright.plans.serial import layout_text, placement_text
from shardwright.reports.splitting import standing
from shardwright.reports.steps import stage_plans
from shardwright.search.alternatives import alternatives
from shardwright.search.formulate import Described
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
    """Every decision once, stage by stage: operators and parameters of repeated blocks stand for the first block."""
    parts = list(enumerate(stage_plans(plan, graph)))
    return {
        "operators": [{**row, "stage": number} for number, part in parts for row in _operator_rows(*part)],
        "parameters": [{**row, "stage": number} for number, part in parts for row in _parameter_rows(*part)],
        "replicated": plan.replicated,
        "binding": binding(plan),
        "asked": vars(plan.asked),
    }


def _operator_rows(plan: Plan, graph: Graph) -> list[dict[str, Any]]:
    strategy = plan.stages[0].strategy
    shown, times = standing(plan, graph)
    return [
        {
            "operator": op.name,
            "target": op.target,
            "module": op.module,
            "source": op.source,
            "split": strategy.splits[op.name],
            "times": times[op.name],
        }
        for op in shown
    ]


def _parameter_rows(plan: Plan, graph: Graph) -> list[dict[str, Any]]:
    resting = plan.stages[0].strategy.resting
    return [{"parameter": p.paths[0], "resting": layout_text(resting[p.tensor])} for p in graph.parameters]


def _matches(graph: Graph, pattern: str) -> list[Op]:
    return [op for op in graph.ops if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)]


def matching(graph: Graph, pattern: str) -> list[Op]:
    """The operators that a name, a module path or a pattern means."""
    found = _matches(graph, pattern)
    if not found:
        raise ShardwrightError(f"No operator or module matches {pattern!r}.", "`shardwright explain PLAN` lists them.")
    return found


def explained_operators(plan: Plan, graph: Graph, pattern: str) -> list[dict[str, Any]]:
    """Operators with their splits, their costs, the next-best options and their totals, in their stages."""
    matching(graph, pattern)
    document: list[dict[str, Any]] = []
    for number, (one, part) in enumerate(stage_plans(plan, graph)):
        found = _matches(part, pattern)[: MOST - len(document)]
        if not found:
            continue
        stated = restate(one, part)
        choice = stated.choice(one.stages[0].strategy)
        for op in found:
            node = stated.stands_for["op", op.name]
            options = [
                {
                    "split": row.option,
                    "layouts": _layouts_text(stated.rules[op.name], row.option, op),
                    "own_seconds": row.own_seconds,
                    "total_seconds": row.total_seconds,
                    "chosen": row.chosen,
                }
                for row in alternatives(stated, choice, node)
            ]
            document.append(
                {
                    "operator": op.name,
                    "target": op.target,
                    "module": op.module,
                    "source": op.source,
                    "stage": number,
                    "repeated": stated.nodes[node].times,
                    "binding": binding(plan),
                    "options": options,
                }
            )
    return document


def binding(plan: Plan) -> str:
    """Which constraints hold the plan back: memory, what a user asked for, or nothing but the prices."""
    device, asked = plan.meshes[0].device, plan.asked
    limit = limit_of(device, asked.memory_limit)
    whose = "memory limit" if limit < device.usable_memory else f"memory of one {device.name}"
    share = plan.prediction.memory_bytes / limit
    used = f"{bytes_text(plan.prediction.memory_bytes)} of {bytes_text(limit)}, the {whose}"
    held = [f"memory binds ({used})"] if share > BINDS else []
    held += [f"the pin {text!r} holds" for text in asked.pins] + [f"{text!r} is forbidden" for text in asked.forbidden]
    light = sum(len(stage.strategy.lightly) for stage in plan.stages)
    wholly = sum(len(stage.strategy.recomputed) for stage in plan.stages) - light
    held += [f"activations of {wholly} blocks are recomputed to save memory"] * bool(wholly)
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


PER_SEARCH = 2.0
"""Seconds a single search may take."""


def why_rows(plan: Plan, graph: Graph, described: Described, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Operator → its options, best total first, for as many operators as ``seconds`` allow."""
    if seconds <= 0:
        return {}
    started = perf_counter()
    try:
        stated = restate(plan, graph, described)
        choice = stated.choice(plan.stages[0].strategy)
    except (ShardwrightError, KeyError, ValueError):
        return {}  # a plan of another kind than one search over one mesh: nothing to ask
    ops, _ = standing(plan, graph)
    nodes = {op.name: stated.stands_for["op", op.name] for op in ops}
    cost = {name: float(stated.problem.costs[node][int(choice[node])]) for name, node in nodes.items()}
    found: dict[int, list[dict[str, Any]]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(cost, key=lambda name: -cost[name]):
        node = nodes[name]
        if len(stated.problem.costs[node]) < 2:
            continue
        if node not in found:
            if perf_counter() - started > seconds:
                continue
            found[node] = [
                {
                    "loops": list(row.option),
                    "own": row.own_seconds if np.isfinite(row.own_seconds) else None,
                    "total": row.total_seconds if np.isfinite(row.total_seconds) else None,
                    "chosen": row.chosen,
                }
                for row in alternatives(stated, choice, node, time_limit=PER_SEARCH)
            ]
        rows[name] = found[node]
    return rows
