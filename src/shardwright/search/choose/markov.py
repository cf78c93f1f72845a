"""FlexFlow's search (MLSys 2019): a random walk that changes one node at a time and accepts by the Metropolis rule.

A proposal gives one random node a random option; it is accepted when cheaper, else with probability
exp(-beta * increase / cost). Here forbidden pairs and usage beyond the limit are penalised, so that the walk can pass through
them; the best allowed choice it meets is the answer. Its only bound is the sum of the smallest costs, which is what makes
the comparison with the other solvers telling.
"""

from __future__ import annotations

import time

import numpy as np
from numba import njit

from shardwright.errors import TooLarge
from shardwright.search.choose.blocks import cost_of_choice, usage_of_choice
from shardwright.search.choose.flat import flatten
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.choose.walker import with_penalties
from shardwright.search.choose.workspace import Workspace
from shardwright.search.solution import Solution

DEFAULT_STEPS = 2_000_000
STEPS_AT_ONCE = 200_000
BETA = 200.0


@njit(cache=True, nogil=True)
def _wander(flat, choice, usage, total, best_choice, best_cost, steps, rate, seed):
    """Metropolis steps in place; ``rate`` is the penalty per unit of usage beyond the limit."""
    np.random.seed(seed)
    excess = 0.0
    for t in range(len(usage)):
        excess = max(excess, usage[t] - flat.limit)
    for _ in range(steps):
        v = np.random.randint(len(choice))
        old, new = choice[v], np.random.randint(flat.option_start[v + 1] - flat.option_start[v])
        if new == old:
            continue
        size = flat.option_start[v + 1] - flat.option_start[v]
        change = flat.cost[flat.option_start[v] + new] - flat.cost[flat.option_start[v] + old]
        for index in range(flat.near_start[v], flat.near_start[v + 1]):
            e = flat.near_edge[index]
            rows = flat.flipped if flat.edge_low[e] == v else flat.matrix
            row = flat.matrix_start[e] + choice[flat.edge_low[e] + flat.edge_high[e] - v] * size
            change += rows[row + new] - rows[row + old]
        _shift(flat, v, old, new, usage)
        fresh = max(0.0, usage.max() - flat.limit)
        weighed = change + rate * (fresh - excess)
        if weighed <= 0.0 or np.random.random() < np.exp(-BETA * weighed / max(1e-300, abs(total))):
            choice[v] = new
            total += change
            excess = fresh
            if excess == 0.0 and total < best_cost:
                best_cost = total
                best_choice[:] = choice
        else:
            _shift(flat, v, new, old, usage)
    return total, best_cost


@njit(cache=True, nogil=True)
def _shift(flat, v, old, new, usage):
    for entry in range(flat.usage_start[v], flat.usage_start[v + 1]):
        more = flat.amount[flat.amount_start[entry] + new] - flat.amount[flat.amount_start[entry] + old]
        if more != 0.0:
            for t in range(flat.usage_first[entry], flat.usage_last[entry]):
                usage[t] += more


def solve_by_markov_chain(problem: Problem, *, time_limit: float | None = None, seed: int = 0) -> Solution[np.ndarray]:
    """The best choice a random walk meets; `TooLarge` when it meets none that is allowed.

    Example: ``solve_by_markov_chain(problem, time_limit=10).cost``
    """
    started = time.perf_counter()
    simple = Workspace(problem).problem()  # parallel edges added up, loops folded
    flat, penalty = with_penalties(flatten(simple))
    flat = flat._replace(cost=np.where(np.isfinite(flat.cost), flat.cost, penalty))
    generator = np.random.default_rng(seed)
    choice = np.array([int(np.argmin(cost)) for cost in simple.costs], dtype=np.int64)
    best_choice, best_cost = choice.copy(), penalty
    usage = np.zeros(len(flat.times))
    rate = penalty / max(1.0, flat.limit)
    steps = 0
    while steps < DEFAULT_STEPS or time_limit is not None:
        usage_of_choice(flat, choice, usage)
        total = float(cost_of_choice(flat, choice))
        if usage.max() <= flat.limit and total < best_cost:
            best_choice, best_cost = choice.copy(), total
        draw = int(generator.integers(2**31))
        _, best_cost = _wander(flat, choice, usage, total, best_choice, best_cost, STEPS_AT_ONCE, rate, draw)
        steps += STEPS_AT_ONCE
        if time_limit is not None and time.perf_counter() - started > time_limit:
            break
    cost, _, feasible = evaluate(problem, best_choice)
    if not feasible:
        raise TooLarge(
            f"The random walk met no allowed choice of {problem.name} in {steps} steps.", "Use another method."
        )
    bound = float(sum(cost.min() for cost in problem.costs) + sum(edge.costs.min() for edge in problem.edges))
    return Solution(best_choice, cost, min(bound, cost), bound >= cost, time.perf_counter() - started)
