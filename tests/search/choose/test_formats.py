"""Reading and writing problems, and what malformed files say."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from shardwright.errors import ProblemError, ShardwrightError
from shardwright.search.choose import evaluate, read_problem, solve, write_problem
from shardwright.search.choose.problem import Problem, Usage

from .random_problems import random_problem


def test_example_of_the_contest(published):
    problem = read_problem(published / "choose" / "example.json")
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


def test_equal_matrices_are_shared(published):
    problem = read_problem(published / "pase" / "pase-transformer-p8.json.xz")
    assert len({id(edge.costs) for edge in problem.edges}) < len(problem.edges) / 4


GOOD = {
    "nodes": {"intervals": [[0, 1], [0, 1]], "costs": [[1, 2], [3]], "usages": [[1, 1], [1]]},
    "edges": {"nodes": [[0, 1]], "costs": [[5, 6]]},
    "usage_limit": 3,
}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("nodes", {"costs": [[1]]}, "nodes.intervals is missing"),
        ("edges", {"nodes": [[0, 7]], "costs": [[5, 6]]}, "edge 0 joins nodes 0 and 7 of 2"),
        ("edges", {"nodes": [[0, 1]], "costs": [[5, 6, 7]]}, "edge 0 has 3 costs, expected 2 x 1"),
        ("nodes", {**GOOD["nodes"], "costs": [[1, "x"], [3]]}, "expected a list of numbers, found [1, 'x']"),
        ("nodes", {**GOOD["nodes"], "costs": [[], [3]]}, ""),
        ("nodes", {**GOOD["nodes"], "usages": [[1, 1]]}, "differ in number"),
        ("nodes", {**GOOD["nodes"], "usages": [[1, -1], [1]]}, "cannot be negative"),
        ("nodes", {**GOOD["nodes"], "intervals": [[0, 10**30], [0, 1]]}, "interval"),
        ("nodes", {**GOOD["nodes"], "intervals": [[0, 1.5], [0, 1]]}, "interval"),
        ("edges", {"nodes": [[0, True]], "costs": [[5, 6]]}, "edges.nodes[0][1] is True"),
        ("usage_limit", float("nan"), "usage_limit is nan"),
        ("usage_limit", -1, "usage limit of -1 is negative"),
        ("usage_limit", "3", "usage_limit is '3'"),
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


def test_nesting_without_end_is_one_sentence(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text('{"problem": ' + "[" * 10_000 + "]" * 10_000 + "}")
    with pytest.raises(ProblemError, match="nested too deeply"):
        read_problem(path)


@pytest.mark.parametrize("huge", [10**18, 10**19, 10**400, 1e300, 1e999], ids=["18", "19", "400", "float", "inf"])
def test_a_huge_usage_is_a_number_and_only_forbids_what_exceeds_the_limit(tmp_path, huge):
    """A usage of 1e18 and more once turned every sum into no number, and no choice was found where there was one."""
    path = tmp_path / "problem.json"
    nodes = {"intervals": [[0, 4], [2, 6]], "costs": [[1, 5], [3]], "usages": [[huge, 2], [1]]}
    path.write_text(json.dumps({"problem": GOOD | {"nodes": nodes, "edges": {"nodes": [[0, 1]], "costs": [[0, 0]]}}}))
    for method in ("auto", "limited", "integer", "brute", "eliminate"):
        assert solve(read_problem(path), method=method, time_limit=5, overtime=0).answer.tolist() == [1, 0], method
    nodes["usages"] = [[2e18, 2], [1]]  # and where the limit is as wide, it is allowed
    path.write_text(json.dumps({"problem": GOOD | {"nodes": nodes, "usage_limit": 3e18}}))
    assert solve(read_problem(path)).answer.tolist() == [0, 0]


def test_huge_amounts_survive_their_file(tmp_path):
    amounts = np.array([3e18, 7.0, np.inf])
    write_problem(Problem([np.zeros(3)], [], [Usage(0, 0, 1, amounts)], 5e18), tmp_path / "problem.json")
    again = read_problem(tmp_path / "problem.json")
    assert again.usage_limit == 5e18
    assert again.usages[0].amounts.tolist() == [3e18, 7.0, 1e308]


def test_a_time_limit_is_kept_where_no_choice_is_found(tmp_path):
    """Subset sum without an answer: no reduction helps, and nothing within the limit is ever found."""
    sizes = 2.0 * np.random.default_rng(0).integers(2**30, 2**31, 60)
    sizes[0] += 2.0 * (sizes.sum() % 4 == 0)  # half the sum is odd now, and no choice of even sizes meets it
    usages = [Usage(node, 0, 1, np.array([0.0, size])) for node, size in enumerate(sizes)]
    usages += [Usage(node, 1, 2, np.array([size, 0.0])) for node, size in enumerate(sizes)]
    problem = Problem([np.zeros(2)] * 60, [], usages, float(sizes.sum() / 2))
    began = time.process_time()  # a busy machine makes the clock what it likes
    with pytest.raises(ShardwrightError):
        solve(problem, method="limited", time_limit=1.0, overtime=0.0)
    assert time.process_time() - began < 12  # it was 32 before
