"""The published schedulers' figures, to the microsecond, from their orders."""

from __future__ import annotations

import pytest
from tests.schedules.data import profiles, published_orders, zero_bubble_rows

from shardwright.schedules import check_memory, known_schedule, run


def test_listed_spans_makespans_and_peaks() -> None:
    orders = published_orders()
    for number, (row, problem) in enumerate(zero_bubble_rows()):
        timing = run(orders[f"row {number}"], problem)
        check_memory(timing)
        assert timing.span == int(row["longest_stage_span_us"])
        assert timing.makespan == int(row["makespan_us"])
        assert timing.bubble == pytest.approx(float(row["bubble_fraction"]), abs=6e-7)
        peak = max(timing.peak_memory) / int(row["mem_f"])
        assert peak == pytest.approx(float(row["peak_memory_in_mem_f"]), abs=6e-5)
    assert number == 17


def test_listed_profiles() -> None:
    orders = published_orders()
    cases = list(profiles())
    assert len(cases) == 8
    for name, listed, problem in cases:
        timing = run(orders[name], problem)
        assert (timing.span, timing.makespan) == (listed["longest_stage_span"], listed["makespan"])
        assert list(timing.peak_memory) == listed["peak_memory"]


def test_zb_h1_is_what_the_published_scheduler_finds_with_its_memory() -> None:
    for row, problem in zero_bubble_rows():
        if row["scheduler"] == "zb1p":
            timing = run(known_schedule("zb-h1", problem.stages, problem.microbatches), problem)
            assert timing.span == int(row["longest_stage_span_us"])
