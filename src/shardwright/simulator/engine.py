"""The discrete-event core: streams that work in order, events that wait for each other, a host that issues them.

An accelerator runs the events of one stream in the order in which the host issued them; an event starts when its stream is
free, what it waits for has ended, and the host has issued it. So one pass over the events in issue order, keeping the
time each stream becomes free, is an exact event simulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Task(Protocol):
    """What the engine needs to know of an event."""

    @property
    def stream(self) -> Hashable: ...
    @property
    def seconds(self) -> float: ...
    @property
    def host(self) -> float: ...
    @property
    def after(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Schedule:
    """When every event starts and ends, and when the host had issued it."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    issued: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(*self.ends, self.issued[-1]) if self.ends else 0.0


def run(tasks: Sequence[Task]) -> Schedule:
    """Run tasks given in issue order; each may wait for earlier ones only.

    >>> from collections import namedtuple
    >>> T = namedtuple("T", "stream seconds host after")
    >>> run([T("a", 2.0, 0.0, ()), T("b", 3.0, 0.0, ()), T("a", 1.0, 0.0, (1,))]).ends
    (2.0, 3.0, 4.0)
    """
    free: dict[Hashable, float] = {}
    starts: list[float] = []
    ends: list[float] = []
    issued: list[float] = []
    clock = 0.0
    for task in tasks:
        clock += task.host
        start = max(free.get(task.stream, 0.0), clock)
        for earlier in task.after:
            if ends[earlier] > start:
                start = ends[earlier]
        end = start + task.seconds
        free[task.stream] = end
        starts.append(start)
        ends.append(end)
        issued.append(clock)
    return Schedule(tuple(starts), tuple(ends), tuple(issued))


def critical_path(tasks: Sequence[Task]) -> float:
    """Seconds of the longest chain of events that wait for each other: no schedule is shorter."""
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[i] for i in task.after), default=0.0))
    return max(ends, default=0.0)


def lower_bound(tasks: Sequence[Task]) -> float:
    """The critical path, the load of the busiest stream, or the host's work, whichever is longest."""
    load: dict[Hashable, float] = {}
    for task in tasks:
        load[task.stream] = load.get(task.stream, 0.0) + task.seconds
    host = sum(task.host for task in tasks)
    return max([critical_path(tasks), host, *load.values()])
