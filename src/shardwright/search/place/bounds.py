"""Bounds on progress: how much of the work a device can take under a load limit, whatever it is given.

For each device kind r, weigh every block by its time on r. A device of kind k advances that weight by at most
max(time on r / time on k) times its load limit; memory is bounded the same way by the device's room. Weights are integers,
so that sums over sets are exact and monotone; rounding is always towards the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.search.place.problem import Rules
from shardwright.search.place.reductions import Blocks

_SCALE = 1 << 40


@dataclass(frozen=True, eq=False)
class References:
    """Integer weights of the blocks; a device of kind k advances reference r by at most ``capacity[k, r]``.

    Where ``timed[r]`` is a pass, the capacity is per unit of that pass's load limit; where it is -1 it is absolute.
    """

    weights: np.ndarray  # [blocks, references]
    capacity: np.ndarray  # [kinds, references]
    timed: np.ndarray  # [references]


def references(blocks: Blocks, passes: int) -> References:
    """One reference per device kind and pass, and one for memory."""
    finite = np.where(np.isfinite(blocks.times), blocks.times, 0.0)
    times = finite if passes == 2 else finite.sum(axis=2, keepdims=True)
    refused = (~np.isfinite(blocks.times)).any(axis=2)
    weights, capacity, timed = [], [], []
    for kind in range(times.shape[1]):
        for pass_ in range(passes):
            column = np.where(refused[:, kind], 0.0, times[:, kind, pass_])
            if column.sum() == 0:
                continue
            scale = _SCALE / column.sum()
            weights.append(np.floor(column * scale).astype(np.int64))
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(refused | (column == 0)[:, None], 0.0, column[:, None] / times[:, :, pass_])
            capacity.append(ratio.max(axis=0) * scale)
            timed.append(pass_)
    if blocks.memory.sum() > 0:
        scale = _SCALE / blocks.memory.sum()
        weights.append(np.floor(blocks.memory * scale).astype(np.int64))
        capacity.append(np.array([kind.room for kind in blocks.kinds]) * scale)
        timed.append(-1)
    if not weights:
        weights, capacity, timed = [np.ones(blocks.count, dtype=np.int64)], [np.full(times.shape[1], np.inf)], [-1]
    return References(np.stack(weights, axis=1), np.stack(capacity, axis=1), np.array(timed))


def progress_bound(blocks: Blocks, rules: Rules, pass_: int = 0) -> float:
    """No placement's largest load (of one pass) is below this: work spread evenly, or the block that takes longest."""
    passes = 2 if rules.separate_passes else 1
    counts = np.array([kind.count for kind in blocks.kinds], dtype=np.float64)
    used = counts > 0
    known = references(blocks, passes)
    bound = 0.0
    for r in np.flatnonzero(known.timed == pass_):
        capacity = known.capacity[used, r]
        if np.isfinite(capacity).all() and (counts[used] @ capacity) > 0:
            # Each rounded weight lost less than one, so adding nothing back keeps the bound safe.
            bound = max(bound, float(known.weights[:, r].sum() / (counts[used] @ capacity)))
    most = counts.max(initial=1.0) if rules.replicate else 1.0
    there = blocks.times[:, used, :]
    alone = there.sum(axis=2) if passes == 1 else there[:, :, pass_]
    return max(bound, float(alone.min(axis=1, initial=np.inf).max(initial=0.0)) / most) if blocks.count else 0.0
