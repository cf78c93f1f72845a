"""Pipelines and orders as arrays, and the one pass over them that says when everything runs (compiled).

An action is a number: ``(kind * stages + stage) * microbatches + microbatch`` with the kinds F, I, W, B. Both the
timing of a given schedule and the search for a new one run on these arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.jit import kernel
from shardwright.schedules.pipeline import Floats, Pipeline
from shardwright.schedules.schedule import KINDS, Action, Schedule

Ints = NDArray[np.int64]
F, I, W, B = range(len(KINDS))


class FlatPipeline(NamedTuple):
    """A pipeline as arrays; ``source[source_at[s]:source_at[s + 1]]`` are the stages that stage s reads, with their
    hops.
    """

    stages: int
    microbatches: int
    device: Ints
    seconds: Floats  # [kind, stage, micro-batch]
    memory: Floats  # [kind, stage, micro-batch]
    limit: Floats
    source_at: Ints
    source: Ints
    source_hop: Floats
    reader_at: Ints
    reader: Ints
    reader_hop: Floats


def flatten(pipeline: Pipeline) -> FlatPipeline:
    """The arrays of a pipeline."""
    seconds = np.stack([pipeline.forward, pipeline.inputs, pipeline.weights, pipeline.inputs + pipeline.weights])
    changes = (pipeline.inputs_memory, pipeline.weights_memory, pipeline.inputs_memory + pipeline.weights_memory)
    sources = [pipeline.reads(stage) for stage in range(pipeline.stages)]
    readers = [pipeline.read_by(stage) for stage in range(pipeline.stages)]

    def offsets(rows: list) -> Ints:
        return np.cumsum([0, *map(len, rows)], dtype=np.int64)

    return FlatPipeline(
        pipeline.stages,
        pipeline.microbatches,
        np.asarray(pipeline.device_of, np.int64),
        np.ascontiguousarray(seconds),
        np.stack([pipeline.forward_memory, *changes]),
        np.asarray(pipeline.limits, float),
        offsets(sources),
        np.asarray([edge.source for row in sources for edge in row], np.int64),
        np.asarray([edge.hop for row in sources for edge in row], float),
        offsets(readers),
        np.asarray([edge.reader for row in readers for edge in row], np.int64),
        np.asarray([edge.hop for row in readers for edge in row], float),
    )


def numbered(schedule: Schedule) -> tuple[Ints, Ints]:
    """The actions of all devices one after the other, as numbers, and where each device begins."""
    stages, microbatches = schedule.stages, schedule.microbatches
    kinds = {kind: place for place, kind in enumerate(KINDS)}
    numbers = [(kinds[a.kind] * stages + a.stage) * microbatches + a.microbatch for a in schedule.actions()]
    return np.asarray(numbers, np.int64), np.cumsum([0, *map(len, schedule.orders)], dtype=np.int64)


def named(numbers: Ints, begins: Ints, stages: int, microbatches: int) -> Schedule:
    """The inverse of ``numbered``."""
    kinds, rest = np.divmod(numbers, stages * microbatches)
    actions = [
        Action(number // microbatches, KINDS[kind], number % microbatches)
        for kind, number in zip(kinds.tolist(), rest.tolist(), strict=True)
    ]
    return Schedule(tuple(tuple(actions[a:b]) for a, b in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)))


@kernel()
def ready(
    flat: FlatPipeline, kind: int, stage: int, microbatch: int, done: Floats
) -> float:  # pragma: no cover - compiled
    """When everything an action waits for has arrived, or infinity where some of it is not known yet.

    ``done[kind, stage, micro-batch]`` are the ends known so far, infinity elsewhere; a whole backward pass stands
    under ``I`` too.
    """
    if kind == F:
        latest = 0.0
        for place in range(flat.source_at[stage], flat.source_at[stage + 1]):
            latest = max(latest, done[F, flat.source[place], microbatch] + flat.source_hop[place])
        return latest
    if kind == W:
        return done[I, stage, microbatch]
    latest = done[F, stage, microbatch]
    for place in range(flat.reader_at[stage], flat.reader_at[stage + 1]):
        latest = max(latest, done[I, flat.reader[place], microbatch] + flat.reader_hop[place])
    return latest


@kernel()
def run_orders(
    flat: FlatPipeline, numbers: Ints, begins: Ints, done: Floats, starts: Floats
) -> int:  # pragma: no cover
    """Run every device's actions in order, each as early as possible; the number of actions that could run.

    Writes ``starts`` by place in ``numbers`` and the ends into ``done``. Searches time orders tens of thousands of times, so
    what :func:`ready` says stands here once more, in the numbers of actions: no division but for stages' neighbours.
    """
    done[:] = np.inf
    devices, microbatches = len(begins) - 1, flat.microbatches
    size = flat.stages * microbatches
    seconds, ends = flat.seconds.reshape(-1), done.reshape(-1)
    heads = begins[:-1].copy()
    free = np.zeros(devices)
    count, moved = 0, True
    while moved:
        moved = False
        for device in range(devices):
            head, until, now = heads[device], begins[device + 1], free[device]
            while head < until:
                number = numbers[head]
                start = now
                if number < size:  # forward
                    stage = number // microbatches
                    for place in range(flat.source_at[stage], flat.source_at[stage + 1]):
                        before = number + (flat.source[place] - stage) * microbatches
                        start = max(start, ends[before] + flat.source_hop[place])
                elif 2 * size <= number < 3 * size:  # weights, after the inputs
                    start = max(start, ends[number - size])
                else:  # inputs, or a whole backward pass
                    forward = number % size
                    stage = forward // microbatches
                    start = max(start, ends[forward])
                    for place in range(flat.reader_at[stage], flat.reader_at[stage + 1]):
                        before = size + forward + (flat.reader[place] - stage) * microbatches
                        start = max(start, ends[before] + flat.reader_hop[place])
                if start == np.inf:
                    break
                now = start + seconds[number]
                ends[number] = now
                if number >= 3 * size:
                    ends[number - 2 * size] = now
                starts[head] = start
                head += 1
            count += head - heads[device]
            moved = moved or head > heads[device]
            heads[device], free[device] = head, now
    return count
