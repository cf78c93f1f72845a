"""When everything in a schedule runs: an event simulation of all devices, with spans, bubbles and memory.

Times follow from the orders alone: an action starts when its device is free and what it needs has arrived. The *span*
of a device is the time from the start of its first action to the end of its last; the longest span is what a step
costs where the optimizer's steps are staggered along the devices as the pipeline drains (the measure of zero-bubble
pipeline parallelism, ICLR 2024); the *makespan* is the time from the start of everything to the end of everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.errors import Infeasible, ProblemError
from shardwright.schedules.pipeline import Floats, Pipeline
from shardwright.schedules.schedule import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Action, Schedule


@dataclass(frozen=True, eq=False)
class Timing:
    """A schedule in time: ``starts`` and ``ends`` per device, in the order of its actions; ``memory`` after each of
    them.
    """

    schedule: Schedule
    pipeline: Pipeline
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    memory: tuple[Floats, ...]

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Per device, the end of its last action minus the start of its first."""
        return tuple(float(e[-1] - s[0]) if len(s) else 0.0 for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def span(self) -> float:
        """The longest span of a device."""
        return max(self.spans)

    @cached_property
    def makespan(self) -> float:
        """The end of everything minus the start of everything."""
        return float(max(e[-1] for e in self.ends if len(e)) - min(s[0] for s in self.starts if len(s)))

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Per device, the share of its span in which it does not work."""
        work = (float((e - s).sum()) for s, e in zip(self.starts, self.ends, strict=True))
        return tuple(1.0 - done / span if span else 0.0 for done, span in zip(work, self.spans, strict=True))

    @property
    def bubble(self) -> float:
        """The share of the longest span in which its device does not work."""
        return self.bubbles[int(np.argmax(self.spans))]

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Per device, the most that is held at once."""
        return tuple(float(held.max()) if len(held) else 0.0 for held in self.memory)


def run(schedule: Schedule, pipeline: Pipeline) -> Timing:
    """Time ``schedule`` on ``pipeline``; refuses orders in which devices wait for each other for ever.

    >>> from shardwright.schedules import one_f_one_b, pipeline
    >>> run(one_f_one_b(4, 8), pipeline(range(4), 8)).makespan  # (micro-batches + stages - 1) times F + I + W
    33.0
    """
    from shardwright.schedules._flat import flatten, numbered, run_orders

    _fits(schedule, pipeline)
    flat = flatten(pipeline)
    numbers, begins = numbered(schedule)
    done, starts = np.empty_like(flat.seconds), np.empty(len(numbers))
    seconds, memory = flat.seconds.reshape(-1)[numbers], flat.memory.reshape(-1)[numbers]
    if run_orders(flat, numbers, begins, done, starts) < len(numbers):
        raise ProblemError(
            f"the devices wait for each other: {_stuck(schedule, pipeline, done)}.", "Swap one of these actions."
        )
    cut = begins[1:-1]
    return Timing(
        schedule,
        pipeline,
        tuple(np.split(starts, cut)),
        tuple(np.split(starts + seconds, cut)),
        tuple(np.cumsum(part) for part in np.split(memory, cut)),
    )


def check_memory(timing: Timing) -> None:
    """Refuse a schedule that holds more than a device's limit."""
    for device, (peak, limit) in enumerate(zip(timing.peak_memory, timing.pipeline.limits, strict=True)):
        if peak > limit * (1 + 1e-12):
            raise Infeasible(
                f"device {device} holds {peak:g} of at most {limit:g}.",
                "Allow more memory, or search for a schedule under this limit.",
            )


def _fits(schedule: Schedule, pipeline: Pipeline) -> None:
    if (schedule.device_of, schedule.microbatches) != (pipeline.device_of, pipeline.microbatches):
        raise ProblemError(
            f"a schedule of {schedule.microbatches} micro-batches with stages on devices {schedule.device_of} does not "
            f"belong to a pipeline of {pipeline.microbatches} with stages on devices {pipeline.device_of}.",
            "State both with the same stages, devices and micro-batches.",
        )


def _stuck(schedule: Schedule, pipeline: Pipeline, done: Floats) -> str:
    """One circle of devices that wait for each other, in words; ``done``: the ends of what could run."""

    def ran(action: Action) -> bool:
        return bool(np.isfinite(done[KINDS.index(action.kind), action.stage, action.microbatch]))

    def missing(action: Action) -> Action:
        stage, kind, i = action
        needs = [Action(edge.source, FORWARD, i) for edge in pipeline.reads(stage) if kind == FORWARD]
        needs += [Action(edge.reader, INPUT, i) for edge in pipeline.read_by(stage) if kind in (INPUT, BACKWARD)]
        needs += [Action(stage, INPUT if kind == WEIGHT else FORWARD, i)] if kind != FORWARD else []
        return next(need for need in needs if not ran(need))

    heads = {d: next((a for a in order if not ran(a)), None) for d, order in enumerate(schedule.orders)}
    waits = {device: missing(head) for device, head in heads.items() if head is not None}
    seen, device = list[int](), next(iter(waits))
    while device not in seen:
        seen.append(device)
        device = pipeline.device_of[waits[device].stage]
    circle = seen[seen.index(device) :]
    return ", ".join(f"device {d} stands before {heads[d]}, which needs {waits[d]}" for d in circle)
