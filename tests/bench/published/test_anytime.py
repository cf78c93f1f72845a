"""A search that is ended says the best it had reported; one that ends by itself, or fails, says so."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from bench.published.anytime import Report, nobody, within

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.solution import Solution


def killed(problem: str, report: Report) -> Solution[Any]:
    """Finds something, then something better, and is ended before it says more."""
    report(Solution("first", 3.0, 1.0, False, 0.0))
    report(Solution(problem, 2.0, 1.0, False, 0.0))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def silent(problem: str, report: Report) -> Solution[Any]:
    while True:
        time.sleep(3600)


def quick(problem: str, report: Report) -> Solution[Any]:
    report(Solution("first", 3.0, 1.0, False, 0.0))
    return Solution(problem, 1.0, 1.0, True, 0.0)


def failing(problem: str, report: Report) -> Solution[Any]:
    raise Infeasible("nothing fits.", "Try something else.")


def wrong(problem: str, report: Report) -> Solution[Any]:
    raise ZeroDivisionError(problem)


def test_what_was_reported_last_is_the_answer() -> None:
    found = within(600.0, killed, "second")
    assert (found.answer, found.cost, found.lower_bound, found.optimal) == ("second", 2.0, 1.0, False)


def test_who_ends_is_not_waited_for_and_a_failure_is_told() -> None:
    assert within(600.0, quick, "best").optimal and within(None, quick, "best").optimal
    with pytest.raises(Infeasible) as caught:
        within(600.0, failing, "x")
    assert caught.value.remedy == "Try something else."
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        within(600.0, wrong, "x")


def test_nothing_found_is_one_sentence() -> None:
    with pytest.raises(TooLarge, match=r"nothing was found in 0\.1 s"):
        within(0.1, silent, "x")
    nobody(Solution(0, 1.0, 1.0, True, 0.0))
