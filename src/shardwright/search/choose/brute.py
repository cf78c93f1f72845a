"""Every choice, one after the other: the twin that the real solvers are tested against."""

from __future__ import annotations

import itertools
import time
from math import prod

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.solution import Solution
from shardwright.units import count_text

DEFAULT_CHOICES = 2_000_000


def solve_by_brute_force(problem: Problem, *, time_limit: float | None = None, seed: int = 0) -> Solution[np.ndarray]:
    """The optimum by enumeration; refuses more than two million choices.

    >>> solve_by_brute_force(Problem(costs=[np.array([4.0, 2.0])])).answer.tolist()
    [1]
    """
    started = time.perf_counter()
    sizes = problem.sizes.tolist()
    if prod(sizes) > DEFAULT_CHOICES:
        raise TooLarge(f"{problem.name} has {count_text(prod(sizes))} choices.", "Use another method.")
    best, best_cost = None, np.inf
    for candidate in itertools.product(*map(range, sizes)):
        choice = np.array(candidate, dtype=np.int64)
        cost, _, feasible = evaluate(problem, choice)
        if feasible and cost < best_cost:
            best, best_cost = choice, cost
    if best is None:
        raise Infeasible(f"No choice of {problem.name} keeps its limit of {problem.usage_limit}.", "Raise the limit.")
    return Solution(best, best_cost, best_cost, True, time.perf_counter() - started)
