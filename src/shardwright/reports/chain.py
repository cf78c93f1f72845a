"""The chain that decides a step: which event kept the step waiting at every instant, so that seconds add up by cause.

From the event that ends last one goes back: an event started when its last condition was met, which was the end of an
event it waits for, the end of the one before it on its stream, or the host's issuing. Every instant of the step so belongs
to exactly one event (running) or to the host (issuing), and the parts add up to the step (the critical path of a schedule,
Kelley and Walker 1959).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.reports.steps import COMPUTE, Event, RankStep


@dataclass(frozen=True)
class Link:
    """So many of the step's seconds are spent with this event running (or, where ``issuing``, being issued by the host)."""

    event: Event
    seconds: float
    issuing: bool = False


def deciding_chain(step: RankStep) -> list[Link]:
    """The links of the chain, first to last; their seconds add up to the step."""
    events, schedule = step.events, step.schedule
    if not events:
        return []
    last = max(range(len(events)), key=lambda i: schedule.ends[i])
    links: list[Link] = []
    if schedule.issued[-1] > schedule.ends[last]:  # the host is what is still busy at the end
        return _issued(events, len(events) - 1)
    before = _before_on_stream(events)
    at: int | None = last
    while at is not None:
        start = schedule.starts[at]
        links.append(Link(events[at], schedule.ends[at] - start))
        reasons = [i for i in events[at].after if schedule.ends[i] == start]
        previous = before[at]
        if start == 0.0:
            break
        if reasons:
            at = reasons[0]
        elif previous is not None and schedule.ends[previous] == start:
            at = previous
        else:
            return [*_issued(events, at), *reversed(links)]
    return links[::-1]


def _issued(events: Sequence[Event], upto: int) -> list[Link]:
    return [Link(event, event.host, issuing=True) for event in events[: upto + 1] if event.host]


def _before_on_stream(events: Sequence[Event]) -> list[int | None]:
    last: dict[str, int] = {}
    found: list[int | None] = []
    for place, event in enumerate(events):
        found.append(last.get(event.stream))
        last[event.stream] = place
    return found


def computes(event: Event) -> bool:
    return event.stream == COMPUTE
