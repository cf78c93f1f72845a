"""Work queues that hand pieces over: list-scheduling bounds, what latency costs, who wins when."""

from __future__ import annotations

import doctest
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ProblemError
from shardwright.simulator import work_queues
from shardwright.simulator.work_queues import (
    AMOUNTS,
    VICTIMS,
    Queues,
    Software,
    Speeds,
    noisy_speeds,
    proportional,
    run_job,
    run_step,
)


@given(
    st.lists(st.floats(0.2, 3.0), min_size=1, max_size=6),
    st.lists(st.integers(0, 12), min_size=6, max_size=6),
    st.sampled_from(VICTIMS),
    st.floats(0, 0.5),
)
@settings(max_examples=80, deadline=None)
def test_free_stealing_keeps_grahams_bound(base: list[float], pieces: list[int], victim: str, noise: float) -> None:
    """While a piece waits nobody idles, so the last begins before all together could have done everything."""
    shares = pieces[: len(base)]
    speeds = noisy_speeds(base, noise, 0.7, 100.0, seed=3)
    step = run_step(speeds, shares, Queues(victim=victim))
    assert sum(step.done) == sum(shares)
    possible = speeds.possible(0.0, sum(shares))
    longest = 1 / min(min(values) for values in speeds.values)
    assert possible * (1 - 1e-9) <= step.end <= possible + longest * (1 + 1e-9) if sum(shares) else step.end == 0.0


@given(st.integers(1, 8), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_equal_devices_keep_the_classical_ratio(devices: int, pieces: int) -> None:
    """Graham 1966: at most (2 - 1/m) times the optimum; here even the optimum, all pieces being equal."""
    speeds = Speeds(1.0, ((1.0,),) * devices)
    step = run_step(speeds, [pieces, *[0] * (devices - 1)], Queues())
    assert step.end == -(-pieces // devices)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("amount", AMOUNTS)
def test_every_piece_is_done_once(victim: str, amount: str) -> None:
    random = Random(1)
    for seed in range(20):
        shares = [random.randint(0, 9) for _ in range(5)]
        speeds = noisy_speeds([1.0, 0.5, 2.0, 1.0, 1.5], 0.4, 0.5, 50.0, seed)
        step = run_step(speeds, shares, Queues(0.3, 0.1, victim, amount), seed=seed)
        assert sum(step.done) == sum(shares)
        assert step.end >= speeds.possible(0.0, sum(shares)) * (1 - 1e-9)


def test_latency_costs_and_too_much_of_it_is_worse_than_none() -> None:
    """One device twice as slow: free stealing nears what is possible; with much latency it loses to standing still."""
    speeds = Speeds(1.0, ((1.0,), (1.0,), (1.0,), (0.5,)))
    shares = (16,) * 4
    still = run_step(speeds, shares).seconds
    times = [run_step(speeds, shares, Queues(latency)).seconds for latency in (0.0, 0.5, 2.0, 40.0)]
    assert times[0] <= speeds.possible(0.0, 64) + 2.0 < still
    assert times[0] < times[1] < times[2] < still < times[3]


def test_travel_adds_to_latency() -> None:
    speeds = Speeds(1.0, ((1.0,), (0.25,)))
    slow = run_step(speeds, (8, 8), Queues(0.1, 0.9)).seconds
    assert slow == run_step(speeds, (8, 8), Queues(1.0, 0.0)).seconds > run_step(speeds, (8, 8), Queues()).seconds


def test_software_learns_a_lasting_slowness() -> None:
    """After the first step shares follow the speeds; queues without latency are then no better than the last piece."""
    speeds = Speeds(1.0, ((1.0,), (1.0,), (1.0,), (0.5,)))
    equal = run_job(speeds, 56, 3)
    learned = run_job(speeds, 56, 3, Software())
    assert [step.seconds for step in equal] == [28.0] * 3
    assert [step.seconds for step in learned] == [28.0, 16.0, 16.0]
    assert run_job(speeds, 56, 3, queues=Queues())[1].seconds == 16.0


def test_queues_beat_software_under_passing_noise() -> None:
    """Noise that is over within a step cannot be learned from the step before."""
    speeds = noisy_speeds([1.0] * 8, 0.5, 2.0, 4000.0, seed=5)
    software = sum(step.seconds for step in run_job(speeds, 128, 30, Software()))
    queues = sum(step.seconds for step in run_job(speeds, 128, 30, queues=Queues(0.05)))
    assert queues < 0.95 * software


def test_shares_are_whole_and_shortest() -> None:
    assert proportional([1.0, 1.0, 0.0001], 3) == (2, 1, 0)
    assert sum(proportional([0.3, 0.7, 1.1], 100)) == 100


def test_bad_input_is_refused() -> None:
    with pytest.raises(ProblemError, match="negative seconds"):
        Queues(latency=-1.0)
    with pytest.raises(ProblemError, match="no rule 'poorest'"):
        Queues(victim="poorest")
    with pytest.raises(ProblemError, match="shares"):
        run_step(Speeds(1.0, ((1.0,),)), (1, 2))


def test_examples() -> None:
    assert doctest.testmod(work_queues).failed == 0
