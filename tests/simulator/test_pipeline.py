"""Pipeline schedules against closed forms and published bubble rates."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ProblemError
from shardwright.simulator.pipeline import gpipe, one_f_one_b, simulate_pipeline


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 3), st.floats(0.1, 3))
@settings(max_examples=60, deadline=None)
def test_equal_stages_follow_the_closed_form(stages: int, microbatches: int, forward: float, backward: float) -> None:
    for order in (gpipe, one_f_one_b):
        run = simulate_pipeline(order(stages, microbatches), [forward] * stages, [backward] * stages)
        assert run.seconds == pytest.approx((microbatches + stages - 1) * (forward + backward))


@given(st.integers(2, 6), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_one_f_one_b_holds_no_more_than_the_stages_that_follow(stages: int, microbatches: int) -> None:
    run = simulate_pipeline(one_f_one_b(stages, microbatches), [1.0] * stages, [2.0] * stages)
    for stage in range(stages):
        assert run.in_flight(stage) == min(stages - stage, microbatches)
    whole = simulate_pipeline(gpipe(stages, microbatches), [1.0] * stages, [2.0] * stages)
    assert whole.in_flight(0) == microbatches


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ProblemError, match="wait for each other"):
        simulate_pipeline([[("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]], [1, 1], [1, 1])


def test_published_bubble_rates(shared_data: Path) -> None:
    """Zero-bubble pipeline parallelism (ICLR 2024), its table of 1F1B rates, to four digits."""
    with open(shared_data / "schedules" / "bubble_rates.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        stages, microbatches = int(row["stages"]), int(row["microbatches"])
        forward = float(row["forward_ms"])
        backward = float(row["backward_input_ms"]) + float(row["backward_weight_ms"])
        run = simulate_pipeline(
            one_f_one_b(stages, microbatches), [forward] * stages, [backward] * stages, float(row["hop_ms"])
        )
        assert run.bubble == pytest.approx(float(row["one_f_one_b"]), abs=0.6e-4), row
