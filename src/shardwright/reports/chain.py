"""The chain that decides a step: what kept a rank waiting at every instant, so that seconds add up by cause.

From the event that ends last one goes back: an event started when its last condition was met, which was the end of an
event it waits for, the end of the one before it on its stream, the host's issuing, or the arrival of what another group of
ranks sent. Every instant of the step so belongs to exactly one event (running), to the host (issuing), or to nothing
(waiting), and the parts add up to the step (the critical path of a schedule, Kelley and Walker 1959).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.reports.steps import COMPUTE, Event
from shardwright.simulator import RankTimeline

RUNNING, ISSUING, WAITING = "running", "issuing", "waiting"


@dataclass(frozen=True)
class ChainLink:
    """So many of the step's seconds are spent with an event running, being issued by the host, or waited for. ``place``:
    its place among the events of the rank; -1: what is waited for comes after all of them."""

    place: int
    seconds: float
    what: str = RUNNING


def deciding_chain(rank: RankTimeline) -> list[ChainLink]:
    """The links of the chain of one rank, first to last; their seconds add up to the step."""
    events, starts, ends, issued = rank.events, rank.starts, rank.ends, rank.issued
    by_end = sorted(range(len(events)), key=lambda place: ends[place])
    finished, previous = [ends[place] for place in by_end], _before_on_stream(events)
    links: list[ChainLink] = []

    def ended_by(second: float, upto: int) -> int:
        """The event before another that had ended last by a second, after a wait if need be; -1: none had."""
        found = bisect_right(finished, second) - 1
        while found >= 0 and by_end[found] >= upto:
            found -= 1
        at = by_end[found] if found >= 0 else -1
        idle = second - (ends[at] if at >= 0 else 0.0)
        if idle > 0:
            links.append(ChainLink(upto if upto < len(events) else -1, idle, WAITING))
        return at

    def issuing(place: int) -> int:
        """The host issues this event and those before it without a pause; the event that ended before it began."""
        while True:
            links.append(ChainLink(place, events[place].host, ISSUING))
            if place == 0 or issued[place - 1] + events[place].host != issued[place]:
                return ended_by(max(issued[place] - events[place].host, 0.0), place)
            place -= 1

    at = ended_by(rank.seconds, len(events)) if not events or rank.seconds > issued[-1] else issuing(len(events) - 1)
    while at >= 0:
        start = starts[at]
        links.append(ChainLink(at, ends[at] - start))
        if start == 0.0:
            break
        reasons = [*events[at].after, *([previous[at]] if previous[at] >= 0 else [])]
        decided = next((place for place in reasons if ends[place] == start), -1)
        if decided >= 0:
            at = decided
        else:
            at = issuing(at) if issued[at] == start else ended_by(start, at)
    return [link for link in reversed(links) if link.seconds]


def _before_on_stream(events: Sequence[Event]) -> list[int]:
    last: dict[str, int] = {}
    found: list[int] = []
    for place, event in enumerate(events):
        found.append(last.get(event.stream, -1))
        last[event.stream] = place
    return found


def computes(event: Event) -> bool:
    return event.stream == COMPUTE
