"""A choice problem taken apart for reduction: a simple graph with both directions of every edge, and the way back.

Parallel edges are added up and self-loops folded into their nodes on entry. Every reduction removes options or whole
nodes and leaves a record of how a removed node's option follows from the options of nodes that remained; `Workspace.back`
replays the records in reverse. Options keep their original numbers as labels, so records never need renumbering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardwright.errors import Infeasible
from shardwright.search.choose.problem import Edge, Problem, Usage

Back = Callable[[np.ndarray], np.ndarray]


class Record(NamedTuple):
    """``node`` takes option ``table[options of parents]``, all in original numbers."""

    node: int
    parents: tuple[int, ...]
    table: np.ndarray


class Workspace:
    """The mutable state of a chain of reductions.

    Example: ``work = Workspace(problem); reduce(work); smaller, back = work.problem(), work.back``
    """

    def __init__(self, problem: Problem) -> None:
        self.original = problem
        self.costs: list[np.ndarray] = list(problem.costs)
        self.labels: list[np.ndarray] = [np.arange(len(cost)) for cost in problem.costs]
        self.alive = np.ones(len(self.costs), dtype=bool)
        self.adjacent: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.usages: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in self.costs]
        self.records: list[Record] = []
        self.changed: set[int] = set(range(len(self.costs)))  # nodes that may have newly dominated options
        # Results for shared arrays are shared too; the arrays are kept because their ids are the keys.
        self._shared: dict[object, tuple[object, np.ndarray]] = {}
        for first, second, matrix in problem.edges:
            self.add_edge(first, second, matrix)
        if problem.usage_limit is not None:
            for node, start, stop, amounts in problem.usages:
                if start < stop:
                    self.add_usage(node, (start, stop), amounts)

    def nodes(self) -> list[int]:
        """The nodes not yet removed."""
        return [int(node) for node in np.flatnonzero(self.alive)]

    def finite(self, matrix: np.ndarray) -> np.ndarray:
        """Which entries are allowed; computed once for a shared matrix."""
        return self.once(("finite", id(matrix)), matrix, lambda: np.isfinite(matrix))

    def transposed(self, matrix: np.ndarray) -> np.ndarray:
        """The transpose; one object for a shared matrix."""
        return self.once(("flipped", id(matrix)), matrix, lambda: np.ascontiguousarray(matrix.T))

    def once(self, key: object, inputs: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        """What ``make`` returns, made once for equal keys; ``inputs`` are the arrays whose ids are in the key."""
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = (inputs, make())
        return found[1]

    def add_edge(self, first: int, second: int, matrix: np.ndarray) -> None:
        """Add to the costs between two nodes; a loop goes to the node itself."""
        if first == second:
            self.costs[first] = self.costs[first] + np.diagonal(matrix)
            return
        known = self.adjacent[first].get(second)
        if known is not None:
            matrix = known + matrix
        self.adjacent[first][second] = matrix
        self.adjacent[second][first] = self.transposed(matrix)

    def add_usage(self, node: int, interval: tuple[int, int], amounts: np.ndarray) -> None:
        """Add to what a node uses during an interval."""
        known = self.usages[node].get(interval)
        self.usages[node][interval] = amounts if known is None else known + amounts

    def keep(self, node: int, mask: np.ndarray) -> None:
        """Restrict a node to the options where ``mask`` is true."""
        if mask.all():
            return
        if not mask.any():
            raise Infeasible(
                f"No option of node {node} of {self.original.name} is left once forbidden pairs are followed through.",
                "Allow more options or fewer forbidden pairs.",
            )
        self.changed.add(node)
        self.changed.update(self.adjacent[node])
        pattern = mask.tobytes()

        def rows(array: np.ndarray) -> np.ndarray:
            return self.once(("rows", id(array), pattern), array, lambda: np.ascontiguousarray(array[mask]))

        self.costs[node] = rows(self.costs[node])
        self.labels[node] = self.labels[node][mask]
        self.usages[node] = {interval: rows(amounts) for interval, amounts in self.usages[node].items()}
        for other, matrix in self.adjacent[node].items():
            smaller = rows(matrix)
            self.adjacent[node][other] = smaller
            self.adjacent[other][node] = self.transposed(smaller)

    def absorb(self, node: int, into: int, follows: np.ndarray) -> None:
        """Remove a node whose option is ``follows[option of into]``, whether or not they are neighbours."""
        self.changed.add(into)
        self.changed.update(self.adjacent[node])
        direct = self.adjacent[into].pop(node, None)
        if direct is not None:
            del self.adjacent[node][into]
            self.costs[into] = self.costs[into] + direct[np.arange(len(follows)), follows]
        self.costs[into] = self.costs[into] + self.costs[node][follows]
        for other, matrix in self.adjacent[node].items():
            del self.adjacent[other][node]
            self.add_edge(into, other, np.ascontiguousarray(matrix[follows]))
        for interval, amounts in self.usages[node].items():
            self.add_usage(into, interval, amounts[follows])
        table = np.zeros(int(self.labels[into].max()) + 1, dtype=np.int64)
        table[self.labels[into]] = self.labels[node][follows]
        self._remove(node, Record(node, (into,), table))

    def eliminate(self, node: int) -> None:
        """Remove a node without usage and at most two neighbours by minimising over it."""
        from shardwright.search.choose.dominance import least_between

        around = list(self.adjacent[node].items())
        (_, one), own = around[0], self.costs[node]
        second = around[1][1] if len(around) > 1 else np.zeros((len(own), 1))
        value, best = least_between(own, one, second)
        if len(around) == 1:
            value, best = value[:, 0], best[:, 0]
        self.changed.update(self.adjacent[node])
        for other, _ in around:
            del self.adjacent[other][node]
        others = tuple(other for other, _ in around)
        if len(others) == 1:
            self.costs[others[0]] = self.costs[others[0]] + value
        else:
            self.add_edge(others[0], others[1], value)
        table = np.zeros([int(self.labels[other].max()) + 1 for other in others], dtype=np.int64)
        table[np.ix_(*(self.labels[other] for other in others))] = self.labels[node][best]
        self.adjacent[node] = {}
        self._remove(node, Record(node, others, table))

    def _remove(self, node: int, record: Record) -> None:
        self.records.append(record)
        self.alive[node] = False
        self.adjacent[node] = {}
        self.usages[node] = {}

    def problem(self) -> Problem:
        """What remains, as a problem of its own; nodes keep their order."""
        nodes = self.nodes()
        number = {node: position for position, node in enumerate(nodes)}
        edges = [
            Edge(number[node], number[other], matrix)
            for node in nodes
            for other, matrix in self.adjacent[node].items()
            if node < other
        ]
        usages = [
            Usage(number[node], start, stop, amounts)
            for node in nodes
            for (start, stop), amounts in self.usages[node].items()
            if amounts.any()
        ]
        limit = self.original.usage_limit
        return Problem([self.costs[node] for node in nodes], edges, usages, limit, self.original.name)

    def back(self, choice: np.ndarray) -> np.ndarray:
        """The choice of the original problem that a choice of the remaining one stands for."""
        whole = np.zeros(len(self.costs), dtype=np.int64)
        for node, pick in zip(self.nodes(), choice, strict=True):
            whole[node] = self.labels[node][pick]
        for node, parents, table in reversed(self.records):
            whole[node] = table[tuple(whole[parent] for parent in parents)]
        return whole
