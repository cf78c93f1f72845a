"""Independent parts: found, solved apart, and put together again at the same cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible
from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve
from shardwright.search.choose.components import separate, together

from .random_problems import random_problem


def side_by_side(seed: int, count: int, apart: bool) -> Problem:
    """Several random problems in one, their nodes interleaved; their memory at different times, or at the same ones."""
    parts = [random_problem(seed + i, nodes=3, options=3, limited=apart) for i in range(count)]
    numbers = np.random.default_rng(seed).permutation(3 * count).reshape(count, 3)
    costs = [np.zeros(0)] * (3 * count)
    edges, usages = [], []
    for place, (part, number) in enumerate(zip(parts, numbers, strict=True)):
        for node, cost in zip(number, part.costs, strict=True):
            costs[node] = cost
        edges += [Edge(int(number[e.first]), int(number[e.second]), e.costs) for e in part.edges]
        shift = 100 * place * apart
        usages += [Usage(int(number[u.node]), u.start + shift, u.stop + shift, u.amounts) for u in part.usages]
    limit = max(part.usage_limit for part in parts) if apart else None
    return Problem(costs, edges, usages, limit, "side by side")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 3), apart=st.booleans())
def test_parts_put_together_are_the_optimum_of_the_whole(seed, count, apart):
    problem = side_by_side(seed, count, apart)
    parts = separate(problem)
    assert sorted(np.concatenate([part.nodes for part in parts]).tolist()) == list(range(len(problem.costs)))
    whole = together(parts, [solve(part.problem, method="brute") for part in parts])
    expected = solve(problem, method="brute")
    assert whole.cost == expected.cost == evaluate(problem, whole.answer).cost
    assert evaluate(problem, whole.answer).feasible and whole.optimal


@pytest.mark.parametrize("seed", range(10))
def test_the_bounded_search_solves_parts_apart(seed):
    """Three chains too alike to be reduced away, memory at different times: nine nodes, three parts."""
    problem = side_by_side(50 + seed, 3, apart=True)
    assert len(separate(problem)) >= 3
    found = solve(problem, method="limited")
    assert found.optimal and found.cost == solve(problem, method="brute").cost


def test_memory_couples_only_where_the_limit_can_be_exceeded():
    amounts = np.array([1.0, 4.0])
    usages = [Usage(node, start, start + 2, amounts) for node, start in enumerate((0, 1, 5, 9))]
    costs = [np.array([1.0, 0.0])] * 4
    tight = separate(Problem(costs, [], usages, 5.0))
    assert [part.nodes.tolist() for part in tight] == [[0, 1], [2], [3]]
    assert len(separate(Problem(costs, [], usages, 8.0))) == 4


def test_one_part_without_a_choice_leaves_none():
    usages = [Usage(0, 0, 1, np.array([1.0, 9.0])), Usage(1, 5, 6, np.array([8.0, 7.0]))]
    with pytest.raises(Infeasible):
        solve(Problem([np.zeros(2)] * 2, [], usages, 5.0), method="limited")
