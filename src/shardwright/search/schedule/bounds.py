"""Lower bounds on the span of a pipeline: what one device must wait for, whatever the others do.

Take a device alone and let the others be infinitely fast in choosing. It cannot finish before its own work is done.
Before its first gradient it can only run forwards, at most as many as its memory holds, yet the first gradient needs
the way of a micro-batch to the loss and back: what is left of that way is idle (the *head*). After its last forward
the same way lies ahead of that micro-batch's gradient, and meanwhile the device has at most the gradients of what it
holds (the *tail*). Where not all forwards fit into memory at once, some gradient comes before the last forward, so
head and tail do not overlap and both are idle. Memory times the span bounds what all micro-batches together hold over
time. And a device further down has to get through all its forwards and input gradients between the way there and the
way back, which is what counts where micro-batches are few. With equal stages and ZB-H1's memory the sum of head and
tail is exactly ZB-H1's bubble, which is therefore optimal.
"""

from __future__ import annotations

import numpy as np

from shardwright.schedules.pipeline import Floats, Pipeline


def lower_bound(pipeline: Pipeline, objective: str = "span") -> float:
    """No schedule of ``pipeline`` has a shorter longest span (or makespan).

    >>> from shardwright.schedules import pipeline
    >>> lower_bound(pipeline(range(4), 12, 5, 6, 4, forward_memory=2, inputs_memory=-1, limits=10))
    193.0
    """
    ways = [way(pipeline, stage) for stage in range(pipeline.stages)]
    backs = [_way_back(pipeline, stage) for stage in range(pipeline.stages)]
    heads = [_head(pipeline, device, ways) for device in range(pipeline.devices)]
    spans = [
        max(_alone(pipeline, device, ways, heads[device]), _beside(pipeline, device, ways, backs, heads))
        for device in range(pipeline.devices)
    ]
    if objective == "span":
        return max(spans)
    first = [min(_earliest(pipeline)[stage].min() for stage in pipeline.stages_of(d)) for d in range(pipeline.devices)]
    alone = max(float((starts + pipeline.inputs + pipeline.weights).max()) for _, starts in ways)
    return max(alone, *(float(begin) + span for begin, span in zip(first, spans, strict=True)))


def way(pipeline: Pipeline, stage: int) -> tuple[Floats, Floats]:
    """Longest ways [stage, micro-batch] from the start of a forward of ``stage``: to the end of each stage's forward
    and to the start of each stage's input gradient; minus infinity where nothing leads.
    """
    shape = (pipeline.stages, pipeline.microbatches)
    ends, starts = np.full(shape, -np.inf), np.full(shape, -np.inf)
    ends[stage] = pipeline.forward[stage]
    for reader in range(stage + 1, pipeline.stages):
        for edge in pipeline.reads(reader):
            ends[reader] = np.maximum(ends[reader], ends[edge.source] + edge.hop + pipeline.forward[reader])
    for source in range(pipeline.stages - 1, -1, -1):
        starts[source] = ends[source]
        for edge in pipeline.read_by(source):
            starts[source] = np.maximum(starts[source], starts[edge.reader] + pipeline.inputs[edge.reader] + edge.hop)
    return ends, starts


def _earliest(pipeline: Pipeline) -> Floats:
    """When each forward can start at the earliest, [stage, micro-batch]."""
    starts = np.zeros((pipeline.stages, pipeline.microbatches))
    for edge in sorted(pipeline.edges, key=lambda edge: edge.reader):
        arrival = starts[edge.source] + pipeline.forward[edge.source] + edge.hop
        starts[edge.reader] = np.maximum(starts[edge.reader], arrival)
    return starts


def _way_back(pipeline: Pipeline, stage: int) -> Floats:
    """Longest ways [stage, micro-batch] from the end of an input gradient of ``stage`` to the end of each other's."""
    ends = np.full((pipeline.stages, pipeline.microbatches), -np.inf)
    ends[stage] = 0.0
    for source in range(stage - 1, -1, -1):
        for edge in pipeline.read_by(source):
            ends[source] = np.maximum(ends[source], ends[edge.reader] + edge.hop + pipeline.inputs[source])
    return ends


def _head(pipeline: Pipeline, device: int, ways: list[tuple[Floats, Floats]]) -> float:
    """Idle seconds before the first gradient."""
    mine = list(pipeline.stages_of(device))
    first = float(np.stack([ways[stage][1][mine] for stage in mine]).max(axis=0).min())
    most = _most_forwards(pipeline.forward[mine], pipeline.forward_memory[mine], pipeline.limits[device])
    return max(0.0, first - most)


def _beside(
    pipeline: Pipeline, device: int, ways: list[tuple[Floats, Floats]], backs: list[Floats], heads: list[float]
) -> float:
    """To every device below, through its forwards and input gradients, back, and a last weight's gradient."""
    mine = list(pipeline.stages_of(device))
    last = float(pipeline.weights[mine].min())
    best = 0.0
    for other in range(pipeline.devices):
        theirs = list(pipeline.stages_of(other))
        there = np.stack([ways[stage][0][theirs] for stage in mine]).max(axis=0) - pipeline.forward[theirs]
        back = np.stack([backs[stage][mine].max(axis=0) for stage in theirs])
        if other != device and np.isfinite(there).all() and np.isfinite(back).all():
            busy = float((pipeline.forward + pipeline.inputs)[theirs].sum()) + heads[other]
            best = max(best, float(there.min()) + busy + float(back.min()) + last)
    return best


def _alone(pipeline: Pipeline, device: int, ways: list[tuple[Floats, Floats]], head: float) -> float:
    """A device's work, its head and tail, and its memory over time."""
    mine = list(pipeline.stages_of(device))
    limit = pipeline.limits[device]
    seconds = [table[mine] for table in (pipeline.forward, pipeline.inputs, pipeline.weights)]
    held, left = pipeline.forward_memory[mine], (pipeline.forward_memory + pipeline.inputs_memory)[mine]
    lags = np.stack([ways[stage][1][mine] for stage in mine])  # [from forward, to input, micro-batch]

    after = (lags - seconds[0][:, None, :]).max(axis=1)  # from the end of a forward to its device's last input
    tail = max(0.0, float(after.min()) - _most_gradients(seconds[1], seconds[2], held, left, limit))
    idle = head + tail if held.sum() > limit else max(head, tail)
    bound = pipeline.work[device] + idle

    if 0 < limit < np.inf:
        own = np.stack([lags[k, k] for k in range(len(mine))])
        area = float((held * own + left * seconds[1]).sum())
        bound = max(bound, area / limit + float(seconds[2].min()))
    return bound


def _most_forwards(seconds: Floats, held: Floats, limit: float) -> float:
    """The most seconds of forwards that memory can hold at once: as many as fit, the longest ones."""
    fitting = int(np.searchsorted(np.cumsum(np.sort(held, axis=None)), limit * (1 + 1e-12), side="right"))
    return float(np.sort(seconds, axis=None)[::-1][:fitting].sum())


def _most_gradients(inputs: Floats, weights: Floats, held: Floats, left: Floats, limit: float) -> float:
    """The most seconds of gradients that memory can hold at once beside one forward whose own gradient is not among
    them.
    """
    everything = float((inputs + weights).sum() - (inputs + weights).min())
    room = limit * (1 + 1e-12) - float(held.min())
    if room >= held.sum():
        return everything
    whole, part = (inputs + weights).max(), weights.max()
    if held.min() == held.max() and left.min() == left.max() and held.min() > 0 and left.min() > 0:
        most = 0.0
        for count in range(min(int(room / held.min()), held.size - 1) + 1):
            rest = min(int((room - count * held.min()) / left.min()), held.size - 1 - count)
            most = max(most, float(count * whole + rest * part))
        return min(most, everything)
    density = 0.0
    for seconds, memory in ((inputs + weights, held), (weights, left)):
        if (memory[seconds > 0] == 0).any():
            return everything  # what holds nothing is always there
        density = max(density, float((seconds[seconds > 0] / memory[seconds > 0]).max(initial=0.0)))
    return min(everything, room * density)
