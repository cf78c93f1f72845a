"""Schedules as data: text, completeness, and orders in which devices would wait for ever."""

from __future__ import annotations

import pytest

from shardwright.errors import Infeasible, ProblemError
from shardwright.schedules import Action, Edge, Schedule, check_memory, known_schedule, pipeline, run


def test_text_round_trip() -> None:
    for name in ("1f1b", "zb-h2", "dualpipe-v"):
        schedule = known_schedule(name, 4, 7)
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0F0 0B0 0B0", "0B0 stands twice"),
        ("0F0 0I0", "stage 0 does not do the backward pass of micro-batch 0 exactly once"),
        ("0F0 0I0 0W0 0B0", "stage 0 does not do the backward pass of micro-batch 0 exactly once"),
        ("0F0 0B0 0F2 0B2", "0F1 is missing"),
        ("0F0 0W0 0I0", "0W0 stands before 0I0"),
        ("0F0 | 0B0", "stage 0 is on device 0, yet 0B0 stands on device 1"),
        ("0F0 0B0 | 2F0 2B0", "stage 1 of 3 has no action"),
        ("0F0 0X0", "'0X0' is not an action"),
        ("", "without any action"),
    ],
)
def test_incomplete_schedules_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ProblemError, match=complaint):
        Schedule.parse(text)


def test_forward_only_is_a_schedule() -> None:
    inference = Schedule.parse("0F0 0F1 | 1F0 1F1")
    assert not inference.trains
    assert run(inference, pipeline((0, 1), 2, forward=[1.0, 2.0])).makespan == 5.0


def test_devices_that_wait_for_each_other_are_named() -> None:
    crossed = Schedule.parse("0F0 0B1 0F1 0B0 | 1F0 1F1 1B0 1B1")
    with pytest.raises(
        ProblemError, match="device 0 stands before 0B1, which needs 1I1, device 1 stands before 1F1, which needs 0F1"
    ):
        run(crossed, pipeline((0, 1), 2))


def test_a_backward_before_its_own_forward_is_stuck() -> None:
    with pytest.raises(ProblemError, match="0B0, which needs 0F0"):
        run(Schedule.parse("0B0 0F0"), pipeline((0,), 1))


def test_skips_and_branches() -> None:
    """Two towers (stages 0 and 1) into stage 2, and a skip from 0 to 3."""
    edges = [Edge(0, 2, 0.5), Edge(1, 2, 0.5), Edge(2, 3, 0.5), Edge(0, 3, 2.0)]
    wired = pipeline(range(4), 1, edges=edges)
    timing = run(Schedule.parse("0F0 0B0 | 1F0 1B0 | 2F0 2B0 | 3F0 3B0"), wired)
    starts = {
        str(a): float(t)
        for order, ts in zip(timing.schedule.orders, timing.starts, strict=True)
        for a, t in zip(order, ts, strict=True)
    }
    assert starts["1F0"] == 0.0 and starts["2F0"] == 1.5
    assert starts["3F0"] == 3.0  # stage 2 ends at 2.5 and hops 0.5; the skip arrives at 3 too
    assert starts["2B0"] == 6.5 and starts["1B0"] == 9.0
    assert starts["0B0"] == 9.0  # the gradient over the skip came at 8


def test_memory_over_the_limit_is_refused() -> None:
    timing = run(known_schedule("gpipe", 2, 5), pipeline((0, 1), 5, limits=4.0))
    assert timing.peak_memory == (5.0, 5.0)
    with pytest.raises(Infeasible, match="device 0 holds 5 of at most 4"):
        check_memory(timing)
    check_memory(run(known_schedule("1f1b", 2, 5), pipeline((0, 1), 5, limits=2.0)))


def test_unequal_microbatches() -> None:
    """A last micro-batch of half the size takes half the time and half the memory."""
    halves = pipeline((0,), 3, forward=2.0, inputs=2.0, weights=2.0, sizes=[1, 1, 0.5])
    timing = run(known_schedule("gpipe", 1, 3), halves)
    assert timing.makespan == 15.0 and timing.peak_memory == (2.5,)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"forward": [1.0, 2.0, 3.0]}, "forward has the shape"),
        ({"forward": -1.0}, "forward takes -1 seconds"),
        ({"sizes": [1.0]}, "1 sizes for 2 micro-batches"),
        ({"limits": [1.0, 2.0, 3.0]}, "limits has 3 figures"),
        ({"hop": [1.0, 2.0]}, "hop has 2 figures"),
        ({"forward_memory": -1.0}, "forward pass frees memory"),
        ({"edges": [Edge(1, 0)]}, "cannot be"),
    ],
)
def test_malformed_pipelines_are_refused(arguments: dict, complaint: str) -> None:
    with pytest.raises(ProblemError, match=complaint):
        pipeline((0, 1), 2, **arguments)


def test_a_schedule_of_another_pipeline_is_refused() -> None:
    with pytest.raises(ProblemError, match="does not belong"):
        run(known_schedule("1f1b", 2, 3), pipeline((0, 1), 4))


def test_actions() -> None:
    assert Action.parse(" 12W34 ") == Action(12, "W", 34)
