"""The discrete-event core: streams that work in order, events that wait for each other, a host that issues them.

An accelerator runs the events of one stream in the order in which the host issued them; an event starts when its stream is
free, what it waits for has ended, and the host has issued it. So one pass over the events in issue order, keeping the
time each stream becomes free, is an exact event simulation.

A processor that communicates for itself computes more slowly meanwhile: work on it advances at a reduced rate while a
collective is under way. Collectives issued later start after the computation issued before them, so those that can
slow an event down are known when it is placed, and one pass stays exact.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol


class TimedEvent(Protocol):
    """What the engine needs to know of an event."""

    @property
    def stream(self) -> Hashable: ...
    @property
    def seconds(self) -> float: ...
    @property
    def host(self) -> float: ...
    @property
    def after(self) -> Sequence[int]: ...


Row = tuple[Hashable, float, float, Sequence[int]]
"""An event as it is issued: its stream, its seconds, the host's, and the events it waits for."""


def rows_of(tasks: Sequence[TimedEvent]) -> list[Row]:
    """Events as they are issued."""
    return [(task.stream, task.seconds, task.host, task.after) for task in tasks]


@dataclass(frozen=True)
class EventTimes:
    """When every event starts and ends, and when the host had issued it."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    issued: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(*self.ends, self.issued[-1]) if self.ends else 0.0


@dataclass(frozen=True)
class Processor:
    """A stream of work that gives up a share of its speed for every event under way on the streams of ``shares``.

    ``seconds`` says for how long such an event takes all of it first.
    """

    stream: Hashable
    shares: Mapping[Hashable, float]
    seconds: Mapping[Hashable, float] = field(default_factory=dict)


class _Load:
    """What a processor has to do beside its own work: spans of time that take a share of it, ordered by their ends."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, float]] = []  # end, start, share

    def add(self, start: float, end: float, share: float) -> None:
        if end > start:
            insort(self._spans, (end, start, share))

    def finish(self, start: float, work: float) -> float:
        """When ``work`` seconds of undisturbed work begun at ``start`` are done."""
        now = start
        for place in range(bisect_right(self._spans, (start, inf, inf)), len(self._spans)):
            end = self._spans[place][0]
            if end <= now:
                continue
            later = self._spans[place:]
            borders = sorted({end, *(begin for _, begin, _ in later if now < begin < end)})
            for border in borders:
                speed = max(1.0 - sum(share for _, begin, share in later if begin <= now), LEAST_SPEED)
                if work <= speed * (border - now):
                    return now + work / speed
                work -= speed * (border - now)
                now = border
        return now + work


LEAST_SPEED = 0.1
"""However many collectives are under way, computation goes on."""


class Streams:
    """The streams of one rank and the host that issues their work: until when each is taken."""

    def __init__(self, processor: Processor | None = None) -> None:
        self.processor, self.load = processor, _Load()
        self.free: dict[Hashable, float] = {}
        self.clock = 0.0

    def place(self, stream: Hashable, seconds: float, host: float, ready: float) -> tuple[float, float]:
        """Issue an event whose needs are there at ``ready``: when it starts and ends."""
        self.clock += host
        start = max(self.free.get(stream, 0.0), self.clock, ready)
        end, processor = start + seconds, self.processor
        if processor is not None and seconds:
            if stream == processor.stream:
                end = self.load.finish(start, seconds)
            elif stream in processor.shares:
                self.disturb(start, end, processor.shares[stream], processor.seconds.get(stream, 0.0))
        self.free[stream] = end
        return start, end

    def disturb(self, start: float, end: float, share: float, seconds: float) -> None:
        """Something that the processor does beside its own work: all of it for some seconds, then a share."""
        issued_by = min(start + seconds, end)
        self.load.add(start, issued_by, 1.0)
        self.load.add(issued_by, end, share)

    def wait(self, stream: Hashable, until: float) -> None:
        """Nothing starts on a stream before then; a processor that does everything itself issues nothing before either."""
        self.free[stream] = max(self.free.get(stream, 0.0), until)
        if self.processor is not None:
            self.clock = max(self.clock, until)

    def run(self, rows: Sequence[Row], numbers: Iterable[int], ends: list[float]) -> tuple[list[float], list[float]]:
        """Issue some of the events in this order: when each starts, and when the host had issued it.

        ``ends`` has the end of every event that one of these waits for, and gets theirs.
        """
        starts: list[float] = []
        issued: list[float] = []
        place = self.place if self.processor is not None else None
        free, clock = self.free, self.clock
        for number in numbers:
            stream, seconds, host, after = rows[number]
            ready = 0.0
            for earlier in after:
                if ends[earlier] > ready:
                    ready = ends[earlier]
            if place is not None:
                start, ends[number] = place(stream, seconds, host, ready)
                clock = self.clock
            else:  # the same, written out: there may be millions of events
                clock += host
                start = free.get(stream, 0.0)
                start = clock if clock > start else start
                start = ready if ready > start else start
                free[stream] = ends[number] = start + seconds
            starts.append(start)
            issued.append(clock)
        self.clock = clock
        return starts, issued


def run(tasks: Sequence[TimedEvent], processor: Processor | None = None) -> EventTimes:
    """Run tasks given in issue order; each may wait for earlier ones only.

    >>> from collections import namedtuple
    >>> T = namedtuple("T", "stream seconds host after")
    >>> run([T("a", 2.0, 0.0, ()), T("b", 3.0, 0.0, ()), T("a", 1.0, 0.0, (1,))]).ends
    (2.0, 3.0, 4.0)
    >>> run([T("net", 2.0, 0.0, ()), T("cpu", 2.0, 0.0, ())], Processor("cpu", {"net": 0.5})).ends
    (2.0, 3.0)
    """
    rows, ends = rows_of(tasks), [0.0] * len(tasks)
    starts, issued = Streams(processor).run(rows, range(len(rows)), ends)
    return EventTimes(tuple(starts), tuple(ends), tuple(issued))


def critical_path(tasks: Sequence[TimedEvent]) -> float:
    """Seconds of the longest chain of events that wait for each other: no schedule is shorter."""
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[i] for i in task.after), default=0.0))
    return max(ends, default=0.0)


def lower_bound(tasks: Sequence[TimedEvent]) -> float:
    """The critical path, the load of the busiest stream, or the host's work, whichever is longest."""
    load: dict[Hashable, float] = {}
    for task in tasks:
        load[task.stream] = load.get(task.stream, 0.0) + task.seconds
    host = sum(task.host for task in tasks)
    return max([critical_path(tasks), host, *load.values()])
