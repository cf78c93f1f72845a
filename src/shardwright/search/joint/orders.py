"""Orders of passes that a pipeline may run in, as the joint search times them.

A group of devices runs one stage, or two where the order is made of such (interleaved 1F1B: the blocks go round the groups
twice; ZB-V: down and up again). A stage's seconds are thirds: forward, gradient of the inputs, gradient of the weights;
where an order splits the backward pass, the gradient of the inputs leaves before that of the weights is computed. What a
group holds is counted by its order: every forward pass, in full, until the gradient of its weights is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.schedules import RECIPES, known_schedule
from shardwright.schedules._flat import F, FlatPipeline, I, W, numbered, run_orders

OTHERS = ("zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")
"""Orders that compete with 1F1B."""
TWO = 2
"""Stages of a group where an order has several."""


def stages_per_group(name: str) -> int:
    """How many stages a group of devices runs in an order.

    >>> stages_per_group("zb-h1"), stages_per_group("interleaved-1f1b"), stages_per_group("zb-v")
    (1, 2, 2)
    """
    return RECIPES[name].stages_per_device or TWO


def down_and_up(name: str) -> bool:
    """Whether the first group of devices runs the last stage too."""
    return RECIPES[name].shape == "v"


@dataclass(frozen=True, eq=False)
class Order:
    """A known order for so many groups of devices and micro-batches."""

    device_of: tuple[int, ...]
    in_flight: tuple[int, ...]
    """Per group, forward passes (of all its stages) that it holds at most."""
    numbers: np.ndarray
    begins: np.ndarray
    flat: FlatPipeline

    def ends(self, seconds: Sequence[float]) -> np.ndarray:
        """When each group ends its last pass, were every stage to take so many ``seconds`` for a micro-batch.

        >>> order_of("zb-h1", 2, 4).ends([3.0, 3.0])
        array([13., 13.])
        """
        thirds = np.array(seconds)[:, None] / 3.0
        table = self.flat.seconds
        table[F], table[I], table[W] = thirds, thirds, thirds
        table[W + 1] = 2.0 * thirds
        starts = np.empty(len(self.numbers))
        done = run_orders(self.flat, self.numbers, self.begins, np.empty_like(table), starts)
        assert done == len(self.numbers)  # a known order never waits for ever
        last = self.begins[1:] - 1
        return starts[last] + table.reshape(-1)[self.numbers[last]]


def least_held(name: str, most: int, microbatches: int) -> tuple[int, ...]:
    """By how many groups are after a group, the micro-batches that it holds at least, whatever the number of groups before
    it. Of one stage: 1F1B one for each group from it to the last, and none of the other orders fewer. Of two: half of its
    forward passes, for one of its stages has half of its blocks or more. Of n groups ZB-V holds 2 n forward passes in each
    (of m micro-batches at most 2 m), interleaved 1F1B in the one with k after it 2 k + n + 1 (at most n + m); to make the
    orders for every number of groups would take seconds.

    >>> least_held("zb-v", 4, 16), least_held("interleaved-1f1b", 4, 16), least_held("zb-v", 4, 2)
    ((1, 2, 3, 4), (1, 2, 4, 5), (1, 2, 2, 2))
    """
    m = microbatches
    if stages_per_group(name) == 1:
        return tuple(min(m, k + 1) for k in range(most))
    passes = [2 * (k + 1) if down_and_up(name) else min(3 * k + 2, k + 1 + m) for k in range(most)]
    return tuple(min(m, count // 2) for count in passes)


@lru_cache(maxsize=256)
def order_of(name: str, groups: int, microbatches: int) -> Order:
    """A known order, made once."""
    stages = groups * stages_per_group(name)
    schedule = known_schedule(name, stages, microbatches, groups)
    numbers, begins = numbered(schedule)
    chain, none = np.arange(stages), np.zeros(0)
    flat = FlatPipeline(
        stages,
        microbatches,
        np.asarray(schedule.device_of, np.int64),
        np.zeros((W + 2, stages, microbatches)),
        np.zeros((W + 2, stages, microbatches)),
        np.full(groups, np.inf),
        np.maximum(np.arange(-1, stages), 0).astype(np.int64),  # each stage but the first reads the one before it
        chain[:-1].astype(np.int64),
        np.zeros(stages - 1) if stages > 1 else none,
        np.minimum(np.arange(stages + 1), stages - 1).astype(np.int64),
        chain[1:].astype(np.int64),
        np.zeros(stages - 1) if stages > 1 else none,
    )
    return Order(schedule.device_of, tuple(map(schedule.in_flight, range(groups))), numbers, begins, flat)
