"""One entry to every way of choosing: reductions, then exact elimination, then the bounded search under the limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.errors import Infeasible, ProblemError, TooLarge
from shardwright.search.choose.brute import solve_by_brute_force
from shardwright.search.choose.eliminate import eliminate, solve_by_elimination
from shardwright.search.choose.integer import solve_by_integer_program
from shardwright.search.choose.problem import Problem, evaluate, without_oversized
from shardwright.search.choose.reductions import check_peak, reduce_problem
from shardwright.search.solution import Solution

Solver = Callable[..., Solution[np.ndarray]]


EASY_WORK = 2_000_000_000  # additions of an elimination that is tried before anything else
EASY_WORK_PER_SECOND = 400_000_000  # of the time limit, so that a short one is kept
QUICK_WORK = 60_000_000  # where a gap is enough, which the bounded search reaches in the time of about so many
OVERTIME = 30.0
"""Seconds beyond the time limit for as long as no choice at all is known (a planner would rather wait)."""


def _automatic(
    problem: Problem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    gap: float = 0.0,
    overtime: float = OVERTIME,
    work_limit: float | None = None,
) -> Solution[np.ndarray]:
    """Elimination where it is easy and memory does not bind, else the bounded search."""
    started = time.perf_counter()
    work = EASY_WORK if time_limit is None else int(min(EASY_WORK, EASY_WORK_PER_SECOND * time_limit))
    work = min(work, QUICK_WORK) if gap else work
    work = work if work_limit is None else int(min(work, work_limit))
    try:
        choice, bound = eliminate(problem, max_work=work)
        cost, _, feasible = evaluate(problem, choice)
        if feasible:
            return Solution(choice, cost, min(bound, cost), True, time.perf_counter() - started)
    except TooLarge:
        pass
    return _limited(problem, time_limit=time_limit, seed=seed, gap=gap, overtime=overtime, work_limit=work_limit)


def _limited(problem: Problem, *, overtime: float = OVERTIME, **asked: Any) -> Solution[np.ndarray]:
    from shardwright.search.choose.limited import solve_limited  # numba is imported only when it is needed

    return solve_limited(problem, overtime=overtime, **asked)


def _markov(problem: Problem, *, time_limit: float | None = None, seed: int = 0) -> Solution[np.ndarray]:
    from shardwright.search.choose.markov import solve_by_markov_chain

    return solve_by_markov_chain(problem, time_limit=time_limit, seed=seed)


METHODS: dict[str, Solver] = {
    "auto": _automatic,
    "limited": _limited,
    "eliminate": solve_by_elimination,
    "markov": _markov,
    "integer": solve_by_integer_program,
    "brute": solve_by_brute_force,
}


STOPS_EARLY = ("auto", "limited")
"""Methods that know a gap to stop at, overtime, and a limit of work; the others end when they end."""


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    method: str = "auto",
    gap: float = 0.0,
    overtime: float = OVERTIME,
    work_limit: float | None = None,
) -> Solution[np.ndarray]:
    """The cheapest choice found, with a proved lower bound; `Infeasible` when there is none.

    ``gap`` is how far from the bound, relative to the cost, a choice may be for the search to end with it. ``overtime``
    is for how many seconds beyond ``time_limit`` to go on where no choice was found yet; then `TooLarge` says so.
    ``work_limit`` counts what is read and added up instead of time, so the answer does not depend on the machine.

    >>> solve(Problem(costs=[np.array([4.0, 2.0])])).answer.tolist()
    [1]
    """
    solver = METHODS.get(method)
    if solver is None:
        raise ProblemError(f"There is no search method {method!r}.", f"Choose one of {', '.join(METHODS)}.")
    if time_limit is not None and not time_limit >= 0:
        raise ProblemError(f"A time limit of {time_limit} s is none.", "Give a number of seconds.")
    extra = {"gap": gap, "overtime": overtime, "work_limit": work_limit} if method in STOPS_EARLY else {}
    check_peak(problem)  # names the time, which is lost once the options that break the limit are struck out
    return solver(without_oversized(problem), time_limit=time_limit, seed=seed, **extra)


def frontier(
    problem: Problem, limits: Sequence[float], *, time_limit: float | None = None, seed: int = 0
) -> list[Solution[np.ndarray] | None]:
    """The best choice under each usage limit, in the order given; None where no choice keeps the limit.

    ``time_limit`` is for each limit. The problem is reduced once; a choice found under a wider limit answers every
    narrower one it keeps, its bound holds for all narrower ones, and no wider limit is left with a dearer choice.

    Example: ``[solution.cost for solution in frontier(problem, [80e9, 40e9, 20e9]) if solution]``
    """
    if not limits:
        return []
    widest_first = sorted(set(map(float, limits)), reverse=True)
    core, back = reduce_problem(without_oversized(replace(problem, usage_limit=widest_first[0])))
    found: dict[float, Solution[np.ndarray] | None] = {}
    last: Solution[np.ndarray] | None = None
    for limit in widest_first:
        narrowed = replace(core, usage_limit=limit)
        if last is None or not last.optimal or not evaluate(narrowed, last.answer).feasible:
            try:
                fresh = solve(narrowed, time_limit=time_limit, seed=seed)
            except Infeasible:
                found.update({lower: None for lower in widest_first if lower <= limit})
                break
            bound = min(fresh.cost, max(fresh.lower_bound, last.lower_bound if last else -np.inf))
            last = replace(fresh, lower_bound=bound, optimal=fresh.optimal or bound >= fresh.cost)
        found[limit] = last
    best: Solution[np.ndarray] | None = None
    for limit in reversed(widest_first):
        here = found[limit]
        if here is not None and best is not None and best.cost < here.cost:
            found[limit] = here = replace(here, answer=best.answer, cost=best.cost)
        best = here or best
    return [
        None if (solution := found[float(limit)]) is None else replace(solution, answer=back(solution.answer))
        for limit in limits
    ]
