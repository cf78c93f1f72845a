"""Whose every second of a rank's step is: what computes, what is sent in the open, what nothing is done for.

A second in which the device computes is the computing event's, and whatever is sent meanwhile costs nothing: it is hidden.
In a second without computation, all that is sent shares it equally: exposed. What is left is idle: the host has not issued
the next event yet, or that waits for what another rank sends. So computing, exposed and idle seconds add up to the step,
whatever the plan, and two plans that run an event alike are charged alike for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwright.reports.steps import COMPUTE, Event
from shardwright.simulator import RankTimeline


@dataclass
class Cost:
    """Seconds of a step: computing, sending in the open, sending hidden under computation, and idle before it."""

    computing: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    idle: float = 0.0

    @property
    def seconds(self) -> float:
        """What it adds to the step."""
        return self.computing + self.exposed + self.idle

    def add(self, other: Cost) -> None:
        self.computing += other.computing
        self.exposed += other.exposed
        self.hidden += other.hidden
        self.idle += other.idle


@dataclass(frozen=True)
class Idle:
    """A gap in which a rank neither computes nor sends: ``place`` of the event it ends with (-1: none follows), and whether
    it is the host that this waited for."""

    place: int
    seconds: float
    host: bool


def costs(rank: RankTimeline) -> tuple[list[Cost], list[Idle]]:
    """What every event of a rank costs, and the gaps; computing and exposed seconds and the gaps add up to the step."""
    events, starts, ends, issued = rank.events, rank.starts, rank.ends, rank.issued
    found, gaps = [Cost() for _ in events], list[Idle]()
    lasting = [place for place in range(len(events)) if ends[place] > starts[place]]
    by_start = sorted(lasting, key=lambda place: starts[place])
    first = [starts[place] for place in by_start]
    border = sorted({0.0, rank.seconds, *(starts[p] for p in lasting), *(ends[p] for p in lasting)})
    under_way, arriving = list[int](), 0
    for begin, end in pairwise(border):
        under_way = [place for place in under_way if ends[place] > begin]
        while arriving < len(by_start) and first[arriving] <= begin:
            under_way.append(by_start[arriving])
            arriving += 1
        computing = [place for place in under_way if computes(events[place])]
        sending = [place for place in under_way if not computes(events[place])]
        for place in computing:
            found[place].computing += (end - begin) / len(computing)
        for place in sending:
            if computing:
                found[place].hidden += end - begin
            else:
                found[place].exposed += (end - begin) / len(sending)
        if not under_way:
            at = bisect_left(first, end)
            place = by_start[at] if at < len(by_start) else -1
            gaps.append(Idle(place, end - begin, place >= 0 and issued[place] >= starts[place]))
    return found, gaps


def computes(event: Event) -> bool:
    return event.stream == COMPUTE


def total(every: Sequence[Cost]) -> Cost:
    """All of them as one.

    >>> total([Cost(computing=1.0), Cost(exposed=0.5, hidden=2.0)]).seconds
    1.5
    """
    together = Cost()
    for one in every:
        together.add(one)
    return together
