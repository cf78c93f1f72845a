"""Random small choice problems for the tests."""

from __future__ import annotations

import numpy as np

from shardwright.search.choose import Edge, Problem, Usage


def random_problem(
    seed: int, *, nodes: int = 5, options: int = 4, forbidden: float = 0.2, limited: bool = True, density: float = 1.5
) -> Problem:
    """A problem with a planted feasible choice, parallel edges and self-loops included."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, options + 1, nodes)
    planted = [int(generator.integers(size)) for size in sizes]
    costs = [generator.integers(0, 20, size).astype(float) for size in sizes]
    edges = []
    for _ in range(int(density * nodes)):
        first, second = (int(node) for node in generator.integers(0, nodes, 2))
        matrix = generator.integers(0, 20, (sizes[first], sizes[second])).astype(float)
        matrix[generator.random(matrix.shape) < forbidden] = np.inf
        matrix[planted[first], planted[second]] = float(generator.integers(0, 40))
        edges.append(Edge(first, second, matrix))
    usages = []
    for node in range(nodes):
        for _ in range(int(generator.integers(0, 3))):
            start = int(generator.integers(0, 8))
            usages.append(
                Usage(
                    node,
                    start,
                    start + int(generator.integers(1, 5)),
                    generator.integers(0, 9, sizes[node]).astype(float),
                )
            )
    free = Problem(costs, edges, usages, None, f"random-{seed}")
    if not limited:
        return free
    from shardwright.search.choose import evaluate

    peak = evaluate(free, np.array(planted)).peak
    return Problem(costs, edges, usages, float(np.floor(peak * generator.uniform(1.0, 1.2))), f"random-{seed}")
