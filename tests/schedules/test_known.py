"""The known schedules: complete and free of deadlock for any numbers, with the bubbles and memory of their papers."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.data import DATA

from shardwright.errors import ProblemError
from shardwright.schedules import RECIPES, Timing, known_schedule, pipeline, run


@given(st.sampled_from(sorted(RECIPES)), st.integers(1, 7), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_any_number_of_stages_and_microbatches(name: str, devices: int, depth: int, microbatches: int) -> None:
    """Also fewer micro-batches than stages; a schedule that was built is complete, one that was timed has no deadlock."""
    per_device = RECIPES[name].stages_per_device or depth
    schedule = known_schedule(name, devices * per_device, microbatches, devices)
    timing = run(schedule, pipeline(schedule.device_of, microbatches, hop=0.1))
    assert timing.span <= timing.makespan
    assert (schedule.stages, schedule.devices, schedule.microbatches) == (devices * per_device, devices, microbatches)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_interleaving_needs_no_multiples(devices: int, microbatches: int, more: int) -> None:
    for name in ("interleaved-1f1b", "breadth-first"):
        schedule = known_schedule(name, devices + more, microbatches, devices)
        run(schedule, pipeline(schedule.device_of, microbatches))


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 3), st.floats(0.1, 3))
@settings(max_examples=60, deadline=None)
def test_equal_stages_follow_the_closed_form(stages: int, microbatches: int, forward: float, backward: float) -> None:
    for name in ("gpipe", "1f1b"):
        timing = run(
            known_schedule(name, stages, microbatches), pipeline(range(stages), microbatches, forward, backward, 0.0)
        )
        assert timing.makespan == pytest.approx((microbatches + stages - 1) * (forward + backward))


def test_one_f_one_b_holds_no_more_than_the_stages_that_follow() -> None:
    for stages, microbatches in ((2, 1), (4, 3), (4, 9), (6, 6)):
        schedule = known_schedule("1f1b", stages, microbatches)
        assert [schedule.in_flight(d) for d in range(stages)] == [min(stages - d, microbatches) for d in range(stages)]
        assert known_schedule("gpipe", stages, microbatches).in_flight(0) == microbatches


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 8, 12])
def test_bubbles_and_memory_with_equal_times(devices: int) -> None:
    """F = I = W: 1F1B idles (p-1)(F+I+W), ZB-H1 a third of it, ZB-H2 and ZB-V nothing; their memory is as published."""
    microbatches = 4 * devices

    def timed(name: str) -> Timing:
        stages = devices * (RECIPES[name].stages_per_device or 1)
        schedule = known_schedule(name, stages, microbatches, devices)
        return run(schedule, pipeline(schedule.device_of, microbatches))

    idle = {name: timed(name).span - max(timed(name).pipeline.work) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")}
    assert idle == {"1f1b": 3 * (devices - 1), "zb-h1": devices - 1, "zb-h2": 0.0, "zb-v": 0.0}
    assert max(timed("zb-h1").peak_memory) == devices
    assert max(timed("zb-h2").peak_memory) == 2 * devices - 1
    assert max(timed("zb-v").peak_memory) == 2 * devices  # two stages per device: as much as 1F1B
    half, least = max(timed("v-half").peak_memory), max(timed("v-min").peak_memory)
    assert half <= devices + 3 and least <= 2 * devices / 3 + 3
    assert max(timed("dualpipe-v").peak_memory) == 2 * devices + 1


def test_published_bubble_rates() -> None:
    """Zero-bubble pipeline parallelism (ICLR 2024): its table's 1F1B, ZB-H1 and ZB-H2 columns, to four digits."""
    with open(DATA / "bubble_rates.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    for row in rows:
        stages, microbatches = int(row["stages"]), int(row["microbatches"])
        times = [float(row[f"{key}_ms"]) for key in ("forward", "backward_input", "backward_weight", "hop")]
        priced = pipeline(range(stages), microbatches, *times)
        for name, column in (("1f1b", "one_f_one_b"), ("zb-h1", "zb_h1"), ("zb-h2", "zb_h2")):
            bubble = run(known_schedule(name, stages, microbatches), priced).bubble
            assert bubble == pytest.approx(float(row[column]), abs=0.6e-4), (name, row)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ProblemError, match="no schedule 'zbx'"):
        known_schedule("zbx", 2, 2)
    with pytest.raises(ProblemError, match="zb-v does not fit 3 stages on 1 devices"):
        known_schedule("zb-v", 3, 2)
    with pytest.raises(ProblemError, match="0 micro-batches"):
        known_schedule("1f1b", 3, 0)
