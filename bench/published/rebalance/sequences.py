"""Jobs whose micro-batches take unlike long, because their sequences do: each is given to a replica, the longest first.

What a job's measured seconds say is told apart first. A slow worker takes longer for all its micro-batches; a long
sequence takes longer on every stage of whatever replica has it. So a worker is slow where its median, over all steps,
lies further from that of its stage than chance explains; and work is uneven where micro-batches of one worker differ
among each other, alike in all stages. Whoever takes one for the other makes a job slower: shares that follow the medians
of workers chase noise.

Dealing (Graham 1969): of a step's sequences, the longest first, each goes to the replica that then has least to do on its
busiest stage. Within a replica the order that its simulated 1F1B ends soonest with counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.published.rebalance.job import Floats
from bench.published.rebalance.replay import one_f_one_b_seconds
from shardwright.errors import ProblemError
from shardwright.search.solution import Solution

SLOW = 1.05
"""A worker is not called slow for less, whatever chance explains."""
CHANCE = 4.0
"""Standard errors of a median beyond which it is no chance."""
UNEVEN = 0.05
"""Of the mean: micro-batches that spread less, within a worker, are alike."""
ALIKE = 0.5
"""Correlation of micro-batches' seconds between stages from which on it is the sequences that differ."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Measured seconds [step, replica, stage, micro-batch], ``hop`` and ``fixed`` as of a job."""

    forward: Floats
    backward: Floats
    hop: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            table = np.asarray(getattr(self, name), float)
            if table.ndim != 4 or 0 in table.shape or not np.isfinite(table).all() or (table <= 0).any():
                raise ProblemError(
                    f"{name} is not a table [step][replica][stage][micro-batch] of positive seconds.",
                    "Give every micro-batch's measured seconds.",
                )
            object.__setattr__(self, name, table)
        if self.forward.shape != self.backward.shape:
            raise ProblemError(
                f"forward has the shape {self.forward.shape}, backward {self.backward.shape}.",
                "Measure both everywhere.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.forward.shape

    @cached_property
    def slowness(self) -> Floats:
        """How many times as long each worker takes, [replica, stage]; 1 where that may be chance."""
        total = self.forward + self.backward
        samples = total.transpose(1, 2, 0, 3).reshape(*total.shape[1:3], -1)
        median = np.median(samples, axis=2)
        usual = np.median(median, axis=0)
        spread = 1.4826 * np.median(np.abs(samples - median[:, :, None]), axis=2)
        error = 1.2533 * spread / np.sqrt(samples.shape[2])
        times = median / usual
        slow = (np.abs(median - usual) > CHANCE * error) & ((times > SLOW) | (times < 1 / SLOW))
        return np.where(slow, times, 1.0)

    @cached_property
    def work(self) -> tuple[Floats, Floats]:
        """Seconds, forward and backward, that a worker of the usual speed would have taken."""
        slowness = self.slowness[None, :, :, None]
        return self.forward / slowness, self.backward / slowness

    @cached_property
    def uneven(self) -> bool:
        """Whether it is the sequences that differ."""
        total = self.work[0] + self.work[1]
        apart = total - total.mean(axis=(0, 3), keepdims=True)
        if apart.std() <= UNEVEN * total.mean():
            return False
        stages = [apart[:, :, stage].ravel() for stage in range(total.shape[2])]
        return all(np.corrcoef(stages[0], other)[0, 1] > ALIKE for other in stages[1:])


Dealt = tuple[tuple[int, ...], ...]
"""Of every replica, the sequences (replica · micro-batches + micro-batch, as measured) it gets, in their order."""


def as_measured(job: Sequences) -> Dealt:
    """Every sequence where it was."""
    _, replicas, _, count = job.shape
    return tuple(tuple(range(replica * count, (replica + 1) * count)) for replica in range(replicas))


def seconds_of(job: Sequences, step: int, dealt: Dealt) -> float:
    """Seconds of a step with its sequences dealt out so."""
    return job.fixed + max(_replica_seconds(job, step, replica, own) for replica, own in enumerate(dealt))


def _replica_seconds(job: Sequences, step: int, replica: int, own: tuple[int, ...]) -> float:
    if not own:
        return 0.0
    count, slowness = job.shape[3], job.slowness[replica][:, None]
    where = np.array(own)
    tables = (np.ascontiguousarray(part[step, where // count, :, where % count].T * slowness) for part in job.work)
    return float(one_f_one_b_seconds(*tables, float(job.hop)))


def deal_longest_first(job: Sequences, step: int) -> Dealt:
    """The sequences of a step dealt out anew."""
    _, replicas, stages, _ = job.shape
    total = (job.work[0] + job.work[1])[step].transpose(0, 2, 1).reshape(-1, stages)  # [sequence, stage]
    given: list[list[int]] = [[] for _ in range(replicas)]
    load = np.zeros((replicas, stages))
    for sequence in np.argsort(-total.max(axis=1), kind="stable").tolist():
        after = (load + total[sequence] * job.slowness).max(axis=1)
        replica = int(np.argmin(after))
        given[replica].append(sequence)
        load[replica] += total[sequence] * job.slowness[replica]
    dealt = [_best_order(job, step, replica, own) for replica, own in enumerate(given)]
    return tuple(dealt)


def _best_order(job: Sequences, step: int, replica: int, own: list[int]) -> tuple[int, ...]:
    """Falling, rising, or rising to the middle: a short sequence first fills the pipeline soon, one last drains it soon."""
    orders = [tuple(own), tuple(own[::-1]), tuple(own[1::2][::-1] + own[::2]), tuple(own[::2][::-1] + own[1::2])]
    return min(orders, key=lambda order: _replica_seconds(job, step, replica, order))


def possible_seconds(job: Sequences, step: int) -> float:
    """Seconds that no dealing of a step's sequences undercuts: some stage's work, spread evenly over its workers, after
    the shortest way to it and back.
    """
    forward, backward = job.work[0][step], job.work[1][step]
    speed, before, longest = (1 / job.slowness).sum(axis=0), 0.0, 0.0
    for stage in range(job.shape[2]):
        work = float((forward[:, stage] + backward[:, stage]).sum())
        longest = max(longest, before + work / float(speed[stage]))
        fastest = float(job.slowness[:, stage].min())
        before += fastest * float(forward[:, stage].min() + backward[:, stage].min()) + 2 * job.hop
    return job.fixed + longest


def deal_out(job: Sequences) -> Solution[tuple[Dealt, ...]]:
    """Every step's sequences dealt out anew where that is shorter; cost and bound are means over the steps."""
    began = time.process_time()
    answers, cost, bound = [], 0.0, 0.0
    for step in range(job.shape[0]):
        tried = [as_measured(job), *([deal_longest_first(job, step)] if job.uneven else [])]
        seconds, best = min((seconds_of(job, step, dealt), dealt) for dealt in tried)
        answers.append(best)
        cost += seconds / job.shape[0]
        bound += possible_seconds(job, step) / job.shape[0]
    optimal = cost <= bound * (1 + 1e-9)
    return Solution(tuple(answers), cost, min(bound, cost), optimal, time.process_time() - began)
