"""One search by name on one mesh: the whole space, a baseline's part of it, or another search over the same options.

``auto`` is the exact search; ``recursive`` is Tofu's, ``spartan`` greedy by size, ``markov`` FlexFlow's random walk,
``integer`` the integer program, ``least-memory`` the exact search for what uses least, whatever the time; every other name
is a baseline. Whatever the method, the answer is priced by the same problem and carries its bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from shardwright.cluster import Mesh
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph.backward import differentiated
from shardwright.graph.repeats import representatives
from shardwright.operators.strategy import Strategy
from shardwright.search.baselines import ALIASES, BASELINES, restriction
from shardwright.search.choose import METHODS, evaluate, solve
from shardwright.search.conditions import LEAST_MEMORY, Conditions
from shardwright.search.formulate import Described, Formulation, formulate
from shardwright.search.greedy import greedy
from shardwright.search.limits import by_memory, too_much
from shardwright.search.options import EVERYTHING, Restriction, rows_within
from shardwright.search.recomputing import recomputation
from shardwright.search.recursive import recursive
from shardwright.search.solution import Solution

METHOD_NAMES = (
    "auto",
    LEAST_MEMORY,
    "recursive",
    "spartan",
    *(name for name in METHODS if name not in ("auto", "brute", "eliminate")),
)
NAMES = (*METHOD_NAMES, *BASELINES)

EXACTLY = Conditions(time_limit=60.0, gap=0.0)


@dataclass(frozen=True, eq=False)
class Searched:
    """A strategy, the problem that prices it and the solver's proof."""

    strategy: Strategy
    formulation: Formulation
    solution: Solution[np.ndarray]


def check_name(name: str) -> None:
    """Refuse an unknown search or baseline before any work is done."""
    if name not in NAMES and name not in ALIASES:
        raise ShardwrightError(f"There is no search or strategy {name!r}.", f"Known: {', '.join(NAMES)}.")


def state(
    described: Described,
    mesh: Mesh,
    name: str = "auto",
    *,
    optimizer: str = "adamw",
    recompute: Sequence[str] = (),
    lightly: bool = False,
    within: Restriction = EVERYTHING,
) -> Formulation:
    """The problem that the search ``name`` solves on ``mesh``, its memory counted but not yet limited."""
    return formulate(
        described,
        mesh,
        optimizer=optimizer,
        memory_limit=float("inf"),
        recompute=recompute,
        lightly=lightly,
        within=part_of(mesh, name, within),
    )


def least_compute(
    described: Described,
    mesh: Mesh,
    name: str,
    within: Restriction = EVERYTHING,
    recompute: Sequence[str] = (),
    lightly: bool = False,
) -> float:
    """Seconds that a device computes at least under a search, each operator by itself; 0 where none was timed yet.

    >>> least_compute(described, mesh, "fsdp")  # doctest: +SKIP
    """
    chosen, graph, known = part_of(mesh, name, within), described.graph, described.known.get(mesh, {})
    standing, backward, total = representatives(graph), differentiated(graph), 0.0
    again = recomputation(graph, recompute, mesh.device.kind, described.rules, lightly).runs
    runs = Counter(standing.values()) + Counter(standing[op] for op in again)
    backs = Counter(first for op, first in standing.items() if op in backward)
    for op in graph.ops:
        timed = known.get(op.name)
        if standing[op.name] == op.name and timed is not None:
            labels = dict(described.labels[op.name])
            rows = rows_within(op, described.rules[op.name], mesh.sizes, labels, chosen, timed.every)
            total += float((timed.seconds[rows] @ [runs[op.name], backs[op.name]]).min())
    return total


def part_of(mesh: Mesh, name: str, within: Restriction = EVERYTHING) -> Restriction:
    """The part of the whole space that a search may use: all that is allowed, or a recipe's part of that."""
    return within if name in METHOD_NAMES else restriction(name, len(mesh.sizes)) & within


def find_strategy(
    described: Described,
    mesh: Mesh,
    name: str = "auto",
    conditions: Conditions = EXACTLY,
    *,
    within: Restriction = EVERYTHING,
    stated: Formulation | None = None,
    work_limit: float | None = None,
) -> Searched:
    """The best strategy that the search ``name`` finds on ``mesh`` (where the conditions set no limit, in any memory).

    ``stated`` is the problem (:func:`state`), where it is known already. ``work_limit``: where a method counts what it
    reads, so many entries of its tables instead of the time limit.
    """
    check_name(name)
    stated = stated or state(described, mesh, name, optimizer=conditions.optimizer, within=within)
    unlimited, memory_limit, time_limit = stated, conditions.memory_limit, conditions.time_limit
    if memory_limit is not None:
        stated = replace(stated, problem=replace(stated.problem, usage_limit=memory_limit))
    elif name != LEAST_MEMORY:
        stated = replace(stated, problem=replace(stated.problem, usages=(), usage_limit=None))
    if name == "recursive":
        solution = _recursive(described, stated, part_of(mesh, name, within), conditions)
    elif name == "spartan":
        started = perf_counter()
        choice = greedy(stated.problem, stated.sizes)
        solution = _bounded(stated, choice, perf_counter() - started, time_limit)
    elif name == LEAST_MEMORY:
        least = solve(by_memory(stated.problem), time_limit=time_limit)
        solution = _bounded(stated, least.answer, least.seconds, time_limit)
    else:
        try:
            method = name if name in METHODS else "auto"
            if method == "auto" and memory_limit is not None:
                core, back = unlimited.reduced
                solution = solve(
                    replace(core, usage_limit=memory_limit),
                    time_limit=time_limit,
                    method="limited",
                    gap=conditions.gap,
                    work_limit=work_limit,
                )
                solution = replace(solution, answer=back(solution.answer))
            else:
                solution = solve(
                    stated.problem,
                    time_limit=time_limit,
                    method=method,
                    gap=conditions.gap,
                    work_limit=work_limit,
                )
        except Infeasible as error:
            raise too_much(stated.problem, name) or error from None
    return Searched(stated.strategy(solution.answer), stated, solution)


def _recursive(
    described: Described, stated: Formulation, within: Restriction, conditions: Conditions
) -> Solution[np.ndarray]:
    started = perf_counter()
    strategy = recursive(
        described, stated.mesh, within, optimizer=conditions.optimizer, time_limit=conditions.time_limit
    )
    return _bounded(stated, stated.choice(strategy), perf_counter() - started, conditions.time_limit)


def _bounded(stated: Formulation, choice: np.ndarray, seconds: float, time_limit: float) -> Solution[np.ndarray]:
    """An answer that ignores the memory limit, with the exact search's bound without one beside it."""
    free = replace(stated.problem, usages=(), usage_limit=None)
    cost = evaluate(free, choice).cost
    if not np.isfinite(cost):
        raise Infeasible("The heuristic ended in a forbidden combination.", "Use --search auto.")
    bound = min(solve(free, time_limit=time_limit).lower_bound, cost)
    return Solution(choice, cost, bound, cost <= bound * (1 + 1e-9), seconds)
