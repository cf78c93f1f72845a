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
from shardwright.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule


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
            f"the devices wait for each other: {_stuck(schedule, pipeline)}.", "Swap one of these actions."
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


def _stuck(schedule: Schedule, pipeline: Pipeline) -> str:
    """One circle of devices that wait for each other, in words. Runs only where something is wrong."""
    heads = [0] * schedule.devices
    done: set[Action] = set()

    def missing(action: Action) -> Action | None:
        stage, kind, i = action
        needs: list[tuple[Action, ...]] = []
        if kind == FORWARD:
            needs = [(Action(edge.source, FORWARD, i),) for edge in pipeline.reads(stage)]
        elif kind == WEIGHT:
            needs = [(Action(stage, INPUT, i),)]
        else:
            readers = [edge.reader for edge in pipeline.read_by(stage)]
            needs = [(Action(reader, INPUT, i), Action(reader, BACKWARD, i)) for reader in readers]
            needs.append((Action(stage, FORWARD, i),))
        return next((either[0] for either in needs if not done.intersection(either)), None)

    moved = True
    while moved:
        moved = False
        for device, order in enumerate(schedule.orders):
            while heads[device] < len(order) and missing(order[heads[device]]) is None:
                done.add(order[heads[device]])
                heads[device] += 1
                moved = True
    waiting = [d for d, order in enumerate(schedule.orders) if heads[d] < len(order)]
    if not waiting:
        return "for seconds that are no numbers"
    device = waiting[0]
    seen: list[int] = []
    while device not in seen:
        seen.append(device)
        need = missing(schedule.orders[device][heads[device]])
        assert need is not None
        device = pipeline.device_of[need.stage]
    circle = seen[seen.index(device) :]
    return ", ".join(
        f"device {d} stands before {schedule.orders[d][heads[d]]}, which needs {missing(schedule.orders[d][heads[d]])}"
        for d in circle
    )
