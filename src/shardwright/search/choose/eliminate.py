"""Exact search by eliminating one node after the other (PaSE, IPDPS 2021; bucket elimination, Dechter 1999).

Eliminating a node v replaces every table that mentions v by one table over v's neighbours: ``new[n1, n2, …] = min
over v of (cost[v] + Σ tables[v, n…])``. The order takes the node whose resulting table is smallest, and is found
before any table is built, so a problem that would not fit is refused with the predicted size. Tables are built once
for equal inputs: the equal layers of a deep model repeat the same eliminations, so depth costs only bookkeeping. No
usage limit here: callers check it, or price it into the node costs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.solution import Solution
from shardwright.units import count_text

DEFAULT_ENTRIES = 2**27  # 1 GiB of float64 for the largest table
DEFAULT_WORK = 2**34


@dataclass(frozen=True)
class Order:
    """An elimination order with what it will need: entries of the largest table, additions in all."""

    nodes: list[int]
    scopes: list[tuple[int, ...]]
    largest: int
    work: int


def elimination_order(
    sizes: list[int],
    pairs: list[tuple[int, int]],
    *,
    max_entries: int = DEFAULT_ENTRIES,
    max_work: int = DEFAULT_WORK,
    name: str = "the problem",
) -> Order:
    """The order that always eliminates the node with the smallest resulting table; `TooLarge` once that does not fit.

    >>> elimination_order([2, 3, 2], [(0, 1), (1, 2)]).nodes
    [0, 1, 2]
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for first, second in pairs:
        if first != second and sizes[first] > 1 and sizes[second] > 1:  # one option alone is no decision
            neighbours[first].add(second)
            neighbours[second].add(first)

    # Ties go to the node that fewest eliminations lie behind: equal layers then shrink in step, with equal tables.
    behind = [0] * len(sizes)

    tables = [prod([sizes[other] for other in neighbours[node]]) for node in range(len(sizes))]

    def priority(node: int) -> tuple[int, int, int]:
        return tables[node], tables[node] * sizes[node], behind[node]

    current = [priority(node) for node in range(len(sizes))]
    heap = [(*current[node], node) for node in range(len(sizes))]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    nodes, scopes, largest, work = [], [], 1, 0
    while heap:
        entries, cost, depth, node = heapq.heappop(heap)
        if done[node] or (entries, cost, depth) != current[node]:
            continue
        work += cost
        if entries > max_entries or work > max_work:
            raise TooLarge(
                f"Exact elimination of {name} needs a table of at least {count_text(entries)} entries "
                f"({count_text(8 * entries >> 30)} GiB) and {count_text(work)} additions.",
                "Use the bounded search instead, or allow larger tables.",
            )
        done[node] = True
        around = neighbours[node]
        nodes.append(node)
        scopes.append(tuple(sorted(around)))
        largest = max(largest, entries)
        for other in around:
            fresh_ones = around - neighbours[other]
            fresh_ones.discard(other)
            neighbours[other] |= fresh_ones
            neighbours[other].discard(node)
            # Kept up to date rather than multiplied anew: some nodes have thousands of neighbours.
            tables[other] = tables[other] // sizes[node] * prod([sizes[one] for one in fresh_ones])
            behind[other] = max(behind[other], depth + 1)
            fresh = priority(other)
            if fresh != current[other]:
                current[other] = fresh
                heapq.heappush(heap, (*fresh, other))
    return Order(nodes, scopes, largest, work)


def eliminate(
    problem: Problem, *, max_entries: int = DEFAULT_ENTRIES, max_work: int = DEFAULT_WORK, order: Order | None = None
) -> tuple[np.ndarray, float]:
    """The cheapest choice when the usage limit is ignored, and its cost; `TooLarge` before starting what cannot fit.

    >>> problem = Problem(costs=[np.array([1.0, 0.0]), np.array([0.0, 3.0])])
    >>> choice, cost = eliminate(problem)
    >>> choice.tolist(), cost
    ([1, 0], 0.0)
    """
    sizes = [len(cost) for cost in problem.costs]
    if order is None:
        pairs = [(edge.first, edge.second) for edge in problem.edges]
        order = elimination_order(sizes, pairs, max_entries=max_entries, max_work=max_work, name=problem.name)
    tables = _Tables(problem)
    total = 0.0
    for node, scope in zip(order.nodes, order.scopes, strict=True):
        total += tables.eliminate(node, scope)
    if not np.isfinite(total):
        raise Infeasible(
            f"Every choice of {problem.name} contains a forbidden pair.", "Allow more options or fewer forbidden pairs."
        )
    return tables.backtrack(order), total


def solve_by_elimination(problem: Problem, *, time_limit: float | None = None, seed: int = 0) -> Solution[np.ndarray]:
    """`eliminate` behind the solvers' common signature; a choice beyond the usage limit is refused with `TooLarge`.

    >>> solve_by_elimination(Problem(costs=[np.array([4.0, 2.0])])).cost
    2.0
    """
    started = time.perf_counter()
    choice, bound = eliminate(problem)
    cost, peak, feasible = evaluate(problem, choice)
    if not feasible:
        raise TooLarge(
            f"The cheapest choice of {problem.name} peaks at {peak:.6g}, above its limit {problem.usage_limit}.",
            "Use a solver that knows the limit.",
        )
    return Solution(choice, cost, min(bound, cost), True, time.perf_counter() - started)


class _Tables:
    """The tables left while eliminating. A table is (scope, array); equal arrays are one object, so work is shared."""

    def __init__(self, problem: Problem) -> None:
        self.sizes = [len(cost) for cost in problem.costs]
        self.unary: list[np.ndarray] = list(problem.costs)
        self.around: list[dict[tuple[int, ...], list[np.ndarray]]] = [{} for _ in problem.costs]
        self.used: dict[int, list[tuple[tuple[int, ...], np.ndarray]]] = {}
        self.made: dict[object, np.ndarray] = {}
        self.alive: list[object] = []  # keys hold ids, so what they name must live as long
        for first, second, matrix in problem.edges:
            if first == second:
                self.unary[first] = self._sum("diagonal", self.unary[first], matrix)
            elif self.sizes[first] == 1 or self.sizes[second] == 1:
                free = second if self.sizes[first] == 1 else first
                self.unary[free] = self._sum("flat", self.unary[free], matrix)
            elif first < second:
                self._add((first, second), matrix)
            else:
                self._add((second, first), self._transposed(matrix))

    def _transposed(self, matrix: np.ndarray) -> np.ndarray:
        return self._once(("transpose", id(matrix)), lambda: np.ascontiguousarray(matrix.T), matrix)

    def _sum(self, kind: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        def add() -> np.ndarray:
            if kind == "diagonal":
                return left + np.diagonal(right)
            return left + (right.ravel() if kind == "flat" else right)

        return self._once((kind, id(left), id(right)), add, left, right)

    def _once(self, key: object, make: Callable[[], np.ndarray], *inputs: np.ndarray) -> np.ndarray:
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = make()
            self.alive.extend(inputs)
        return found

    def _add(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        first = self.around[scope[0]].get(scope)
        if first is None:
            entry = [table]
            for node in scope:
                self.around[node][scope] = entry
        else:
            first[0] = self._sum("sum", first[0], table)

    def eliminate(self, node: int, scope: tuple[int, ...]) -> float:
        tables = [(variables, entry[0]) for variables, entry in self.around[node].items()]
        for variables, _ in tables:
            for other in variables:
                if other != node:
                    del self.around[other][variables]
        # Where each table's axes lie in (node, *scope); equal positions and equal arrays give an equal result.
        place = {other: position + 1 for position, other in enumerate(scope)}
        place[node] = 0
        laid = sorted((tuple(place[v] for v in variables), id(table), table) for variables, table in tables)
        self.used[node] = tables
        shape = tuple(self.sizes[other] for other in scope)
        key = ("eliminated", id(self.unary[node]), tuple((axes, number) for axes, number, _ in laid), shape)
        result = self._once(
            key,
            lambda: _minimum(self.unary[node], [(axes, table) for axes, _, table in laid], shape),
            self.unary[node],
            *(table for _, _, table in laid),
        )
        if not scope:
            return float(result)
        if len(scope) == 1:
            self.unary[scope[0]] = self._sum("sum", self.unary[scope[0]], result)
        else:
            self._add(scope, result)
        return 0.0

    def backtrack(self, order: Order) -> np.ndarray:
        choice = np.zeros(len(self.sizes), dtype=np.int64)
        for node in reversed(order.nodes):
            values = self.unary[node]
            for variables, table in self.used[node]:
                values = values + table[tuple(slice(None) if v == node else choice[v] for v in variables)]
            choice[node] = int(np.argmin(values))
        return choice


def _minimum(unary: np.ndarray, tables: list[tuple[tuple[int, ...], np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """``min over v of unary[v] + Σ tables``, with v first; small tables are added before they are broadcast."""
    whole = (len(unary), *shape)
    terms = []
    for axes, table in tables:
        arranged = np.transpose(table, np.argsort(axes))
        widths = [1] * len(whole)
        for axis in axes:
            widths[axis] = whole[axis]
        terms.append(arranged.reshape(widths))
    terms.sort(key=lambda term: term.size)
    terms.insert(0, unary.reshape((-1,) + (1,) * len(shape)))
    if prod(whole) <= 2**16:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.min(axis=0)
    result = np.full(shape, np.inf)
    scratch = np.empty(shape)
    for option in range(len(unary)):
        narrow = terms[0][option]
        for term in terms[1:-1]:
            narrow = narrow + term[option]
        np.add(narrow, terms[-1][option], out=scratch)
        np.minimum(result, scratch, out=result)
    return result
