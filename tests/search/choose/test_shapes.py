"""Shapes that models seldom have: small against brute force, large within the time they were given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve
from shardwright.search.choose.eliminate import elimination_order
from shardwright.search.choose.flat import flatten
from shardwright.search.choose.neighbourhoods import random_neighbourhood
from shardwright.search.choose.walker import with_penalties

PAIRS = {
    "hub": lambda n: [(0, leaf) for leaf in range(1, n)],
    "clique": lambda n: [(a, b) for a in range(n) for b in range(a + 1, n)],
    "chain": lambda n: [(a, a + 1) for a in range(n - 1)],
    "two hubs": lambda n: [(hub, leaf) for hub in (0, 1) for leaf in range(2, n)],
    "no edges": lambda n: [],
    "again": lambda n: [(a, a + 1) for a in range(n - 1)] * 2 + [(1, 0), (2, 2)],
}


def shaped(shape: str, seed: int, scale: float = 1.0, forbidden: float = 0.0, one: float = 0.0) -> Problem:
    """A small problem of a shape; ``one`` of the nodes have one option, all use memory, a random choice keeps the limit."""
    draw = np.random.default_rng(seed)
    sizes = np.where(draw.random(7) < one, 1, draw.integers(2, 4, 7))
    kept = draw.integers(sizes)
    edges = []
    for a, b in PAIRS[shape](7):
        matrix = draw.integers(0, 9, (sizes[a], sizes[b])) * scale
        matrix[draw.random(matrix.shape) < forbidden] = np.inf
        matrix[kept[a], kept[b]] = 8 * scale
        edges.append(Edge(a, b, matrix))
    usages = [Usage(v, v % 3, 2 + v % 3, draw.integers(0, 9, size).astype(float)) for v, size in enumerate(sizes)]
    problem = Problem([draw.integers(0, 9, size) * scale for size in sizes], edges, usages)
    return replace(problem, usage_limit=evaluate(problem, kept).peak)


@pytest.mark.parametrize("method", ["auto", "limited"])
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"scale": 0.0},
        {"scale": 2.0**57},
        {"forbidden": 0.4},
        {"one": 0.6},
        {"one": 1.0},
        {"forbidden": 0.4, "one": 0.5},
    ],
    ids=["plain", "zero", "huge", "forbidden", "one option", "no choice", "forbidden, one option"],
)
@pytest.mark.parametrize("shape", PAIRS)
def test_small_shapes_equal_brute_force(shape: str, way: dict[str, float], method: str) -> None:
    for seed in range(4):
        tight = shaped(shape, seed, **way)
        for problem in (tight, replace(tight, usage_limit=None), replace(tight, usage_limit=tight.usage_limit / 2)):
            try:
                expected = solve(problem, method="brute").cost
            except Infeasible:
                with pytest.raises(Infeasible):
                    solve(problem, method=method)
                continue
            found = solve(problem, method=method)
            assert found.cost == pytest.approx(expected, rel=1e-12) and found.optimal
            assert found.lower_bound <= expected and evaluate(problem, found.answer).feasible


def star(leaves: int, options: int = 3) -> Problem:
    """A hub with many leaves in a ring; all like to differ from the hub and from the next."""
    alike = np.eye(options)
    edges = [Edge(0, leaf, alike) for leaf in range(1, leaves + 1)]
    edges += [Edge(leaf, leaf % leaves + 1, alike) for leaf in range(1, leaves + 1)]
    return Problem([np.zeros(options)] * (leaves + 1), edges)


def test_more_options_around_a_node_than_any_float_holds() -> None:
    """The product of the options of 700 neighbours is beyond 1.8e308."""
    place = random_neighbourhood(star(700), 1e4, np.random.default_rng(0))
    assert sorted([*place.order.nodes, *np.flatnonzero(place.held).tolist()]) == list(range(701))
    assert np.isfinite(place.work)


@pytest.mark.parametrize("seed", range(5))
def test_no_node_is_eliminated_at_a_higher_price_than_asked_for(seed: int) -> None:
    """The products are kept up to date; here they are taken anew from what was eliminated, and when."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 6, 60)
    pairs = {(int(min(p)), int(max(p))) for p in draw.integers(0, 60, (240, 2)) if p[0] != p[1]}
    edges = [Edge(a, b, np.zeros((sizes[a], sizes[b]))) for a, b in sorted(pairs)]
    place = random_neighbourhood(Problem([np.zeros(size) for size in sizes], edges), 500, draw)
    near = {v: {a + b - v for a, b in pairs if v in (a, b) and min(sizes[a], sizes[b]) > 1} for v in range(60)}
    near = {v: {other for other in around if not place.held[other]} for v, around in near.items()}
    least = 0
    for node, scope in zip(place.order.nodes, place.order.scopes, strict=True):
        assert sorted(near[node]) == list(scope)
        additions = int(sizes[node] * np.prod(sizes[list(scope)]))
        assert additions <= 500
        least += additions
        for other in scope:
            near[other] = (near[other] | near[node]) - {node, other}
    assert least <= place.order.work <= 500 * len(place.order.nodes)  # what was held later still counted


def test_a_table_beyond_every_float_is_refused_with_its_size() -> None:
    sizes = [10] * 400
    pairs = [(a, b) for a in range(400) for b in range(a)]
    with pytest.raises(TooLarge, match=r"about 10\^39\d entries"):
        elimination_order(sizes, pairs)
    with pytest.raises(TooLarge, match=r"about 10\^400 choices"):
        solve(Problem([np.zeros(10)] * 400), method="brute")


def test_a_choice_is_known_however_many_nodes_add_up() -> None:
    """Of 400 nodes without any limit no choice was found: their sum was taken for that of a forbidden pair."""
    draw = np.random.default_rng(0)
    place = np.arange(400).reshape(20, 20)
    pairs = [
        *zip(place[:, :-1].flat, place[:, 1:].flat, strict=True),
        *zip(place[:-1].flat, place[1:].flat, strict=True),
    ]
    kinds = [draw.integers(5, 20, (4, 4)).astype(float) for _ in range(9)]
    edges = [Edge(int(a), int(b), kinds[int(a + b) % 9]) for a, b in pairs]
    found = solve(
        Problem([draw.integers(0, 20, 4).astype(float) for _ in range(400)], edges), time_limit=0.5, overtime=0
    )
    assert found.lower_bound <= found.cost and found.gap < 0.1


@pytest.mark.parametrize("seed", range(10))
def test_the_penalty_tells_choices_with_a_forbidden_pair_from_all_others(seed: int) -> None:
    draw = np.random.default_rng(seed)
    problem = shaped("clique", seed, forbidden=0.3)
    costs = [cost - 5.0 for cost in problem.costs]  # also where sums are negative
    flat = flatten(replace(problem, costs=costs))
    penalised, penalty = with_penalties(flat)
    for _ in range(200):
        choice = draw.integers(problem.sizes)
        own = sum(float(cost[pick]) for cost, pick in zip(costs, choice, strict=True))
        pairs = [float(edge.costs[choice[edge.first], choice[edge.second]]) for edge in problem.edges]
        broken = sum(not np.isfinite(pair) for pair in pairs)
        total = own + sum(pair for pair in pairs if np.isfinite(pair)) + broken * penalised.matrix.max()
        assert (total < penalty) == (broken == 0)
        assert (total > penalty) == (broken > 0)


def test_a_long_chain_with_and_without_a_limit() -> None:
    draw = np.random.default_rng(0)
    kinds = [draw.integers(0, 9, (3, 3)).astype(float) for _ in range(5)]
    edges = [Edge(a, a + 1, kinds[a % 5]) for a in range(19_999)]
    chain = Problem([np.array([0.0, 1.0, 2.0])] * 20_000, edges)
    assert solve(chain).optimal
    usages = [Usage(v, v, v + 2, np.array([2.0, 1.0, 0.0])) for v in range(20_000)]
    limited = replace(chain, usages=usages, usage_limit=3.0)
    found = solve(limited, time_limit=0.2)
    assert evaluate(limited, found.answer).feasible and found.lower_bound <= found.cost
