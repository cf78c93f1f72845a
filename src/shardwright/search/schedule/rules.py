"""The rules that list scheduling tries: how deep to fill, forwards before or after gradients, weights early or late.

No single rule is best everywhere: a deep filling hides the way to the loss and back where memory allows it, a shallow
one keeps memory for the drain; a device that waits for nobody should not put weights into small gaps, one with slack
should. A rule costs about a millisecond to try, so all combinations are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from shardwright.schedules.pipeline import Pipeline
from shardwright.search.schedule._listing import Rooms, Rule
from shardwright.search.schedule.bounds import way

FORWARD_PENALTIES = (-0.1, 0.1, -0.01, 0.0, 0.01, -0.5, 0.5, -1.0, 1.0, -2.0, 2.0)
"""In forwards' own seconds, the most promising first; negative: forwards before gradients."""
WEIGHT_PENALTIES = (0.001, 0.3, 0.8, 0.1, 0.5, 0.999, 1.2)
"""The share of a weight's seconds that must fit into a gap."""


def rules(pipeline: Pipeline) -> Iterator[Rule]:
    """Every combination of depths and penalties."""
    seconds = pipeline.forward.mean(axis=1)
    for forward, weight, depth in product(FORWARD_PENALTIES, WEIGHT_PENALTIES, _depths(pipeline, seconds)):
        yield Rule(depth, forward * seconds, np.full(pipeline.devices, weight))


def _depths(pipeline: Pipeline, seconds: np.ndarray) -> list[np.ndarray]:
    """Forwards in flight: as memory allows, as in 1F1B, as in ZB-H2, and as many as the way to the loss and back
    hides.
    """
    unlimited = np.full(pipeline.stages, pipeline.microbatches, np.int64)
    following = np.arange(pipeline.stages, 0, -1)
    lag = np.array([float(way(pipeline, stage)[1][stage].mean()) for stage in range(pipeline.stages)])
    hidden = lag / np.maximum(seconds, 1e-300)
    found: list[np.ndarray] = []
    for depth in (unlimited, following, 2 * following - 1, np.floor(hidden), np.ceil(hidden)):
        capped = np.clip(depth, 1, pipeline.microbatches).astype(np.int64)
        if not any(np.array_equal(capped, other) for other in found):
            found.append(capped)
    return found


def rooms(pipeline: Pipeline) -> Rooms:
    """The stages of every device, and the memory each stage's forwards leave to the later stages of its device."""
    mine = [pipeline.stages_of(device) for device in range(pipeline.devices)]
    keep = np.zeros(pipeline.stages)
    for stages in mine:
        for place, stage in enumerate(stages):
            keep[stage] = sum(float(pipeline.forward_memory[later].max()) for later in stages[place + 1 :])
    at = np.cumsum([0, *map(len, mine)], dtype=np.int64)
    return Rooms(at, np.asarray([stage for stages in mine for stage in stages], np.int64), keep)
