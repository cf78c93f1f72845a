"""How to share the work anew, given what was measured.

Shares: micro-batches are dealt out one by one, each to the replica whose pipeline is shortest with it
(:mod:`shardwright.search.dealing`); a pipeline only gets longer with more of them, so that is optimal for whole ones.
Layers: every replica's cuts start where its stages would take equally long and are moved as long as its simulated pipeline
gets shorter; with cuts of its own for every replica, each is solved for every number of micro-batches it might get. One set
of cuts for all replicas keeps the groups that reduce gradients as they are, and gains less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np

from bench.published.rebalance.bounds import possible
from bench.published.rebalance.job import Balance, Job, as_run
from bench.published.rebalance.replay import pipeline_seconds, step_seconds
from shardwright.errors import ProblemError
from shardwright.search.dealing import deal
from shardwright.search.solution import Solution

LAYERS = ("fixed", "common", "own")
COARSE, FINE = 0.25, 1 / 256
"""The first and the last step by which a cut is moved, in stages."""


def rebalance(job: Job, layers: str = "fixed", blocks: int | None = None) -> Solution[Balance]:
    """The best sharing found and how good it is.

    ``layers``: ``fixed`` (only shares change), ``common`` (one set of cuts for all replicas) or ``own`` (cuts of its
    own for every replica). ``blocks``: a stage consists of this many blocks that stay whole; without it work is
    divisible. Memory is not looked at: whoever acts on the answer checks it.

    >>> rebalance(Job([[1.0], [2.0]], [[2.0], [4.0]], microbatches=9)).answer.shares
    (6, 3)
    """
    if layers not in LAYERS:
        raise ProblemError(f"layers cannot be {layers!r}.", f"They can be {', '.join(LAYERS)}.")
    if blocks is not None and blocks < 1:
        raise ProblemError(f"a stage of {blocks} blocks.", "It has at least one.")
    began = time.process_time()
    usual = as_run(job)
    tried = [usual, _with_shares(job, usual.cuts)]
    if layers != "fixed":
        tried.append(_common_cuts(job, blocks))
    if layers == "own":
        tried.append(_own_cuts(job, blocks))
    answer = min(tried, key=lambda balance: step_seconds(job, balance))
    cost, bound = step_seconds(job, answer), possible(job, layers != "fixed")
    return Solution(answer, cost, min(bound, cost), cost <= bound * (1 + 1e-9), time.process_time() - began)


def _with_shares(job: Job, cuts: tuple[tuple[float, ...], ...]) -> Balance:
    """The best shares for given cuts."""
    times = [job.split(replica, cuts[replica]) for replica in range(job.replicas)]

    @cache
    def seconds(replica: int, count: int) -> float:
        return pipeline_seconds(*times[replica], job.hop, count)

    return Balance(deal(job.microbatches, job.replicas, seconds), cuts)


def _own_cuts(job: Job, blocks: int | None) -> Balance:
    """Cuts of its own for every replica, and shares to match."""

    @cache
    def best(replica: int, count: int) -> tuple[float, tuple[float, ...]]:
        def cost(cuts: tuple[float, ...]) -> float:
            return pipeline_seconds(*job.split(replica, cuts), job.hop, count)

        return _descend(_even_cuts(job, job.speed[replica], blocks), cost, job.stages, blocks)

    shares = deal(job.microbatches, job.replicas, lambda replica, count: best(replica, count)[0])
    return Balance(shares, tuple(best(replica, max(share, 1))[1] for replica, share in enumerate(shares)))


def _common_cuts(job: Job, blocks: int | None) -> Balance:
    """One set of cuts for all replicas, with the best shares for each that is tried."""

    def cost(cuts: tuple[float, ...]) -> float:
        return step_seconds(job, _with_shares(job, (cuts,) * job.replicas))

    whole = tuple(float(cut) for cut in range(1, job.stages))
    starts = (whole, _even_cuts(job, job.speed.mean(axis=0), blocks))
    _, cuts = min(_descend(start, cost, job.stages, blocks) for start in starts)
    return _with_shares(job, (cuts,) * job.replicas)


def _even_cuts(job: Job, speed: np.ndarray, blocks: int | None) -> tuple[float, ...]:
    """Cuts at which all stages take equally long, or the nearest between blocks."""
    amount = np.concatenate([[0.0], np.cumsum(job.work[0] + job.work[1])])
    wanted = np.cumsum(speed)[:-1] / speed.sum() * amount[-1]
    cuts = np.interp(wanted, amount, np.arange(job.stages + 1))
    if blocks is None:
        return tuple(cuts.tolist())
    places = np.rint(cuts * blocks).astype(int)
    for k in range(len(places)):  # every stage keeps a block
        places[k] = min(max(places[k], places[k - 1] + 1 if k else 1), job.stages * blocks - (len(places) - k))
    return tuple((places / blocks).tolist())


def _descend(
    cuts: tuple[float, ...], cost: Callable[[tuple[float, ...]], float], stages: int, blocks: int | None
) -> tuple[float, tuple[float, ...]]:
    """Move cuts, one or two neighbours at a time, as long as that helps, in smaller and smaller steps."""
    grain = 1 / blocks if blocks else 0.0
    step, least = (max(COARSE, grain), grain or FINE)
    if blocks:
        step = max(round(COARSE * blocks), 1) / blocks
    now = cost(cuts)
    moves = [(k, k) for k in range(len(cuts))] + [(k, k + 1) for k in range(len(cuts) - 1)]
    while cuts:
        better = False
        for first, last in moves:
            for sign in (step, -step):
                tried = tuple(cut + sign if first <= k <= last else cut for k, cut in enumerate(cuts))
                borders = (0.0, *tried, float(stages))
                if any(b - a < (grain or FINE) - 1e-9 for a, b in pairwise(borders)):
                    continue
                value = cost(tried)
                if value < now * (1 - 1e-12):
                    cuts, now, better = tried, value, True
        if not better:
            if step <= least * (1 + 1e-9):
                break
            step = max(round(step * blocks) // 2, 1) / blocks if blocks else step / 2
    return now, cuts
