"""Answers beside the best sum: one parameter rests otherwise, and everything else is chosen anew around it.

Sums ignore overlap, so the strategy whose step is shortest is seldom the one of least sum but often near it. A user who pins
the layout of one parameter gets such a neighbour; here they are all proposed unasked, the least sum first. What is proposed
does not depend on the memory there is, so more of it never leads to a slower plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.cluster import Mesh
from shardwright.errors import Infeasible, TooLarge
from shardwright.planner.trials import RUNG_SECONDS, RUNG_WORK, Trials
from shardwright.search.bills import EXPECTED, Pricing
from shardwright.search.choose import Problem, evaluate, solve
from shardwright.search.strategies import Searched

PARAMETERS = 16
"""So many parameters are varied, those first that take most bytes."""

NEAR = 1.1
"""Sums this much above the least one expected are not proposed: overlap may be worth a tenth."""

WORK = 600
"""Answers of a graph, times its operators, that are proposed on one mesh: each will be simulated, operator by operator."""


def varied(trials: Trials, mesh: Mesh, pricings: Sequence[Pricing]) -> list[Searched]:
    """The neighbours, at these prices, that promise most by the sums expected.

    >>> [found.solution.cost for found in varied(trials, mesh, [EXPECTED])]  # doctest: +SKIP
    """
    stated = trials.stated(mesh, "auto")
    decided = [n for n, node in enumerate(stated.nodes) if node.kind == "parameter" and len(node.options) > 1]
    decided.sort(key=lambda n: -stated.sizes[n] * stated.nodes[n].times)
    least = trials.floor(mesh, "auto", EXPECTED, limited=False)
    expected, found = stated.problem, dict[bytes, tuple[float, Searched]]()
    for pricing in pricings:
        priced = trials.stated(mesh, "auto", pricing)
        free = replace(priced.problem, usages=(), usage_limit=None)
        best = trials.least(mesh, "auto", pricing, limited=False)[1]
        for node in decided[:PARAMETERS]:
            for option in range(len(stated.nodes[node].options)):
                if option == best[node]:
                    continue
                try:
                    solution = solve(_with(free, node, option), time_limit=RUNG_SECONDS, work_limit=RUNG_WORK)
                except (Infeasible, TooLarge):
                    continue
                cost = evaluate(expected, solution.answer).cost
                if cost > NEAR * least:
                    continue
                searched = Searched(priced.strategy(solution.answer), priced, solution)
                found.setdefault(np.asarray(solution.answer).tobytes(), (cost, searched))
    ranked = sorted(found.values(), key=lambda pair: pair[0])
    return [searched for _, searched in ranked[: WORK // max(len(stated.graph.ops), 1)]]


def _with(problem: Problem, node: int, option: int) -> Problem:
    """The same problem, where one node has nothing to choose."""
    costs = list(problem.costs)
    mask = np.full(len(costs[node]), np.inf)
    mask[option] = costs[node][option]
    costs[node] = mask
    return replace(problem, costs=costs)
