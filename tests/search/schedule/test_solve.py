"""The scheduler against brute force, its bounds, and the published schedulers' results."""

from __future__ import annotations

import doctest
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.data import profiles, zero_bubble_rows
from tests.search.schedule.brute import best

from shardwright.errors import Infeasible, ProblemError
from shardwright.schedules import Edge, Pipeline, check_memory, pipeline, run, stage_devices
from shardwright.search.schedule import bounds, find_schedule, lower_bound, solve

TINY = [((0, 1), 3), ((0, 1, 2), 2), ((0, 1, 1, 0), 1), ((0,), 3)]


def _checked(problem: Pipeline, objective: str = "span", **options: float) -> tuple[float, float, bool]:
    """Solve, and see that the answer is what it says it is."""
    found = find_schedule(problem, objective, **options)
    timing = run(found.answer, problem)
    check_memory(timing)
    assert found.cost == (timing.span if objective == "span" else timing.makespan)
    assert found.lower_bound <= found.cost and found.seconds >= 0
    return found.cost, found.lower_bound, found.optimal


@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize("seed", range(8))
def test_as_good_as_brute_force(seed: int, objective: str) -> None:
    """Random whole seconds, hops and limits: the least cost of all orders is found, and no bound lies above it."""
    random = Random(seed)
    where, microbatches = TINY[seed % len(TINY)]
    times = [[random.randint(1, 9) for _ in where] for _ in range(3)]
    limit = 2.0 * len(where) / len(set(where)) + random.randint(0, 3)
    problem = pipeline(where, microbatches, *times, random.randint(0, 3), 2.0, -1.0, limits=limit)
    least = best(problem, objective)
    assert lower_bound(problem, objective) <= least
    cost, bound, _ = _checked(problem, objective, target=least)
    assert bound <= least == cost


def test_exact_program_on_a_tiny_pipeline() -> None:
    """Without limits on memory the bound of one device alone is not met here; CP-SAT closes the gap."""
    problem = pipeline((0, 1), 3, [3, 5], [4, 2], [1, 6], 2, 2.0, -1.0, limits=4.0)
    cost, bound, optimal = _checked(problem, "makespan", time_limit=6.0)
    assert optimal and cost == bound == best(problem, "makespan")


@given(
    st.integers(2, 5),
    st.integers(1, 9),
    st.lists(st.floats(0.5, 3.0), min_size=15, max_size=15),
    st.floats(0.0, 0.5),
    st.lists(st.floats(0.3, 1.0), min_size=9, max_size=9),
    st.floats(2.0, 6.0),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_bounds_hold_for_every_schedule(
    devices: int, microbatches: int, times: list, hop: float, sizes: list, limit: float, v: bool
) -> None:
    """Unequal stages, unequal micro-batches, fractional seconds: nothing that was found lies below a bound."""
    where = stage_devices(devices, devices * (2 if v else 1), "v" if v else "loop")
    scale = [1.0 + (stage % 3) / 4 for stage in range(len(where))]
    problem = pipeline(
        where,
        microbatches,
        *([t * s for s in scale] for t in times[:3]),
        hop,
        1.0,
        -0.4,
        limits=limit,
        sizes=sizes[:microbatches],
    )
    for objective in ("span", "makespan"):
        _checked(problem, objective, time_limit=0.05)


def test_published_memory_is_enough_to_prove_zb_h1_optimal() -> None:
    for row, problem in zero_bubble_rows():
        if row["scheduler"] == "zb1p":
            assert _checked(problem) == (float(row["longest_stage_span_us"]),) * 2 + (True,)


@pytest.mark.parametrize("number", range(18))
def test_at_most_what_the_published_schedulers_reach(number: int) -> None:
    row, problem = list(zero_bubble_rows())[number]
    listed = float(row["longest_stage_span_us"])
    cost, bound, _ = _checked(problem, target=listed)
    assert cost <= listed
    assert bound >= 0.94 * listed


@pytest.mark.parametrize("number", range(8))
def test_at_most_what_they_reach_on_uneven_stages(number: int) -> None:
    name, listed, problem = list(profiles())[number]
    if name.startswith("uneven"):  # where the published one collapses too: the busiest stage never waits
        assert _checked(problem) == (3_623_744.0, 3_623_744.0, True)
    else:
        assert _checked(problem, target=listed["longest_stage_span"])[0] <= listed["longest_stage_span"]
    assert _checked(problem, "makespan", target=listed["makespan"])[0] <= listed["makespan"]


def test_branches_and_skips() -> None:
    """Two towers into one head, a skip over it: within the bound's reach, and better than one micro-batch at a time."""
    edges = [Edge(0, 2, 0.1), Edge(1, 2, 0.1), Edge(2, 3, 0.1), Edge(0, 3, 0.1)]
    problem = pipeline(range(4), 8, edges=edges, limits=4.0)
    cost, bound, _ = _checked(problem, time_limit=1.0)
    assert cost <= 1.2 * bound


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_stages_without_parameters_and_passes_that_hold_nothing(objective: str) -> None:
    """A frozen stage has no weights' gradient, one that recomputes everything holds nothing: bounds and search go on."""
    frozen = pipeline(range(3), 5, 1.0, 1.0, [1.0, 0.0, 1.0], 0.1, 1.0, [0.0, -1.0, 0.0], limits=2.0)
    free = pipeline(range(3), 5, 1.0, 1.0, 1.0, 0.1, [0.0, 1.0, 1.0], 0.0, limits=[0.0, 2.0, 2.0])
    for problem in (frozen, free):
        cost, bound, _ = _checked(problem, objective, time_limit=0.5)
        assert cost <= 1.6 * bound


def test_merged_passes_run_too() -> None:
    problem = pipeline(range(3), 6, limits=3.0)
    merged = find_schedule(problem, time_limit=0.3).answer.merged()
    assert any(action.kind == "B" for action in merged.actions())
    check_memory(run(merged, problem))


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(Infeasible, match="device 0 may hold 1, but one micro-batch alone takes 2 there"):
        find_schedule(pipeline((0, 1, 1, 0), 4, limits=1.0))
    with pytest.raises(ProblemError, match="no objective 'time'"):
        find_schedule(pipeline((0, 1), 4), "time")


def test_just_enough_memory_is_enough() -> None:
    cost, bound, _ = _checked(pipeline((0, 1, 1, 0), 3, limits=2.0), time_limit=1.0)
    assert cost <= 1.5 * bound


def test_examples() -> None:
    assert doctest.testmod(solve).failed == doctest.testmod(bounds).failed == 0
