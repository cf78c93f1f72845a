"""Independent parts of a problem, solved one by one: a reduction with a way back.

Nodes hang together where an edge joins them, and where they use memory at a time at which the limit could be exceeded;
a time at which even the largest amounts keep the limit couples nothing. Parts share neither, so the optimum of the whole
is the parts' optima put side by side, its bound the sum of their bounds, and one part without a choice leaves none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.search.choose.problem import Edge, Problem, Usage
from shardwright.search.choose.timeline import critical_times
from shardwright.search.solution import Solution


@dataclass(frozen=True, eq=False)
class Component:
    """One part; ``nodes[i]`` is the number that its node ``i`` has in the whole."""

    problem: Problem
    nodes: np.ndarray


def separate(problem: Problem) -> list[Component]:
    """The independent parts of a problem, in the order of their first nodes.

    >>> pair = np.zeros((2, 2))
    >>> whole = Problem([np.zeros(2)] * 4, [Edge(0, 2, pair), Edge(1, 3, pair)])
    >>> [part.nodes.tolist() for part in separate(whole)]
    [[0, 2], [1, 3]]
    """
    leader = list(range(len(problem.costs)))

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    def join(nodes: Sequence[int]) -> None:
        for node in nodes[1:]:
            first, second = sorted((find(nodes[0]), find(node)))
            leader[second] = first

    for first, second, _ in problem.edges:
        join((first, second))
    for nodes in _coupled(problem):
        join(nodes)
    roots = np.array([find(node) for node in range(len(leader))], dtype=np.int64)
    if len(np.unique(roots)) <= 1:
        return [Component(problem, np.arange(len(leader)))]
    return _parts(problem, roots)


def _coupled(problem: Problem) -> list[list[int]]:
    """Groups of nodes that use memory together at times at which the limit could be exceeded."""
    if not problem.limited or problem.usage_limit is None:
        return []
    timeline = critical_times(problem)
    largest = [float(u.amounts[np.isfinite(problem.costs[u.node])].max(initial=0.0)) for u in problem.usages]
    change = np.zeros(len(timeline.times) + 1)
    np.add.at(change, timeline.first, largest)
    np.add.at(change, timeline.last, np.negative(largest))
    tight = np.cumsum(change)[:-1] > problem.usage_limit
    numbered = np.concatenate([[0], np.cumsum(tight)])  # times counted without those that couple nothing
    starts, stops = numbered[timeline.first], numbered[timeline.last]
    groups: list[list[int]] = []
    reach = 0
    for entry in np.argsort(starts, kind="stable"):
        if starts[entry] == stops[entry]:
            continue
        if not groups or starts[entry] >= reach:
            groups.append([])
        groups[-1].append(problem.usages[entry].node)
        reach = max(reach, int(stops[entry]))
    return groups


def _parts(problem: Problem, roots: np.ndarray) -> list[Component]:
    order = {int(root): place for place, root in enumerate(np.unique(roots))}
    part_of = np.array([order[int(root)] for root in roots])
    members = [np.flatnonzero(part_of == part) for part in range(len(order))]
    number = np.zeros(len(roots), dtype=np.int64)
    for nodes in members:
        number[nodes] = np.arange(len(nodes))
    edges: list[list[Edge]] = [[] for _ in members]
    usages: list[list[Usage]] = [[] for _ in members]
    for edge in problem.edges:
        edges[part_of[edge.first]].append(Edge(int(number[edge.first]), int(number[edge.second]), edge.costs))
    for usage in problem.usages:
        usages[part_of[usage.node]].append(usage._replace(node=int(number[usage.node])))
    parts = []
    for part, nodes in enumerate(members):
        costs = [problem.costs[node] for node in nodes.tolist()]
        parts.append(Component(Problem(costs, edges[part], usages[part], problem.usage_limit, problem.name), nodes))
    return parts


def together(parts: Sequence[Component], solutions: Sequence[Solution[np.ndarray]]) -> Solution[np.ndarray]:
    """The solution of the whole that the parts' solutions make: the way back."""
    choice = np.zeros(sum(len(part.nodes) for part in parts), dtype=np.int64)
    for part, solution in zip(parts, solutions, strict=True):
        choice[part.nodes] = solution.answer
    return Solution(
        choice,
        sum(solution.cost for solution in solutions),
        sum(solution.lower_bound for solution in solutions),
        all(solution.optimal for solution in solutions),
        sum(solution.seconds for solution in solutions),
    )
