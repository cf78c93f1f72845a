"""FlexFlow's search (MLSys 2019): a random walk that changes one node at a time and accepts by the Metropolis rule.

A proposal gives one random node a random option; it is accepted when cheaper, else with probability exp(-beta *
increase / cost). Here forbidden pairs and usage beyond the limit are penalised, so that the walk can pass through
them; the best allowed choice it meets is the answer. Its only bound is the sum of the smallest costs, which is what
makes the comparison with the other solvers telling.
"""

from __future__ import annotations

import time

import numpy as np

from shardwright.errors import TooLarge
from shardwright.jit import copy, kernel
from shardwright.search.choose.blocks import Walk, cost_of_choice, usage_of_choice
from shardwright.search.choose.flat import flatten
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.choose.reductions import reduce_problem
from shardwright.search.choose.walker import with_penalties
from shardwright.search.solution import Solution

DEFAULT_STEPS = 2_000_000
STEPS_AT_ONCE = 50_000
BETA = 200.0


@kernel(nogil=True)
def _wander(flat, walk, total, best_cost, steps, rate, seed):
    """Metropolis steps in place; ``rate`` is the penalty per unit of usage beyond the limit."""
    choice, usage, best_choice = walk.choice, walk.usage, walk.best_choice
    option_start, cost, edge_low = flat.option_start, flat.cost, flat.edge_low
    edge_high, matrix_start, matrix = flat.edge_high, flat.matrix_start, flat.matrix
    flipped, near_start, near_edge = flat.flipped, flat.near_start, flat.near_edge
    limit = flat.limit
    np.random.seed(seed)
    excess = 0.0
    for t in range(len(usage)):
        excess = max(excess, usage[t] - limit)
    for _ in range(steps):
        v = np.random.randint(len(choice))
        old, new = choice[v], np.random.randint(option_start[v + 1] - option_start[v])
        if new == old:
            continue
        size = option_start[v + 1] - option_start[v]
        change = cost[option_start[v] + new] - cost[option_start[v] + old]
        for index in range(near_start[v], near_start[v + 1]):
            e = near_edge[index]
            rows = flipped if edge_low[e] == v else matrix
            row = matrix_start[e] + choice[edge_low[e] + edge_high[e] - v] * size
            change += rows[row + new] - rows[row + old]
        _shift(flat, v, old, new, usage)
        fresh = max(0.0, usage.max() - limit)
        weighed = change + rate * (fresh - excess)
        if weighed <= 0.0 or np.random.random() < np.exp(-BETA * weighed / max(1e-300, abs(total))):
            choice[v] = new
            total += change
            excess = fresh
            if excess == 0.0 and total < best_cost:
                best_cost = total
                copy(choice, best_choice)
        else:
            _shift(flat, v, new, old, usage)
    return total, best_cost


@kernel(nogil=True)
def _shift(flat, v, old, new, usage):
    usage_start, usage_first, usage_last = flat.usage_start, flat.usage_first, flat.usage_last
    amount_start, amount = flat.amount_start, flat.amount
    for entry in range(usage_start[v], usage_start[v + 1]):
        more = amount[amount_start[entry] + new] - amount[amount_start[entry] + old]
        if more != 0.0:
            for t in range(usage_first[entry], usage_last[entry]):
                usage[t] += more


def solve_by_markov_chain(problem: Problem, *, time_limit: float | None = None, seed: int = 0) -> Solution[np.ndarray]:
    """The best choice a random walk meets; `TooLarge` when it meets none that is allowed.

    Example: ``solve_by_markov_chain(problem, time_limit=10).cost``
    """
    started = time.perf_counter()
    core, back = reduce_problem(problem)
    flat, penalty = with_penalties(flatten(core))
    generator = np.random.default_rng(seed)
    choice = np.array([int(np.argmin(cost)) for cost in core.costs], dtype=np.int64)
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
        walk = Walk(choice, usage, best_choice)
        _, best_cost = _wander(flat, walk, total, best_cost, STEPS_AT_ONCE, rate, draw)
        steps += STEPS_AT_ONCE
        if best_cost >= penalty:  # stuck among forbidden pairs: begin anew elsewhere
            choice = generator.integers(core.sizes)
        if time_limit is not None and time.perf_counter() - started > time_limit:
            break
    best_choice = back(best_choice)
    cost, _, feasible = evaluate(problem, best_choice)
    if not feasible:
        raise TooLarge(
            f"The random walk met no allowed choice of {problem.name} in {steps} steps.", "Use another method."
        )
    bound = float(sum(cost.min() for cost in problem.costs) + sum(edge.costs.min() for edge in problem.edges))
    return Solution(best_choice, cost, min(bound, cost), bound >= cost, time.perf_counter() - started)
