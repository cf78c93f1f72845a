"""Why this split? What every other option of an operator would cost in total, everything else re-optimised around it.

This is the operator's min-marginal: pin the option, solve again. Exact whenever the solver is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwright.costs.gradient_addition import least_adding
from shardwright.errors import Infeasible
from shardwright.operators.rules import Layout, Split
from shardwright.search.choose import solve
from shardwright.search.formulate import Formulation


@dataclass(frozen=True)
class Alternative:
    """An option of one node, the best total with it, and whether it is the one chosen."""

    option: Split | Layout
    total_seconds: float
    own_seconds: float
    chosen: bool


def alternatives(
    formulation: Formulation, choice: np.ndarray, node: int, *, most: int = 8, time_limit: float = 10.0
) -> list[Alternative]:
    """The ``most`` cheapest options of a node by total cost, best first; the chosen one is always among them.

    A total has all that a bound on sums has: what adding up gradients takes at least, which no choice changes, too.
    """
    problem, adding = formulation.problem, least_adding(formulation.graph, formulation.mesh)
    own = problem.costs[node]
    nearby = _cost_beside(formulation, choice, node)
    order = [int(choice[node]), *(int(i) for i in np.argsort(nearby) if i != choice[node])][:most]
    rows = []
    for option in order:
        mask = np.full(len(own), np.inf)
        mask[option] = own[option]
        costs = list(problem.costs)
        costs[node] = mask
        try:
            total = solve(replace(problem, costs=costs), time_limit=time_limit).cost + adding
        except Infeasible:
            total = float("inf")
        picked = formulation.nodes[node].options[option]
        rows.append(Alternative(picked, total, float(own[option]), bool(option == choice[node])))
    return sorted(rows, key=lambda row: (row.total_seconds, not row.chosen))


def replicated(formulation: Formulation) -> tuple[tuple[str, str, float], ...]:
    """Operators that run whole for want of a rule: name, what and why, and the seconds each costs."""
    rows = []
    for op in formulation.graph.ops:
        rules = formulation.rules[op.name]
        if rules.origin == "replicated":
            node = formulation.stands_for["op", op.name]
            seconds = float(np.min(formulation.problem.costs[node])) / max(formulation.nodes[node].times, 1)
            rows.append((op.name, f"{op.target}: {rules.reason}", seconds))
    return tuple(rows)


def _cost_beside(formulation: Formulation, choice: np.ndarray, node: int) -> np.ndarray:
    """What each option would cost with all neighbours as they are: which ones are worth solving for."""
    cost = formulation.problem.costs[node].copy()
    for first, second, matrix in formulation.problem.edges:
        if first == node:
            cost = cost + matrix[:, choice[second]]
        elif second == node:
            cost = cost + matrix[choice[first], :]
    return cost
