"""Every reduction keeps the optimum, and every choice of the smaller problem translates back at the same cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible
from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve
from shardwright.search.choose import reductions as module
from shardwright.search.choose.workspace import Workspace

from .random_problems import random_problem

REDUCTIONS = [
    module.propagate_forbidden,
    module.gather_forced,
    module.contract_determined,
    module.contract_low_degree,
    module.drop_dominated,
]


def _same_optimum(problem, smaller, back):
    expected, found = solve(problem, method="brute"), solve(smaller, method="brute")
    assert found.cost == expected.cost
    whole = back(found.answer)
    assert evaluate(problem, whole).feasible
    assert evaluate(problem, whole).cost == found.cost


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.__name__)
@pytest.mark.parametrize("seed", range(15))
def test_one_reduction_keeps_the_optimum(reduction, seed):
    problem = random_problem(seed, forbidden=0.5)
    work = Workspace(problem)
    module.propagate_forbidden(work)
    reduction(work)
    _same_optimum(problem, work.problem(), work.back)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), forbidden=st.floats(0.0, 0.8), limited=st.booleans())
def test_all_reductions_keep_the_optimum_and_every_cost(seed, forbidden, limited):
    problem = random_problem(seed, forbidden=forbidden, limited=limited)
    smaller, back = module.reduce_problem(problem)
    _same_optimum(problem, smaller, back)
    generator = np.random.default_rng(seed)
    for _ in range(5):
        choice = np.array([generator.integers(len(cost)) for cost in smaller.costs])
        here, there = evaluate(smaller, choice), evaluate(problem, back(choice))
        assert here.cost == there.cost
        assert here.peak == there.peak or problem.usage_limit is None


def test_determined_nodes_vanish_with_their_memory():
    """A chain of permutations is one decision; its usage is the sum along the chain."""
    shift = np.full((3, 3), np.inf)
    shift[[0, 1, 2], [1, 2, 0]] = 1.0
    usages = [Usage(node, node, node + 2, np.array([1.0, 2.0, 4.0])) for node in range(10)]
    problem = Problem([np.zeros(3)] * 10, [Edge(i, i + 1, shift) for i in range(9)], usages, 5.0)
    smaller, back = module.reduce_problem(problem)
    assert len(smaller.costs) == 1
    whole = back(np.zeros(1, dtype=int))
    assert evaluate(problem, whole).cost == 9.0


def test_dominance_respects_memory():
    """The dearer option uses less memory, so it must stay."""
    costs, usage = np.array([1.0, 2.0]), np.array([9.0, 3.0])
    kept, _ = module.reduce_problem(Problem([costs], [], [Usage(0, 0, 1, usage)], 5.0))
    dropped, _ = module.reduce_problem(Problem([costs], [], [Usage(0, 0, 1, usage[::-1].copy())], 5.0))
    assert len(kept.costs[0]) == 2 and len(dropped.costs[0]) == 1


def test_forbidden_through_the_graph_is_infeasible():
    never = np.array([[np.inf, 0.0], [0.0, np.inf]])
    same = np.array([[0.0, np.inf], [np.inf, 0.0]])
    with pytest.raises(Infeasible):
        module.reduce_problem(Problem([np.zeros(2)] * 2, [Edge(0, 1, never), Edge(1, 0, same)]))
