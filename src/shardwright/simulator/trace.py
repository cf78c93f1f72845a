"""A simulated step as a trace for ``chrome://tracing`` and ui.perfetto.dev: a process per group of ranks.

Each process stands for the ranks of one mesh, which do the same at the same time. Its rows are the passes with what follows
them, the bubbles between them, what it sends to other stages, and the streams of a rank with the host, event by event with
the module path and the bytes in their arguments; a counter shows the bytes alive on one of its ranks. Seconds become
microseconds (Trace Event Format, Google 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.files import write
from shardwright.program import COMPUTE
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.schedules.picture import NAMES
from shardwright.simulator.timeline import RankTimeline, Timeline

MOST_EVENTS = 200_000
"""Of larger steps the trace has the passes alone: a browser takes no more."""

PASSES, BUBBLES, SENT, HOST = "passes", "bubbles", "sent to other stages", "host"
ALL_NAMES = {**NAMES, REDUCE: "reduction of gradients", UPDATE: "update"}

Entry = dict[str, Any]


def trace(timeline: Timeline) -> Entry:
    """The trace as a document.

    >>> json.dump(trace(timeline), open("trace.json", "w"))                                      # doctest: +SKIP
    """
    whole = sum(len(one.starts) for row in timeline.played.passes for one in row) <= MOST_EVENTS
    entries: list[Entry] = []
    for group, rank in enumerate(timeline.ranks):
        rows = [PASSES, *([BUBBLES, SENT] if timeline.groups > 1 else [])]
        rows += [HOST, *rank.load] if whole else []
        number = {name: place for place, name in enumerate(rows)}
        entries += _names(timeline, group, number)
        for name, category, row, start, seconds, about in (
            *_passes(timeline, group),
            *(_events(rank) if whole else ()),
        ):
            times = {"ts": start * 1e6, "dur": seconds * 1e6}
            place = {"pid": group, "tid": number[row]}
            entries.append({"ph": "X", "name": name, "cat": category, **place, **times, "args": about})
        for second, size in timeline.memory_curve(group) if whole else ():
            counter = {"ph": "C", "name": "memory", "pid": group, "ts": second * 1e6, "args": {"bytes alive": size}}
            entries.append(counter)
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace to a file."""
    write(path, json.dumps(trace(timeline)))


def _names(timeline: Timeline, group: int, rows: dict[str, int]) -> Iterator[Entry]:
    stages = [stage for stage, where in enumerate(timeline.pipeline.schedule.device_of) if where == group]
    ranks = timeline.pipeline.stages[stages[0]].ranks
    name = f"ranks {ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    several = f", stages {', '.join(map(str, stages))}" if len(timeline.pipeline.stages) > 1 else ""
    yield _named("process_name", group, 0, {"name": name + several})
    for row, place in rows.items():
        shown = row if row in (PASSES, BUBBLES, SENT, HOST, COMPUTE) else f"network: axis {row}"
        yield _named("thread_name", group, place, {"name": shown})
        yield _named("thread_sort_index", group, place, {"sort_index": place})


def _named(kind: str, group: int, row: int, args: Entry) -> Entry:
    return {"ph": "M", "name": kind, "pid": group, "tid": row, "args": args}


Span = tuple[str, str, str, float, float, Entry]
"""Name, category, row, start, seconds, arguments."""


def _passes(timeline: Timeline, group: int) -> Iterator[Span]:
    """Passes, what idles between them, and what is sent."""
    now = 0.0
    for one in timeline.played.passes[group]:
        action, start, end, kind = one.action, one.start, one.end, ALL_NAMES[one.action.kind]
        about = {"stage": action.stage, "pass": kind} | ({} if one.once else {"micro-batch": action.microbatch})
        if timeline.groups > 1 and start > now:
            yield "bubble", "bubble", BUBBLES, now, start - now, {}
        begun = max(start, now)  # its first events may overlap with communication of the pass before
        yield kind if one.once else str(action), kind, PASSES, begun, max(end - begun, 0.0), about
        now = max(now, end)
    if timeline.groups > 1 and timeline.seconds > now:
        yield "bubble", "bubble", BUBBLES, now, timeline.seconds - now, {}
    for trip in timeline.played.trips:
        if trip.source == group:
            about = {"micro-batch": trip.microbatch, "bytes": trip.bytes, "to": trip.target}
            yield trip.what, "parcel", SENT, trip.start, trip.end - trip.start, about


def _events(rank: RankTimeline) -> Iterator[Span]:
    """Every event on its stream, and what the host does to issue it."""
    for event, start, issued in zip(rank.events, rank.starts, rank.issued, strict=True):
        label = event.collective or event.name
        about = {"phase": event.phase, "kind": event.kind, "tensor" if event.collective else "operator": event.name}
        about |= {"module": event.module} if event.module else {}
        about |= {"bytes": str(event.bytes)} if event.bytes else {}
        if event.seconds > 0:
            yield label, event.phase, event.stream, start, event.seconds, about
        if event.host > 0:
            yield f"issue {label}", "host", HOST, issued - event.host, event.host, {}
