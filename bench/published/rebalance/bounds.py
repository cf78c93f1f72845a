"""What is possible: no sharing of the work makes a step shorter than this.

A stage does its share of every micro-batch one after the other; before its first and after its last it waits for the
stages before it, once each way. So a replica with n micro-batches takes at least n a(s) + the sum over earlier stages
of a(j) + 2 hops, where a is the seconds of a stage per micro-batch, and for a given step time every replica has a
largest number of micro-batches. The smallest time at which these numbers suffice is the bound. Where layers may move,
each replica first takes the split that is best for that time: a linear program whose corners are known.
"""

from __future__ import annotations

from itertools import product
from math import floor

import numpy as np

from bench.published.rebalance.job import Floats, Job

CORNERS = 10
"""Stages up to which all corners of a replica's program are looked at; beyond, filling and draining are not counted."""


def possible(job: Job, movable: bool = False) -> float:
    """Seconds below which no step can be: by shares alone, or with layers ``movable`` in every replica by itself.

    >>> round(possible(Job([[1.0], [2.0]], [[2.0], [4.0]], microbatches=9)), 6)
    18.0
    """
    low, high = 0.0, float((job.forward + job.backward).max()) * (job.microbatches + job.stages) * job.stages + 1.0
    high += 2 * job.stages * job.hop
    speeds = _fastest(job) if movable else None
    for _ in range(100):
        middle = (low + high) / 2
        most = 0
        for replica in range(job.replicas):
            if speeds is None:
                most += _most(job.forward[replica] + job.backward[replica], job.hop, middle)
            else:
                most += _most_movable(job, speeds[replica], middle)
        low, high = (low, middle) if most >= job.microbatches else (middle, high)
    return job.fixed + low


def _most(seconds: Floats, hop: float, limit: float) -> int:
    """The most micro-batches a replica gets through."""
    before = np.concatenate([[0.0], np.cumsum(seconds + 2 * hop)[:-1]])
    return max(floor(float(((limit - before) / seconds).min()) + 1e-9), 0)


def _fastest(job: Job) -> Floats:
    """The speed of every worker on the work that suits it best, [replica, stage]."""
    forward, backward = job.work
    ratios = (job.forward / forward)[:, :, None] * forward + (job.backward / backward)[:, :, None] * backward
    return ((forward + backward) / ratios).max(axis=2)


def _most_movable(job: Job, speed: Floats, limit: float) -> int:
    """The most micro-batches a replica gets through with its best split of the work."""
    work = float(sum(part.sum() for part in job.work))
    low, high = 0, job.microbatches
    while low < high:
        middle = (low + high + 1) // 2
        if _capacity(speed, middle, job.hop, limit) >= work * (1 - 1e-12):
            low = middle
        else:
            high = middle - 1
    return low


def _capacity(speed: Floats, count: int, hop: float, limit: float) -> float:
    """The most work per micro-batch that fits into ``limit`` seconds: max Σ v(s) a(s) with n a(s) + Σ earlier ≤
    limit, a ≥ 0.
    """
    stages = len(speed)
    if count < stages or stages > CORNERS:
        return limit / count * float(speed.sum())
    best = 0.0
    for used in product((False, True), repeat=stages):
        before, total = 0.0, 0.0
        for stage in range(stages):
            seconds = max((limit - before) / count, 0.0) if used[stage] else 0.0
            total += seconds * float(speed[stage])
            before += seconds + 2 * hop
        best = max(best, total)
    return best
