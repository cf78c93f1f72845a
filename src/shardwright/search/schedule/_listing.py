"""List scheduling, compiled: devices choose their next pass by priority whenever they are free.

All devices together run in the order of time. A free device looks at the next forward, input and weight of each of
its stages (micro-batches keep their order within each), at when they can start, and takes the one with the smallest
start plus penalty. The penalties are the rule: that of a forward against an input's gradient, and how much of a
weight's gradient must fit into a gap before it is put there. A weight that makes room for a waiting forward is ranked
as that forward. Two things keep a memory limit from ending in a deadlock: a device with several stages keeps room for
one forward of each of its later stages, and weights can always run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import kernel
from shardwright.schedules._flat import F, FlatPipeline, I, Ints, W, ready
from shardwright.schedules.pipeline import Floats


class Rule(NamedTuple):
    """What a device prefers. ``depth`` [stage]: forwards in flight at most; ``forward`` [stage]: penalty in seconds;
    ``weight`` [device]: a weight's penalty as a share of its seconds (1: only where it fits into the gap)."""

    depth: Ints
    forward: Floats
    weight: Floats


class Rooms(NamedTuple):
    """The stages of every device (``stage[at[d]:at[d + 1]]``) and, per stage, the memory its forwards must leave
    free.
    """

    at: Ints
    stage: Ints
    keep: Floats


@kernel()
def _choose(  # pragma: no cover - compiled
    flat: FlatPipeline, rooms: Rooms, rule: Rule, device: int, nexts: Ints, done: Floats, free: float, held: float
) -> tuple[float, int, int]:
    """The start, kind and stage of what a device does next, as far as it can know; infinity where it can do nothing."""
    best, best_start, best_kind, best_stage = np.inf, np.inf, W, -1
    blocked = np.inf  # when a forward could run that only lacks memory
    for place in range(rooms.at[device + 1] - 1, rooms.at[device] - 1, -1):
        stage = rooms.stage[place]
        for kind in (I, F):
            i = nexts[kind, stage]
            if i == flat.microbatches or (kind == I and i >= nexts[F, stage]):
                continue
            start = max(free, ready(flat, kind, stage, i, done))
            key = start
            if kind == F:
                key += rule.forward[stage]
                if nexts[F, stage] - nexts[I, stage] >= rule.depth[stage]:
                    continue
                if held + flat.memory[F, stage, i] + rooms.keep[stage] > flat.limit[device]:
                    blocked = min(blocked, key)
                    continue
            if key < best:
                best, best_start, best_kind, best_stage = key, start, kind, stage
    for place in range(rooms.at[device + 1] - 1, rooms.at[device] - 1, -1):
        stage = rooms.stage[place]
        i = nexts[W, stage]
        if i < nexts[I, stage]:
            start = max(free, done[I, stage, i])
            key = min(start + rule.weight[device] * flat.seconds[W, stage, i], max(start, blocked))
            if key < best:
                best, best_start, best_kind, best_stage = key, start, W, stage
    return best_start, best_kind, best_stage


@kernel()
def list_schedule(  # pragma: no cover - compiled
    flat: FlatPipeline, rooms: Rooms, rule: Rule, numbers: Ints, begins: Ints
) -> bool:
    """Write an order of all devices into ``numbers``; false where no device could go on."""
    devices, microbatches = len(begins) - 1, flat.microbatches
    done = np.full((4, flat.stages, microbatches), np.inf)
    nexts = np.zeros((3, flat.stages), np.int64)
    free, held = np.zeros(devices), np.zeros(devices)
    heads = begins[:-1].copy()
    stale = np.ones(devices, np.bool_)
    starts = np.full(devices, np.inf)
    kinds, stages = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    for _ in range(begins[-1]):
        for device in range(devices):
            if stale[device]:
                stale[device] = False
                starts[device], kinds[device], stages[device] = _choose(
                    flat, rooms, rule, device, nexts, done, free[device], held[device]
                )
        device = int(np.argmin(starts))
        if starts[device] == np.inf:
            return False
        kind, stage = kinds[device], stages[device]
        i = nexts[kind, stage]
        nexts[kind, stage] += 1
        free[device] = done[kind, stage, i] = starts[device] + flat.seconds[kind, stage, i]
        held[device] += flat.memory[kind, stage, i]
        numbers[heads[device]] = (kind * flat.stages + stage) * microbatches + i
        heads[device] += 1
        stale[device] = True
        if kind == F:
            for place in range(flat.reader_at[stage], flat.reader_at[stage + 1]):
                stale[flat.device[flat.reader[place]]] = True
        elif kind == I:
            for place in range(flat.source_at[stage], flat.source_at[stage + 1]):
                stale[flat.device[flat.source[place]]] = True
    return True
