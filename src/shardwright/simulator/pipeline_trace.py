"""A simulated step of a pipeline as a trace for ui.perfetto.dev: a process per device, with its passes, bubbles and parcels.

Each process stands for the ranks of one mesh, which do the same at the same time. Its rows are the passes with what follows
them, the bubbles between them, and what it sends to other stages; a counter shows the bytes on one of its ranks. Seconds
become microseconds (Trace Event Format, Google 2016).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.files import write
from shardwright.schedules.trace import NAMES
from shardwright.simulator.pipelines import PipelineTimeline

PASSES, BUBBLES, SENT = range(3)
ROWS = {PASSES: "passes", BUBBLES: "bubbles", SENT: "sent to other stages"}


def trace(timeline: PipelineTimeline) -> dict[str, Any]:
    """The trace as a document.

    Example
    -------
    >>> json.dump(trace(timeline), open("trace.json", "w"))                                      # doctest: +SKIP
    """
    entries: list[dict[str, Any]] = []
    for device, order in enumerate(timeline.timing.schedule.orders):
        stages = timeline.timing.pipeline.stages_of(device)
        ranks = timeline.pipeline.stages[stages[0]].ranks
        name = f"ranks {ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        entries.append(_named("process_name", device, 0, f"{name}, stages {', '.join(map(str, stages))}"))
        entries += [_named("thread_name", device, row, text) for row, text in ROWS.items()]
        played, closing = timeline.played, timeline.played.closing[device]
        busy = []
        for action, start, end in zip(order, played.starts[device], played.ends[device], strict=True):
            about = {"stage": action.stage, "pass": NAMES[action.kind], "micro-batch": action.microbatch}
            entries.append(_span(str(action), NAMES[action.kind], device, PASSES, start, end, about))
            busy.append((start, end))
        entries.append(_span("gradients home, update", "closing", device, PASSES, closing.start, closing.end, {}))
        now = 0.0
        for start, end in (*busy, (closing.start, closing.end), (timeline.seconds, timeline.seconds)):
            if start > now:
                entries.append(_span("bubble", "bubble", device, BUBBLES, now, start, {}))
            now = max(now, end)
        for second, size in timeline.memory_curve(device):
            counter = {"ph": "C", "name": "memory", "pid": device, "ts": second * 1e6, "args": {"bytes": size}}
            entries.append(counter)
    for trip in timeline.played.trips:
        about = {"micro-batch": trip.microbatch, "bytes": trip.bytes, "to": trip.target}
        entries.append(_span(trip.what, "parcel", trip.source, SENT, trip.start, trip.end, about))
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_trace(timeline: PipelineTimeline, path: str | Path) -> None:
    """Write the trace to a file."""
    write(path, json.dumps(trace(timeline)))


def _span(
    name: str, category: str, device: int, row: int, start: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": device, "tid": row, **times, "args": about}


def _named(kind: str, device: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": device, "tid": row, "args": {"name": name}}
