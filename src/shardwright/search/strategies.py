"""One search by name on one mesh: the whole space, a baseline's part of it, or another search over the same options.

``auto`` is the exact search; ``recursive`` is Tofu's, ``spartan`` greedy by size, ``markov`` FlexFlow's random walk,
``integer`` the integer program, ``least-memory`` the exact search for what uses least, whatever the time; every other name
is a baseline. Whatever the method, the answer is priced by the same problem and carries its bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from shardwright.cluster import Mesh
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph import Graph
from shardwright.graph.backward import differentiated
from shardwright.graph.repeats import block_paths, representatives
from shardwright.operators.rules import OpRules
from shardwright.operators.strategy import Strategy
from shardwright.search.baselines import ALIASES, BASELINES, restriction
from shardwright.search.choose import METHODS, evaluate, solve
from shardwright.search.formulate import Formulation, Known, formulate
from shardwright.search.greedy import greedy
from shardwright.search.labels import Labels
from shardwright.search.limits import by_memory, too_much
from shardwright.search.options import EVERYTHING, Restriction, rows_within
from shardwright.search.recomputing import recomputation
from shardwright.search.recursive import recursive
from shardwright.search.solution import Solution

LEAST_MEMORY = "least-memory"
METHOD_NAMES = (
    "auto",
    LEAST_MEMORY,
    "recursive",
    "spartan",
    *(name for name in METHODS if name not in ("auto", "brute", "eliminate")),
)
NAMES = (*METHOD_NAMES, *BASELINES)


@dataclass(frozen=True, eq=False)
class Described:
    """A graph with what every search on it shares."""

    graph: Graph
    rules: Mapping[str, OpRules]
    labels: Labels
    known: dict[Mesh, Known] = field(default_factory=dict)
    """What a search over the whole space found out about operators on a mesh, for narrower ones there."""

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that recomputation is about; none where there is no backward pass."""
        return block_paths(self.graph) if self.graph.training else ()


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
    chosen = space(mesh, name, within)
    return formulate(
        described.graph,
        mesh,
        optimizer=optimizer,
        memory_limit=float("inf"),
        recompute=recompute,
        lightly=lightly,
        within=chosen,
        rules=described.rules,
        labels=described.labels,
        fold=chosen.fold,
        known=described.known.setdefault(mesh, {}),
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
    chosen, graph, known = space(mesh, name, within), described.graph, described.known.get(mesh, {})
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


def space(mesh: Mesh, name: str, within: Restriction = EVERYTHING) -> Restriction:
    """The part of the whole space that a search may use: all that is allowed, or a recipe's part of that."""
    return within if name in METHOD_NAMES else restriction(name, len(mesh.sizes)) & within


def find_strategy(
    described: Described,
    mesh: Mesh,
    name: str = "auto",
    *,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    within: Restriction = EVERYTHING,
    time_limit: float | None = 60.0,
    gap: float = 0.0,
    stated: Formulation | None = None,
) -> Searched:
    """The best strategy that the search ``name`` finds on ``mesh``.

    ``gap`` is the share of its cost that the exact search may leave open; ``stated`` the problem (:func:`state`), where it
    is known already.
    """
    check_name(name)
    chosen = space(mesh, name, within)
    stated = stated or state(described, mesh, name, optimizer=optimizer, within=within)
    unlimited = stated
    if memory_limit is not None:
        stated = replace(stated, problem=replace(stated.problem, usage_limit=memory_limit))
    elif name != LEAST_MEMORY:
        stated = replace(stated, problem=replace(stated.problem, usages=(), usage_limit=None))
    if name == "recursive":
        solution = _recursive(described, mesh, stated, chosen, optimizer, time_limit)
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
                    replace(core, usage_limit=memory_limit), time_limit=time_limit, method="limited", gap=gap
                )
                solution = replace(solution, answer=back(solution.answer))
            else:
                solution = solve(stated.problem, time_limit=time_limit, method=method, gap=gap)
        except Infeasible as error:
            raise too_much(stated.problem, name) or error from None
    return Searched(stated.strategy(solution.answer), stated, solution)


def _recursive(
    described: Described, mesh: Mesh, stated: Formulation, within: Restriction, optimizer: str, time_limit: float | None
) -> Solution[np.ndarray]:
    started = perf_counter()
    strategy = recursive(
        described.graph,
        mesh,
        within=within,
        optimizer=optimizer,
        rules=described.rules,
        labels=described.labels,
        time_limit=time_limit or 60.0,
    )
    seconds = perf_counter() - started
    return _bounded(stated, stated.choice(strategy), seconds, time_limit)


def _bounded(stated: Formulation, choice: np.ndarray, seconds: float, time_limit: float | None) -> Solution[np.ndarray]:
    """An answer that ignores the memory limit, with the exact search's bound without one beside it."""
    free = replace(stated.problem, usages=(), usage_limit=None)
    cost = evaluate(free, choice).cost
    if not np.isfinite(cost):
        raise Infeasible("The heuristic ended in a forbidden combination.", "Use --search auto.")
    bound = min(solve(free, time_limit=time_limit).lower_bound, cost)
    return Solution(choice, cost, bound, cost <= bound * (1 + 1e-9), seconds)
