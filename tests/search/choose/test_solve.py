"""The one entry: methods by name, the trade-off curve, the random walk, the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import Infeasible, ProblemError
from shardwright.search.choose import Problem, Usage, evaluate, frontier, solve, write_problem

from .random_problems import random_problem


def test_unknown_method_lists_the_known():
    with pytest.raises(ProblemError, match="auto, limited, eliminate"):
        solve(Problem([np.zeros(1)]), method="magic")


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_never_beats_its_bound_nor_the_optimum(seed):
    problem = random_problem(seed, nodes=8, options=5)
    walked, best = solve(problem, method="markov", seed=seed), solve(problem)
    assert evaluate(problem, walked.answer).feasible
    assert walked.lower_bound <= best.cost <= walked.cost


@pytest.mark.parametrize("seed", range(10))
def test_frontier_is_the_optimum_at_every_limit(seed):
    problem = random_problem(seed, nodes=6)
    limits = [problem.usage_limit * factor for factor in (2.0, 1.0, 1.3, 0.8, 0.5)]
    for limit, solution in zip(limits, frontier(problem, limits), strict=True):
        alone = Problem(problem.costs, problem.edges, problem.usages, limit)
        if solution is None:
            with pytest.raises(Infeasible):
                solve(alone, method="brute")
        else:
            assert solution.cost == solve(alone, method="brute").cost
            assert evaluate(alone, solution.answer).feasible


def test_command_prints_indices_last(tmp_path):
    problem = random_problem(3)
    write_problem(problem, tmp_path / "problem.json.gz")
    result = CliRunner().invoke(app, ["choose", str(tmp_path / "problem.json.gz"), "--time-limit", "5"])
    assert result.exit_code == 0
    choice = json.loads(result.output.strip().splitlines()[-1])
    assert evaluate(problem, np.array(choice)).cost == solve(problem).cost
    result = CliRunner().invoke(app, ["choose", str(tmp_path / "problem.json.gz"), "--json"])
    content = json.loads(result.output)
    assert content["optimal"] and content["lower_bound"] == content["cost"] == solve(problem).cost


def test_command_names_the_time_of_an_infeasible_problem(tmp_path):
    usages = [Usage(0, 3, 4, np.array([5.0]))]
    write_problem(Problem([np.zeros(1)], [], usages, 2.0), tmp_path / "problem.json")
    result = CliRunner().invoke(app, ["choose", str(tmp_path / "problem.json")])
    assert isinstance(result.exception, Infeasible)
    assert "At time 3" in result.exception.message
