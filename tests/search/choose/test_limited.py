"""The bounded search against brute force and HiGHS, and what it promises about its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible
from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve

from .random_problems import random_problem


@pytest.mark.parametrize("seed", range(200))
def test_equals_brute_force(seed):
    problem = random_problem(seed, nodes=3 + seed % 4, options=4)
    found, expected = solve(problem), solve(problem, method="brute")
    assert found.cost == expected.cost
    assert evaluate(problem, found.answer).feasible
    assert found.lower_bound <= expected.cost
    assert found.optimal


@pytest.mark.parametrize("seed", range(50))
def test_equals_integer_program(seed):
    problem = random_problem(1000 + seed, nodes=16, options=6, density=1.6)
    found, expected = solve(problem), solve(problem, method="integer")
    assert found.cost == pytest.approx(expected.cost)
    assert found.lower_bound <= expected.cost * (1 + 1e-9)


def test_same_seed_same_choice():
    problem = random_problem(7, nodes=40, options=8)
    first, second = (solve(problem, method="limited", seed=3) for _ in range(2))
    assert (first.answer == second.answer).all() and first.lower_bound == second.lower_bound


@pytest.mark.parametrize("work", [1e5, 4e7])
def test_a_limit_of_work_does_not_look_at_the_clock(work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found with so much work is the same where every look at the clock takes a minute."""
    problem = random_problem(7, nodes=120, options=12, density=3.0)
    first = solve(problem, method="limited", gap=1e-6, time_limit=1.0, work_limit=work)
    clock = iter(range(0, 10**9, 60))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    second = solve(problem, method="limited", gap=1e-6, time_limit=1.0, work_limit=work)
    assert (first.answer == second.answer).all() and first.lower_bound == second.lower_bound
    assert second.seconds >= 60.0


def test_more_work_finds_no_worse() -> None:
    problem = random_problem(7, nodes=120, options=12, density=3.0)
    few, many = (solve(problem, method="limited", gap=1e-6, work_limit=work) for work in (1e5, 2e8))
    assert many.cost < few.cost and many.lower_bound >= few.lower_bound


def test_infeasible_names_the_time():
    usage = [Usage(0, 2, 9, np.array([5.0, 6.0])), Usage(1, 4, 6, np.array([3.0]))]
    with pytest.raises(Infeasible, match=r"time 4 .* at least 8, above the limit of 7"):
        solve(Problem([np.zeros(2), np.zeros(1)], [], usage, 7.0))


def test_infeasible_only_because_of_forbidden_pairs():
    """Each node alone could be small, but not both: the pair is forbidden."""
    pair = np.array([[np.inf, 1.0], [1.0, 1.0]])
    usage = [Usage(node, 0, 1, np.array([1.0, 2.0])) for node in range(2)]
    with pytest.raises(Infeasible):
        solve(Problem([np.zeros(2)] * 2, [Edge(0, 1, pair)], usage, 2.0))


def test_unlimited_but_too_wide_for_elimination():
    generator = np.random.default_rng(0)
    count, options = 40, 12
    edges = [Edge(i, j, generator.random((options, options))) for i in range(count) for j in range(i) if (i + j) % 3]
    problem = Problem([generator.random(options) for _ in range(count)], edges)
    solution = solve(problem, time_limit=3.0)
    assert evaluate(problem, solution.answer).cost == pytest.approx(solution.cost)
    assert 0 < solution.lower_bound <= solution.cost


@pytest.mark.parametrize("seed", range(6))
def test_costs_in_microseconds_are_as_exact(seed):
    """Tolerances are relative: scaling all costs by a millionth of a second changes no choice's rank."""
    problem = random_problem(seed, nodes=6)
    small = Problem(
        [cost * 1e-6 for cost in problem.costs],
        [Edge(e.first, e.second, e.costs * 1e-6) for e in problem.edges],
        problem.usages,
        problem.usage_limit,
    )
    assert solve(small).cost == pytest.approx(1e-6 * solve(problem, method="brute").cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_no_option_of_an_optimal_choice_is_ever_struck_out(seed):
    """Whatever the prices and however few the passes: what the optimum takes is not hopeless, and no bound exceeds it."""
    from shardwright.search.choose.ascent import Ascent
    from shardwright.search.choose.flat import flatten
    from shardwright.search.choose.reductions import reduce_problem

    core, _ = reduce_problem(random_problem(seed, nodes=9, options=5, density=1.8))
    best = solve(core, method="integer")
    flat = flatten(core)
    generator = np.random.default_rng(seed)
    for scale in (0.0, 1.0, 1e3, 1e12):
        ascent = Ascent(flat, scale * generator.random(len(flat.times)))
        ascent.warm_up(1)
        for iterations in (1, 5, 50):
            ascent.run(iterations, best.cost * 1.1 + 1.0)
            assert ascent.best <= best.cost + 1e-6
            struck = ascent.hopeless(best.cost)
            assert not struck[flat.option_start[:-1] + best.answer].any()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    search_seed=st.integers(0, 1000),
    nodes=st.integers(4, 14),
    scale=st.sampled_from([1.0, 1e-6, 0.3]),
    time_limit=st.sampled_from([None, 0.05, 5.0]),
)
def test_a_claimed_optimum_is_never_above_the_integer_programs(seed, search_seed, nodes, scale, time_limit):
    """Whatever the seed, the time limit and the unit: ``optimal`` is only said of what HiGHS cannot beat."""
    whole = random_problem(seed, nodes=nodes, options=6, density=1.8)
    problem = Problem(
        [cost * scale for cost in whole.costs],
        [Edge(e.first, e.second, e.costs * scale) for e in whole.edges],
        whole.usages,
        whole.usage_limit,
    )
    expected = solve(problem, method="integer")
    found = solve(problem, method="limited", seed=search_seed, time_limit=time_limit)
    slack = 1e-7 * max(abs(expected.cost), scale)
    assert found.lower_bound <= expected.cost + slack
    assert evaluate(problem, found.answer).feasible
    if found.optimal:
        assert found.cost <= expected.cost + slack


@pytest.mark.parametrize("seed", range(10))
def test_a_search_may_end_at_a_gap(seed):
    problem = random_problem(2000 + seed, nodes=25, options=8)
    close, exact = solve(problem, method="limited", gap=0.05), solve(problem, method="limited")
    assert evaluate(problem, close.answer).feasible
    assert close.cost - close.lower_bound <= 0.05 * close.cost and close.lower_bound <= exact.cost * (1 + 1e-9)
