"""What every solver answers can be written down, whatever kinds of numbers the solver computed with."""

from __future__ import annotations

import json

import numpy as np

from shardwright.search.solution import Solution, gap_of
from shardwright.units import gap_text


def test_an_answer_holds_plain_numbers() -> None:
    cost, bound = np.float64(3.0), np.float64(3.0)
    solution = Solution(np.array([1]), cost, bound, bound >= cost, 0.5)  # type: ignore[arg-type] # as solvers compare
    text = json.dumps([solution.cost, solution.lower_bound, solution.optimal, solution.gap])
    assert json.loads(text) == [3.0, 3.0, True, 0.0]


def test_a_gap_is_relative_to_the_bound() -> None:
    """26.3 % was printed as "above the optimum" where 35.7 % is true."""
    solution = Solution(None, 1.357, 1.0, False, 0.0)
    assert solution.gap == gap_of(1.357, 1.0) and f"{solution.gap:.3f}" == "0.357"
    assert gap_of(-1.0, -2.0) == 0.5 and gap_of(1.0, 2.0) == 0.0 and gap_of(1.0, 0.0) == float("inf")
    assert "at most 35.7 % above the optimum of these" in gap_text(solution.gap, "these")
    assert "no bound" in gap_text(float("inf"), "these")
