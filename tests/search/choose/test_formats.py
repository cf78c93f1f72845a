"""Reading and writing problems, and what malformed files say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardwright.errors import ProblemError
from shardwright.search.choose import evaluate, read_problem, solve, write_problem

from .random_problems import random_problem


def test_example_of_the_contest(shared_data):
    problem = read_problem(shared_data / "choose" / "example.json")
    solution = solve(problem)
    assert solution.cost == solve(problem, method="brute").cost == solve(problem, method="integer").cost
    assert solution.optimal


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.parametrize("seed", range(5))
def test_written_problems_read_back(tmp_path, seed, suffix):
    problem = random_problem(seed)
    write_problem(problem, tmp_path / f"problem.{suffix}")
    again = read_problem(tmp_path / f"problem.{suffix}")
    generator = np.random.default_rng(seed)
    for _ in range(20):
        choice = np.array([generator.integers(len(cost)) for cost in problem.costs])
        assert evaluate(problem, choice) == evaluate(again, choice)


def test_equal_matrices_are_shared(shared_data):
    problem = read_problem(shared_data / "pase" / "pase-transformer-p8.json.gz")
    assert len({id(edge.costs) for edge in problem.edges}) < len(problem.edges) / 4


GOOD = {
    "nodes": {"intervals": [[0, 1], [0, 1]], "costs": [[1, 2], [3]], "usages": [[1, 1], [1]]},
    "edges": {"nodes": [[0, 1]], "costs": [[5, 6]]},
    "usage_limit": 3,
}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("nodes", {"costs": [[1]]}, "'intervals' is missing"),
        ("edges", {"nodes": [[0, 7]], "costs": [[5, 6]]}, "edge 0 joins nodes 0 and 7 of 2"),
        ("edges", {"nodes": [[0, 1]], "costs": [[5, 6, 7]]}, "edge 0 has 3 costs, expected 2 x 1"),
        ("nodes", {**GOOD["nodes"], "costs": [[1, "x"], [3]]}, "could not convert"),
        ("nodes", {**GOOD["nodes"], "costs": [[], [3]]}, ""),
        ("nodes", {**GOOD["nodes"], "usages": [[1, 1]]}, "differ in number"),
    ],
)
def test_malformed_problems_are_one_sentence(tmp_path, part, value, message):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps({"problem": GOOD | {part: value}}))
    with pytest.raises(ProblemError) as caught:
        read_problem(path)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_not_json(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text("{")
    with pytest.raises(ProblemError, match="is not JSON"):
        read_problem(path)
    path.write_bytes(b"\x1f\x8b broken")
    with pytest.raises(ProblemError):
        read_problem(path)
