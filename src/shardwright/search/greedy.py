"""Spartan's heuristic (Huang et al., 2015): decide the largest things first, each as cheap as can be beside what is fixed.

Nodes are visited by decreasing bytes; each takes the option that is cheapest together with its decided neighbours. What
is forbidden beside its neighbours is repaired by going back to the cheapest allowed pair.
"""

from __future__ import annotations

import numpy as np

from shardwright.search.choose import Problem


def greedy(problem: Problem, sizes: np.ndarray) -> np.ndarray:
    """One option per node, larger ``sizes`` first."""
    beside: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]
    for first, second, matrix in problem.edges:
        beside[first].append((second, matrix))
        beside[second].append((first, matrix.T))
    choice = np.full(len(problem.costs), -1)
    for node in np.argsort(-sizes, kind="stable"):
        cost = np.array(problem.costs[node], dtype=float)
        for other, matrix in beside[node]:
            cost = cost + (matrix[:, choice[other]] if choice[other] >= 0 else matrix.min(axis=1))
        choice[node] = int(np.argmin(cost))
    return choice
