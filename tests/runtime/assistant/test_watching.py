"""When the assistant asks for a move, and what it reaches: simulated ranks, without processes."""

from __future__ import annotations

from random import Random

import pytest

from shardwright.runtime.assistant.drop_ranks import Absence
from shardwright.runtime.assistant.watching import Rule, SpeedWatch, Verdict

COST = 1.0
"""Seconds of a move; a row takes 10 ms."""


class Ranks:
    """Ranks whose rows take 10 ms each, and a fixed part; ``slow`` maps ranks to factors, with noise and lone spikes."""

    def __init__(self, rows: list[int], fixed: float = 0.0, noise: float = 0.02, spikes: float = 0.0) -> None:
        self.watch, self.fixed, self.noise, self.spikes = SpeedWatch(tuple(rows)), fixed, noise, spikes
        self.random, self.step, self.slow = Random(1), 0, dict[int, float]()
        self.seen = 0.7
        """Of the fixed part, what the clocks see by themselves."""
        self.moves: list[tuple[int, Verdict]] = []

    def seconds(self, rank: int, rows: float) -> float:
        return 0.01 * (rows + self.fixed) * self.slow.get(rank, 1.0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            work = [self.seconds(r, n) * self._factor() for r, n in enumerate(self.watch.rows)]
            self.step += 1
            parts = [own * self.fixed / (n + self.fixed) for own, n in zip(work, self.watch.rows, strict=True)]
            update = [self.seen * part for part in parts] if self.seen else ()
            self.watch.add(self.step, work, [max(work) - own + 0.001 for own in work], update)
            if self.step % 2:
                continue
            self.watch.learn()
            found = self.watch.verdict(COST)
            if found is not None:
                self.moves.append((self.step, found))
                self.watch.moved(found.rows)
                self.watch.slowness = found.slowness

    def _factor(self) -> float:
        spike = 3.0 if self.random.random() < self.spikes else 1.0
        return max(0.2, 1 + self.noise * self.random.gauss(0, 1)) * spike

    @property
    def reached(self) -> float:
        """The step with the rows as they are, without noise."""
        return max(self.seconds(r, n) for r, n in enumerate(self.watch.rows))

    @property
    def possible(self) -> float:
        """Work over summed speeds."""
        rates = [1 / self.seconds(r, 1 - self.fixed) for r in range(len(self.watch.rows))]
        return (sum(self.watch.rows) + len(rates) * self.fixed) / sum(rates)


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize(("noise", "spikes"), [(0.03, 0.0), (0.1, 0.0), (0.2, 0.0), (0.05, 0.05)])
def test_no_move_in_a_thousand_noisy_steps_of_healthy_ranks(ranks: int, noise: float, spikes: float) -> None:
    job = Ranks([8] * ranks, noise=noise, spikes=spikes)
    job.run(1000)
    assert job.moves == []


@pytest.mark.parametrize("fixed", [0.0, 3.0])
@pytest.mark.parametrize("slower", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_is_relieved_within_ten_steps_and_gets_its_rows_back(
    ranks: int, slower: float, fixed: float
) -> None:
    """At least 85 % of what is possible is regained. With eight ranks whole rows are all that keeps it from the limit."""
    job = Ranks([16] * ranks, fixed)
    job.run(20)
    before = job.reached
    job.slow[ranks - 1] = slower
    disturbed, changed = job.reached, job.step
    job.run(10)
    assert job.moves and (disturbed - job.reached) >= 0.85 * (disturbed - job.possible)
    step, first = job.moves[0]
    assert first.rank == ranks - 1 and changed < first.since <= changed + 2 and step <= changed + 8
    assert first.slowness[-1] == pytest.approx(slower, rel=0.1)
    assert first.possible < first.expected < first.seconds
    job.run(30)
    job.slow.clear()
    job.run(30)
    assert job.reached <= 1.1 * before


def test_a_rank_that_only_waits_is_not_slow() -> None:
    job = Ranks([8, 8])
    job.slow[0] = 3.0
    job.run(10)
    assert job.watch.rows[0] < 8 and job.moves[0][1].rank == 0


def test_a_move_must_pay_for_itself() -> None:
    """Two thirds of a second are saved per step: worth 100 seconds within 200 steps, not within 100."""
    for steps, moves in ((100, False), (200, True)):
        watch = SpeedWatch((50, 50), Rule(steps=steps))
        for number in range(8):
            watch.add(number, [1.0, 2.0], [1.0, 0.0])
        assert (watch.verdict(100.0) is not None) == moves


def test_steps_that_a_rank_does_not_know_are_passed_over() -> None:
    watch = SpeedWatch((8, 8))
    for number in range(6):
        watch.add(number, [1.0, float("nan")], [0.0, 0.0])
    assert watch.verdict(0.0) is None and watch.step_seconds is None


@pytest.mark.parametrize(("ranks", "slower"), [(4, 30.0), (16, 30.0), (256, 30.0), (64, 8.0)])
def test_a_rank_that_is_much_too_slow_is_left_out(ranks: int, slower: float) -> None:
    """And the step is within a row of what the others alone make possible."""
    job = Ranks([2] * ranks, fixed=0.3)
    job.watch.droppable = True
    job.run(16)
    job.slow[1] = slower
    job.run(10)
    (_, found), *_ = job.moves
    assert found.rank == 1 and found.rows[1] == 0 and found.rows.count(0) == 1 and sum(found.rows) == 2 * ranks
    assert found.expected <= found.possible + 0.011 and found.expected < 0.3 * found.seconds


def test_a_rank_is_taken_back_when_it_is_worth_its_share() -> None:
    watch = SpeedWatch((2,) * 8, droppable=True)
    for number in range(8):
        watch.add(number, [1.0, 30.0, *[1.0] * 6], [29.0, 0.0, *[29.0] * 6])
    found = watch.verdict(1.0)
    assert found is not None and found.rows[1] == 0
    absence = Absence(found, tuple((rank,) for rank in range(8)), lambda rows: rows, 16, 1.0)
    assert absence.left_out == {1: 1}
    assert absence.rows_with({1: 30.0}, Rule(), 1.0) is None and absence.rows_with({1: 1.0}, Rule(), 1e6) is None
    back = absence.rows_with({1: 1.0}, Rule(), 1.0)
    assert back is not None and back.rows == (2,) * 8 and back.rank == 1 and back.expected < found.expected


def test_a_stage_that_nobody_waits_for_keeps_its_rows() -> None:
    """Its own ranks would be faster; the step would not."""
    for others, moves in ((0.0, True), (2.5, False)):
        watch = SpeedWatch((8, 8))
        for number in range(8):
            watch.add(number, [1.0, 2.0], [1.0, 0.0], others=others)
        assert (watch.verdict(0.0) is not None) == moves


def test_the_fixed_part_is_learnt_from_a_move() -> None:
    job = Ranks([16, 16], fixed=6.0, noise=0.0)
    job.seen = 0.0
    job.slow[1] = 2.0
    job.run(12)
    assert job.watch.fixed == pytest.approx(6.0)
