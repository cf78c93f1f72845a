"""The contest's two smaller problems, as they were published: the best answers known, and bounds that hold."""

from __future__ import annotations

import numpy as np

from shardwright.search.choose import evaluate, read_problem, solve

BEST = {"B": 532_843, "G": 217_039}
XLA = {"B": 990_205, "G": 1_264_777}


def test_the_best_answer_of_the_contest_is_found_and_proved(published):
    problem = read_problem(published / "choose" / "asplos-2025-iopddl-G.json.xz")
    solution = solve(problem, time_limit=120.0)
    assert (solution.cost, solution.optimal) == (BEST["G"], True)


def test_bounds_hold_and_answers_fit(published):
    problem = read_problem(published / "choose" / "asplos-2025-iopddl-B.json.xz")
    solution = solve(problem, time_limit=3.0)
    found = evaluate(problem, np.asarray(solution.answer))
    assert found.feasible and found.cost == solution.cost
    assert solution.lower_bound <= BEST["B"] <= solution.cost < XLA["B"]
