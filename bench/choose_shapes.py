"""Choice problems of shapes that models seldom have: hubs, cliques, long chains, one option, huge costs, tight limits.

    python -m bench.choose_shapes [SECONDS] [NAME ...]

Each is solved within SECONDS (10 unless told); the row says what the answer costs, what is proved, how long it took and
the most memory the process ever had. Nothing may take longer than the limit and five seconds, and nothing may fail.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve

Shape = Callable[[np.random.Generator], Problem]
SLACK = 5.0


def _costs(draw: np.random.Generator, nodes: int, options: int, most: int = 20) -> list[np.ndarray]:
    return [draw.integers(0, most, options).astype(float) for _ in range(nodes)]


def _matrices(draw: np.random.Generator, options: int, kinds: int = 40, most: int = 20) -> list[np.ndarray]:
    return [draw.integers(0, most, (options, options)).astype(float) for _ in range(kinds)]


def _limited(problem: Problem, draw: np.random.Generator, tightness: float, least: int = 0) -> Problem:
    """Every node uses memory for a while; of a random choice's peak so much is allowed."""
    usages = []
    for node, cost in enumerate(problem.costs):
        start = int(draw.integers(0, 1000))
        amounts = draw.integers(least, 1000, len(cost)).astype(float)
        usages.append(Usage(node, start, start + int(draw.integers(1, 400)), amounts))
    limited = replace(problem, usages=usages)
    choice = draw.integers(problem.sizes)
    return replace(limited, usage_limit=float(np.floor(evaluate(limited, choice).peak * tightness)))


def hub(draw: np.random.Generator, leaves: int = 5000, options: int = 10) -> Problem:
    """One node beside thousands, which are joined in a ring as well."""
    kinds = _matrices(draw, options)
    edges = [Edge(0, leaf, kinds[leaf % len(kinds)]) for leaf in range(1, leaves)]
    edges += [Edge(leaf, leaf + 1, kinds[leaf % 7]) for leaf in range(1, leaves - 1)]
    return Problem(_costs(draw, leaves, options), edges, name="hub")


def hubs(draw: np.random.Generator, count: int = 40, leaves: int = 3000, options: int = 8) -> Problem:
    """Every leaf hangs on four of forty hubs."""
    kinds = _matrices(draw, options)
    edges = [
        Edge(int(one), count + leaf, kinds[int(draw.integers(len(kinds)))])
        for leaf in range(leaves)
        for one in draw.choice(count, 4, replace=False)
    ]
    return Problem(_costs(draw, count + leaves, options), edges, name="hubs")


def clique(draw: np.random.Generator, nodes: int = 400, options: int = 8) -> Problem:
    kinds = _matrices(draw, options)
    edges = [Edge(a, b, kinds[(a * 7 + b) % len(kinds)]) for a in range(nodes) for b in range(a + 1, nodes)]
    return Problem(_costs(draw, nodes, options), edges, name="clique")


def chain(draw: np.random.Generator, nodes: int = 20_000, options: int = 8) -> Problem:
    kinds = _matrices(draw, options)
    edges = [Edge(a, a + 1, kinds[a % len(kinds)]) for a in range(nodes - 1)]
    return Problem(_costs(draw, nodes, options), edges, name="chain")


def chain_with_skips(draw: np.random.Generator, nodes: int = 20_000, options: int = 6) -> Problem:
    """A chain whose nodes also read some that lie far back."""
    plain, kinds = chain(draw, nodes, options), _matrices(draw, options)
    far = draw.integers(0, nodes, (nodes // 4, 2))
    skips = [Edge(int(a), int(b), kinds[int(a + b) % len(kinds)]) for a, b in far if a != b]
    return replace(plain, edges=[*plain.edges, *skips], name="chain with skips")


def one_option(draw: np.random.Generator, nodes: int = 20_000) -> Problem:
    """Nine nodes of ten have one option, the others up to eight."""
    sizes = np.where(draw.random(nodes) < 0.9, 1, draw.integers(2, 9, nodes))
    costs = [draw.integers(0, 20, size).astype(float) for size in sizes]
    pairs = draw.integers(0, nodes, (3 * nodes, 2))
    edges = [Edge(int(a), int(b), draw.integers(0, 20, (sizes[a], sizes[b])).astype(float)) for a, b in pairs if a != b]
    return Problem(costs, edges, name="one option")


def forbidden(draw: np.random.Generator, nodes: int = 3000, options: int = 8) -> Problem:
    """Seven pairs of ten are forbidden; one choice is known to be allowed."""
    planted = draw.integers(0, options, nodes)
    edges = []
    for a, b in draw.integers(0, nodes, (2 * nodes, 2)):
        if a != b:
            matrix = draw.integers(0, 20, (options, options)).astype(float)
            matrix[draw.random(matrix.shape) < 0.7] = np.inf
            matrix[planted[a], planted[b]] = 30.0
            edges.append(Edge(int(a), int(b), matrix))
    return Problem(_costs(draw, nodes, options), edges, name="forbidden pairs")


def grid(draw: np.random.Generator, side: int = 60, options: int = 6) -> Problem:
    kinds = _matrices(draw, options)
    place = np.arange(side * side).reshape(side, side)
    pairs = [*zip(place[:, :-1].ravel(), place[:, 1:].ravel(), strict=True)]
    pairs += [*zip(place[:-1].ravel(), place[1:].ravel(), strict=True)]
    edges = [Edge(int(a), int(b), kinds[(int(a) + int(b)) % len(kinds)]) for a, b in pairs]
    return Problem(_costs(draw, side * side, options), edges, name="grid")


def huge_costs(draw: np.random.Generator) -> Problem:
    """Costs around 1e17: far beyond 2^53, where whole numbers are no longer exact."""
    plain = chain_with_skips(draw, 2000)
    unit = 1e17
    edges = [Edge(a, b, matrix * unit + 1.0) for a, b, matrix in plain.edges]
    return Problem([cost * unit + 3.0 for cost in plain.costs], edges, name="huge costs")


def zero_costs(draw: np.random.Generator) -> Problem:
    """Nothing costs anything; only memory decides."""
    plain = chain_with_skips(draw, 5000)
    nothing = np.zeros((6, 6))
    return Problem([np.zeros(6)] * 5000, [e._replace(costs=nothing) for e in plain.edges], name="zero costs")


def no_edges(draw: np.random.Generator) -> Problem:
    return Problem(_costs(draw, 20_000, 10), name="no edges")


def impossible(draw: np.random.Generator) -> Problem:
    """Memory that no choice keeps, though every node's smallest amounts do at every time but one."""
    return replace(_limited(chain(draw, 3000), draw, 0.0, least=1), usage_limit=1.0)


def infinite_hub(draw: np.random.Generator) -> Problem:
    """A hub that agrees with nobody but in one way, with leaves that may not choose alike."""
    return replace(_limited(hub(draw, 2000, 6), draw, 0.9), name="hub, tight")


SHAPES: dict[str, Shape] = {
    "hub": hub,
    "hub of 20,000": lambda draw: hub(draw, 20_000, 4),
    "hub, tight": infinite_hub,
    "hubs": hubs,
    "hubs, limited": lambda draw: _limited(hubs(draw), draw, 0.8),
    "clique of 400": clique,
    "clique of 60, limited": lambda draw: _limited(clique(draw, 60), draw, 0.8),
    "chain of 20,000": chain,
    "chain of 20,000, limited": lambda draw: _limited(chain(draw), draw, 0.7),
    "chain with skips": chain_with_skips,
    "chain with skips, limited": lambda draw: _limited(chain_with_skips(draw), draw, 0.7),
    "grid": grid,
    "grid, limited": lambda draw: _limited(grid(draw), draw, 0.7),
    "one option": one_option,
    "one option, limited": lambda draw: _limited(one_option(draw), draw, 1.0),
    "forbidden pairs": forbidden,
    "huge costs": huge_costs,
    "huge costs, limited": lambda draw: _limited(huge_costs(draw), draw, 0.8),
    "zero costs, limited": lambda draw: _limited(zero_costs(draw), draw, 0.7),
    "no edges": no_edges,
    "no edges, limited": lambda draw: _limited(no_edges(draw), draw, 0.6),
    "impossible": impossible,
}


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    late = 0
    print("| shape | nodes | edges | most neighbours | cost | bound | proved | s | most memory so far, MB |")
    print("|---|--:|--:|--:|--:|--:|---|--:|--:|")
    for name in sys.argv[2:] or SHAPES:
        problem = SHAPES[name](np.random.default_rng(7))
        degree = np.bincount(
            np.array([(e.first, e.second) for e in problem.edges], dtype=np.int64).ravel(), minlength=1
        )
        began = time.perf_counter()
        try:
            found = solve(problem, time_limit=seconds, overtime=0.0)
            assert evaluate(problem, found.answer).feasible and found.lower_bound <= found.cost
            said = "optimal" if found.optimal else f"within {100 * found.gap:.2g} %"
            answer = f"{found.cost:.10g} | {found.lower_bound:.10g} | {said}"
        except Infeasible as error:
            answer = f"none | – | {error.message}"
        except TooLarge as error:
            answer = f"not found | – | {error.message}"
        took = time.perf_counter() - began
        late += took > seconds + SLACK
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"| {name} | {len(problem.costs)} | {len(problem.edges)} | {degree.max()} | {answer} | {took:.1f} "
              f"| {memory:.0f} |", flush=True)  # fmt: skip
    return late


if __name__ == "__main__":
    sys.exit(main())
