"""What every solver answers can be written down, whatever kinds of numbers the solver computed with."""

from __future__ import annotations

import json

import numpy as np

from shardwright.search.solution import Solution


def test_an_answer_holds_plain_numbers() -> None:
    cost, bound = np.float64(3.0), np.float64(3.0)
    solution = Solution(np.array([1]), cost, bound, bound >= cost, 0.5)  # type: ignore[arg-type] # as solvers compare
    text = json.dumps([solution.cost, solution.lower_bound, solution.optimal, solution.gap])
    assert json.loads(text) == [3.0, 3.0, True, 0.0]
