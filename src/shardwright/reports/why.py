"""Why an operator is split as it is: its other options and the best total with each, everything else decided anew.

Each answer takes a search, so a page asks for the operators that cost most first and stops when its time is spent; those
it could not ask about carry the command that does.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.planner.restate import restate
from shardwright.plans import Plan
from shardwright.reports.splitting import standing
from shardwright.search.alternatives import alternatives
from shardwright.search.strategies import Described

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
