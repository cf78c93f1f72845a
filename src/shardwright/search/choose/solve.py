"""One entry to every way of choosing: reductions, then exact elimination, then the bounded search under the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.errors import ProblemError, TooLarge
from shardwright.search.choose.brute import solve_by_brute_force
from shardwright.search.choose.eliminate import solve_by_elimination
from shardwright.search.choose.integer import solve_by_integer_program
from shardwright.search.choose.problem import Problem
from shardwright.search.solution import Solution

Solver = Callable[..., Solution[np.ndarray]]


def _automatic(problem: Problem, *, time_limit: float | None = None, seed: int = 0) -> Solution[np.ndarray]:
    try:
        return solve_by_elimination(problem)
    except TooLarge:
        return solve_by_integer_program(problem, time_limit=time_limit, seed=seed)


METHODS: dict[str, Solver] = {
    "auto": _automatic,
    "eliminate": solve_by_elimination,
    "integer": solve_by_integer_program,
    "brute": solve_by_brute_force,
}


def solve(
    problem: Problem, *, time_limit: float | None = None, seed: int = 0, method: str = "auto"
) -> Solution[np.ndarray]:
    """The cheapest choice found, with a proved lower bound; `Infeasible` when there is none.

    >>> solve(Problem(costs=[np.array([4.0, 2.0])])).answer.tolist()
    [1]
    """
    solver = METHODS.get(method)
    if solver is None:
        raise ProblemError(f"There is no search method {method!r}.", f"Choose one of {', '.join(METHODS)}.")
    return solver(problem, time_limit=time_limit, seed=seed)


def frontier(
    problem: Problem, limits: Sequence[float], *, time_limit: float | None = None, seed: int = 0
) -> list[Solution[np.ndarray]]:
    """The best choice under each usage limit, in the order given.

    Example: ``[solution.cost for solution in frontier(problem, [80e9, 40e9, 20e9])]``
    """
    return [solve(replace(problem, usage_limit=float(limit)), time_limit=time_limit, seed=seed) for limit in limits]
