"""Elimination and the integer program against brute force."""

from __future__ import annotations

import highspy
import numpy as np
import pytest

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose import Edge, Problem, evaluate, integer, read_problem, solve
from shardwright.search.choose.eliminate import eliminate, solve_by_elimination

from .random_problems import random_problem

PASE = {
    "alexnet-p8": 9.70983e10,
    "alexnet-p64": 4.11205e10,
    "rnnlm-p8": 4.02496e12,
    "rnnlm-p64": 9.35819e11,
    "inception3-p8": 7.82141e11,
    "transformer-p8": 1.42108e12,
    "transformer-p16": 1.00499e12,
}


@pytest.mark.parametrize("seed", range(60))
def test_elimination_equals_brute_force_without_limit(seed):
    problem = random_problem(seed, limited=False)
    found, expected = solve_by_elimination(problem), solve(problem, method="brute")
    assert found.cost == expected.cost
    assert found.optimal and found.lower_bound == found.cost
    assert evaluate(problem, found.answer).cost == found.cost


@pytest.mark.parametrize("seed", range(30))
def test_integer_program_equals_brute_force_under_a_limit(seed):
    problem = random_problem(seed)
    assert solve(problem, method="integer").cost == pytest.approx(solve(problem, method="brute").cost)


def test_every_run_of_the_integer_program_ends_within_the_time_that_is_left(monkeypatch):
    """HiGHS counts the seconds of each run by itself; what earlier ones took was once added to the limit of the next."""
    limits = []

    class Slow(highspy.Highs):
        def getRunTime(self):
            return 100.0 * len(limits)

        def setOptionValue(self, name, value):
            if name == "time_limit":
                limits.append(value)
            return super().setOptionValue(name, value)

    monkeypatch.setattr(highspy, "Highs", Slow)
    monkeypatch.setattr(integer, "FIRST_ROWS", 0)
    monkeypatch.setattr(integer, "ROWS_PER_TURN", 1)
    for seed in range(10):
        solve(random_problem(seed), method="integer", time_limit=20.0)
    assert len(limits) > 10  # rows were added, and the program run again
    assert max(limits) <= 20.0


@pytest.mark.parametrize("name", PASE)
def test_listed_optimum_of_pase(published, name):
    solution = solve(read_problem(published / "pase" / f"pase-{name}.json.xz"))
    assert solution.cost == pytest.approx(PASE[name], rel=1e-5)
    assert solution.optimal


def test_refuses_in_advance_with_the_predicted_size():
    count, options = 12, 30
    edges = [Edge(i, j, np.zeros((options, options))) for i in range(count) for j in range(i)]
    with pytest.raises(TooLarge, match=r"table of at least 1\.77e\+16 entries"):
        eliminate(Problem([np.zeros(options)] * count, edges))


def test_forbidden_everywhere_is_infeasible():
    with pytest.raises(Infeasible):
        eliminate(Problem([np.zeros(1), np.zeros(1)], [Edge(0, 1, np.full((1, 1), np.inf))]))


def test_depth_is_nearly_free():
    """Equal layers share their tables: twice the depth builds no further matrix, only messages along the chain."""
    from shardwright.search.choose import eliminate as module

    generator = np.random.default_rng(0)
    matrices = [generator.random((6, 6)) for _ in range(5)]
    unary = generator.random(6)

    def matrices_made(depth: int) -> int:
        edges = []
        for layer in range(depth):
            top, left, right, bottom = 3 * layer, 3 * layer + 1, 3 * layer + 2, 3 * layer + 3
            ends = [(top, left), (top, right), (left, bottom), (right, bottom), (top, bottom)]
            edges += [Edge(*pair, matrix) for pair, matrix in zip(ends, matrices, strict=True)]
        problem = Problem([unary] * (3 * depth + 1), edges)
        tables = module._Tables(problem)
        order = module.elimination_order(problem.sizes.tolist(), [(e.first, e.second) for e in edges])
        for node, scope in zip(order.nodes, order.scopes, strict=True):
            tables.eliminate(node, scope)
        return sum(table.ndim > 1 for table in tables.made.values())

    assert matrices_made(40) == matrices_made(20) < 10
