"""The choice problem as data: one option per node, node and edge costs, memory over time below a limit.

This is the form of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, slightly widened: a node may use
memory during several intervals (a parameter lives always, its gathered copy only for a while), and ``inf`` marks what
is forbidden. Matrices may be shared by many edges (the same object), so that 96 equal layers need the memory of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardwright.errors import ProblemError


class Edge(NamedTuple):
    """What a pair of choices costs: ``costs[i, j]`` for option ``i`` of ``first`` and ``j`` of ``second``."""

    first: int
    second: int
    costs: np.ndarray


class Usage(NamedTuple):
    """Memory that ``node`` holds during ``[start, stop)``: ``amounts[i]`` under its option ``i``."""

    node: int
    start: int
    stop: int
    amounts: np.ndarray


class Evaluation(NamedTuple):
    """What a choice costs, the largest usage at any time, and whether it is allowed."""

    cost: float
    peak: float
    feasible: bool


@dataclass(frozen=True, eq=False)
class Problem:
    """One option per node; minimise node plus edge costs; at no time may the summed usage exceed ``usage_limit``.

    Example
    -------
    >>> import numpy as np
    >>> problem = Problem(
    ...     costs=[np.array([1.0, 0.0]), np.array([0.0, 3.0])],
    ...     edges=[Edge(0, 1, np.array([[0.0, 5.0], [np.inf, 1.0]]))],
    ... )
    >>> evaluate(problem, np.array([0, 0])).cost
    1.0
    """

    costs: Sequence[np.ndarray]
    edges: Sequence[Edge] = field(default_factory=tuple)
    usages: Sequence[Usage] = field(default_factory=tuple)
    usage_limit: float | None = None
    name: str = "problem"

    def __post_init__(self) -> None:
        count = len(self.costs)
        sizes = self.sizes
        if count and int(sizes.min()) == 0:
            raise ProblemError(
                f"Node {int(sizes.argmin())} of {self.name} has no options.", "Give every node at least one."
            )
        for number, (first, second, matrix) in enumerate(self.edges):
            if not (0 <= first < count and 0 <= second < count):
                raise ProblemError(f"Edge {number} joins nodes {first} and {second}, but there are {count} nodes.")
            if matrix.shape != (sizes[first], sizes[second]):
                raise ProblemError(
                    f"Edge {number} has a cost matrix of shape {matrix.shape}, but its nodes {first} and {second} have "
                    f"{sizes[first]} and {sizes[second]} options."
                )
        for usage in self.usages:
            if not 0 <= usage.node < count:
                raise ProblemError(f"A usage names node {usage.node}, but there are {count} nodes.")
            if usage.amounts.shape != (sizes[usage.node],):
                raise ProblemError(
                    f"Node {usage.node} has {sizes[usage.node]} options but {len(usage.amounts)} usage amounts."
                )
        if self.usage_limit is not None and np.isnan(self.usage_limit):
            raise ProblemError(f"The usage limit of {self.name} is not a number.", "Give a number, or no limit.")

    @property
    def sizes(self) -> np.ndarray:
        """The number of options of every node."""
        return np.fromiter((len(cost) for cost in self.costs), dtype=np.int64, count=len(self.costs))

    @property
    def limited(self) -> bool:
        """Whether memory restricts the choice at all."""
        return self.usage_limit is not None and len(self.usages) > 0


def usage_over_time(problem: Problem, choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The times at which usage changes, and the usage from each of them to the next.

    >>> problem = Problem(costs=[np.zeros(1)], usages=[Usage(0, 2, 5, np.array([7.0]))])
    >>> times, usage = usage_over_time(problem, np.array([0]))
    >>> times.tolist(), usage.tolist()
    ([2, 5], [7.0, 0.0])
    """
    alive = [(u.start, u.stop, u.amounts[choice[u.node]]) for u in problem.usages if u.start < u.stop]
    if not alive:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    starts, stops, amounts = (np.array(column) for column in zip(*alive, strict=True))
    times = np.unique(np.concatenate([starts, stops]))
    change = np.zeros(len(times))
    np.add.at(change, np.searchsorted(times, starts), amounts)
    np.add.at(change, np.searchsorted(times, stops), -amounts.astype(float))
    return times, np.cumsum(change)


def evaluate(problem: Problem, choice: np.ndarray) -> Evaluation:
    """The cost of a choice, its peak usage, and whether it is finite and within the limit.

    >>> evaluate(Problem(costs=[np.array([4.0, 2.0])]), np.array([1]))
    Evaluation(cost=2.0, peak=0.0, feasible=True)
    """
    choice = np.asarray(choice)
    if choice.shape != (len(problem.costs),):
        raise ProblemError(
            f"A choice of shape {choice.shape} for {len(problem.costs)} nodes.", "Name one option a node."
        )
    outside = np.flatnonzero((choice < 0) | (choice >= problem.sizes))
    if len(outside):
        raise ProblemError(f"Option {choice[outside[0]]} of node {outside[0]} does not exist.")
    total = float(sum(float(cost[pick]) for cost, pick in zip(problem.costs, choice, strict=True)))
    total += float(sum(float(edge.costs[choice[edge.first], choice[edge.second]]) for edge in problem.edges))
    _, usage = usage_over_time(problem, choice)
    peak = float(usage.max(initial=0.0))
    within = problem.usage_limit is None or peak <= problem.usage_limit + tolerance(problem.usage_limit)
    return Evaluation(total, peak, bool(np.isfinite(total) and within))


def with_options(problem: Problem, picks: Sequence[np.ndarray]) -> Problem:
    """The problem with only the options ``picks`` of every node, in that order.

    >>> with_options(Problem([np.array([4.0, 2.0])]), [np.array([1])]).costs[0].tolist()
    [2.0]
    """
    costs = [cost[pick] for cost, pick in zip(problem.costs, picks, strict=True)]
    edges = [Edge(e.first, e.second, e.costs[np.ix_(picks[e.first], picks[e.second])]) for e in problem.edges]
    usages = [Usage(u.node, u.start, u.stop, u.amounts[picks[u.node]]) for u in problem.usages]
    return Problem(costs, edges, usages, problem.usage_limit, problem.name)


def without_oversized(problem: Problem) -> Problem:
    """The problem with every option forbidden that alone exceeds the limit, and its amounts gone from all sums.

    Options keep their numbers. What is left are amounts up to the limit, so that neither infinite amounts nor huge ones,
    beside which small ones vanish in floating point, reach a solver.

    >>> large = Problem([np.zeros(2)], usages=[Usage(0, 0, 1, np.array([1e300, 3.0]))], usage_limit=4.0)
    >>> without_oversized(large).costs[0].tolist(), without_oversized(large).usages[0].amounts.tolist()
    ([inf, 0.0], [0.0, 3.0])
    """
    limit = problem.usage_limit
    if limit is None or limit == np.inf:
        return problem if limit is None else replace(problem, usage_limit=None)
    most = limit + tolerance(limit)
    forbidden: dict[int, np.ndarray] = {}
    for usage in problem.usages:
        if usage.start < usage.stop and float(usage.amounts.max(initial=0.0)) > most:
            forbidden[usage.node] = forbidden.get(usage.node, False) | (usage.amounts > most)
    if not forbidden:
        return problem
    costs = list(problem.costs)
    for node, mask in forbidden.items():
        costs[node] = np.where(mask, np.inf, costs[node])
    usages = [
        u._replace(amounts=np.where(forbidden[u.node], 0.0, u.amounts)) if u.node in forbidden else u
        for u in problem.usages
    ]
    return replace(problem, costs=costs, usages=usages)


def tolerance(value: float) -> float:
    """How far floating-point sums near ``value`` may be off; zero for whole numbers, whose sums are exact."""
    return 0.0 if float(value).is_integer() and abs(value) < 2**53 else 1e-9 * max(1.0, abs(value))
