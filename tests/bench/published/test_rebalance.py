"""Work shared anew: optimal shares, bounds that hold, and the replays of two production jobs."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from bench.published.rebalance import Balance, Job, as_run, possible, rebalance, step_seconds
from bench.published.rebalance.sequences import (
    Sequences,
    as_measured,
    deal_longest_first,
    deal_out,
    possible_seconds,
    seconds_of,
)
from bench.published.rebalance.traces import read_job

from shardwright.errors import ProblemError

DATA = Path(__file__).parents[2] / "data" / "stragglers"
AR, ST = (read_job(DATA / f"{name}.json") for name in ("AR", "ST"))


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_the_replay_gives_the_measured_pipeline(name: str) -> None:
    """Every step within 0.4 % (AR) and 0.52 % (ST) from its own mean times; the medians as the reference says."""
    measured, job = json.loads((DATA / f"{name}.json").read_text()), read_job(DATA / f"{name}.json")
    assert step_seconds(job, as_run(job)) == pytest.approx(measured["reference"]["equal_shares"], abs=1e-4)
    tables = (measured["forward_seconds_mean_per_step"], measured["backward_seconds_mean_per_step"])
    for forward, backward, span in zip(*tables, measured["pipeline_span_seconds"], strict=True):
        step = Job(forward, backward, job.microbatches, job.hop)
        assert step_seconds(step, as_run(step)) == pytest.approx(span, rel=0.0040 if name == "AR" else 0.0052)


def test_a_slow_worker_by_shares_alone() -> None:
    """As run 45.9 s; asked for at most 25.6; the bound for whole micro-batches is met."""
    found = rebalance(AR)
    assert found.cost <= 25.6 and found.optimal
    assert found.answer.shares == (17, 37, 37, 37)
    assert found.seconds < 5  # of processor time


@pytest.mark.parametrize("blocks", [None, 8])
def test_a_slow_worker_with_layers_moved(blocks: int | None) -> None:
    """Asked for at most 24.5; also where blocks stay whole."""
    found = rebalance(AR, "own", blocks)
    assert 22.8 < found.cost <= 24.5 and found.lower_bound <= found.cost
    assert sum(found.answer.shares) == 128
    assert found.answer.cuts[0][0] < 0.6  # the slow worker gives layers away
    assert found.seconds < 5  # of processor time


def test_a_long_last_stage() -> None:
    """As run 2.16 s; asked for at most 1.90, with one set of cuts for all replicas."""
    found = rebalance(ST, "common")
    assert found.cost <= 1.90
    assert rebalance(ST).cost == pytest.approx(2.1611, abs=1e-4)  # shares alone cannot help
    assert rebalance(ST, "own").cost <= found.cost
    assert found.seconds < 5  # of processor time


def _random_job(random: Random, replicas: int, stages: int, microbatches: int) -> Job:
    def table() -> np.ndarray:
        return np.array([[random.uniform(0.5, 2.0) for _ in range(stages)] for _ in range(replicas)])

    return Job(table(), table(), microbatches, random.choice([0.0, 0.1]), random.choice([0.0, 1.0]))


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_as_good_as_brute_force(seed: int) -> None:
    random = Random(seed)
    replicas, microbatches = random.randint(1, 3), random.randint(3, 12)
    problem = _random_job(random, replicas, random.randint(1, 3), microbatches)
    whole = as_run(problem).cuts
    every = (s for s in product(range(microbatches + 1), repeat=replicas) if sum(s) == microbatches)
    least = min(step_seconds(problem, Balance(shares, whole)) for shares in every)
    found = rebalance(problem)
    assert found.cost == pytest.approx(least, rel=1e-12)
    assert found.lower_bound <= least * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_for_any_cuts_and_shares(seed: int) -> None:
    random = Random(seed)
    problem = _random_job(random, random.randint(1, 3), random.randint(1, 4), random.randint(4, 15))
    bound, movable = possible(problem), possible(problem, movable=True)
    assert movable <= bound * (1 + 1e-9)
    for _ in range(30):
        shares = [0] * problem.replicas
        for _ in range(problem.microbatches):
            shares[random.randrange(problem.replicas)] += 1
        cuts = tuple(
            tuple(sorted(random.uniform(0, problem.stages) for _ in range(problem.stages - 1)))
            for _ in range(problem.replicas)
        )
        assert step_seconds(problem, Balance(tuple(shares), cuts)) >= movable * (1 - 1e-9)
        assert step_seconds(problem, Balance(tuple(shares), as_run(problem).cuts)) >= bound * (1 - 1e-9)


def test_rows_between_data_parallel_ranks() -> None:
    """One stage: shares follow the speeds, whatever the pipeline."""
    found = rebalance(Job([[1.0], [1.0], [2.0], [4.0]], [[2.0], [2.0], [4.0], [8.0]], microbatches=22))
    assert found.answer.shares == (8, 8, 4, 2) and found.optimal


def test_blocks_stay_whole() -> None:
    for cuts in rebalance(AR, "own", 6).answer.cuts:
        borders = (0.0, *cuts, 4.0)
        assert all(b > a for a, b in pairwise(borders))
        assert np.allclose(np.array(cuts) * 6, np.rint(np.array(cuts) * 6))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([[1.0]], [[0.0]], 4), "backward is not a table"),
        (([[1.0]], [[1.0, 2.0]], 4), "forward has the shape"),
        (([[1.0], [1.0]], [[1.0], [1.0]], 1), "1 micro-batches for 2 replicas"),
    ],
)
def test_malformed_jobs_are_refused(arguments: tuple, complaint: str) -> None:
    with pytest.raises(ProblemError, match=complaint):
        Job(*arguments)


def test_unknown_moves_are_refused() -> None:
    with pytest.raises(ProblemError, match="layers cannot be 'all'"):
        rebalance(ST, "all")
    with pytest.raises(ProblemError, match="0 blocks"):
        rebalance(ST, "own", 0)


def test_uneven_sequences_are_dealt_longest_first() -> None:
    """As run 9.07 s. Taken for slow workers, they had made the job slower; longest first was listed with 7.1132 s."""
    job = read_job(DATA / "SE.json.xz")
    assert isinstance(job, Sequences) and (job.slowness == 1).all()  # and nobody is slow
    before = np.mean([seconds_of(job, step, as_measured(job)) for step in range(job.shape[0])])
    assert before == pytest.approx(9.0652, abs=1e-4)
    found = deal_out(job)
    assert found.cost < 7.1132 and found.lower_bound == pytest.approx(6.5669, abs=1e-4)
    for dealt in found.answer:
        assert sorted(sequence for own in dealt for sequence in own) == list(range(256))


def measured(seed: int, *, slow: float = 1.0, uneven: float = 0.0, noise: float = 0.01) -> Sequences:
    """Ten steps of four replicas of two stages with six micro-batches."""
    draw = np.random.default_rng(seed)
    work = np.exp(draw.normal(0.0, uneven, (10, 4, 1, 6))) * np.array([1.0, 1.5])[:, None]
    work = work * np.exp(draw.normal(0.0, noise, (10, 4, 2, 6)))
    work[:, 2, 1] *= slow
    return Sequences(work, 2 * work, hop=0.01, fixed=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_slow_workers_are_told_from_uneven_work(seed: int) -> None:
    worker, sequences = measured(seed, slow=1.6), measured(seed, uneven=0.4)
    assert not worker.uneven and not measured(seed).uneven and sequences.uneven
    assert worker.slowness[2, 1] == pytest.approx(1.6, rel=0.03) and (worker.slowness != 1).sum() == 1
    assert (sequences.slowness == 1).all()
    both = measured(seed, slow=2.0, uneven=0.2)
    assert both.uneven and both.slowness[2, 1] == pytest.approx(2.0, rel=0.2) and (both.slowness != 1).sum() == 1


@pytest.mark.parametrize("seed", range(4))
def test_no_dealing_of_sequences_is_below_the_bound(seed: int) -> None:
    job, random = measured(seed, slow=1.0 + seed % 2, uneven=0.3), Random(seed)
    least = possible_seconds(job, 0)
    assert least <= seconds_of(job, 0, deal_longest_first(job, 0)) <= seconds_of(job, 0, as_measured(job))
    for _ in range(100):
        sequences = list(range(24))
        random.shuffle(sequences)
        cuts = sorted(random.choices(range(25), k=3))
        dealt = tuple(tuple(sequences[a:b]) for a, b in pairwise((0, *cuts, 24)))
        assert seconds_of(job, 0, dealt) >= least * (1 - 1e-12)


def test_a_job_is_never_made_slower() -> None:
    job = measured(0, uneven=0.4)
    found = deal_out(job)
    assert found.cost <= np.mean([seconds_of(job, step, as_measured(job)) for step in range(10)])
