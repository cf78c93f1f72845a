"""A timeline as a trace for ``chrome://tracing`` and ui.perfetto.dev.

One row per stream (compute, every mesh axis, the host), complete events with the module path and the bytes in
their arguments, and a counter of the bytes alive. (Trace Event Format, Google 2016.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.files import write
from shardwright.program import COMPUTE
from shardwright.simulator.timeline import Timeline

HOST = "host"


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a document; times are in microseconds.

    >>> json.dump(trace(timeline), open("trace.json", "w"))
    """
    streams = [COMPUTE, *(s for s in timeline.busy if s != COMPUTE)]
    hosted = any(event.host for event in timeline.events)
    rows = {name: number for number, name in enumerate([HOST, *streams] if hosted else streams)}
    entries: list[dict[str, Any]] = [_named("process_name", 0, "one rank")]
    for name, number in rows.items():
        entries.append(_named("thread_name", number, name if name in (HOST, COMPUTE) else f"network: axis {name}"))
        entries.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": number, "args": {"sort_index": number}}
        )
    for number, event in enumerate(timeline.events):
        label = event.collective or event.name
        details = {"phase": event.phase, "kind": event.kind, "tensor" if event.collective else "operator": event.name}
        if event.module:
            details["module"] = event.module
        if event.bytes:
            details["bytes"] = str(event.bytes)
        start = timeline.schedule.starts[number]
        if event.seconds > 0:
            entries.append(_span(label, event.phase, rows[event.stream], start, event.seconds, details))
        if event.host > 0:
            issue = timeline.schedule.issued[number] - event.host
            entries.append(_span(f"issue {label}", "host", rows[HOST], issue, event.host, {}))
    for second, size in timeline.memory_curve:
        entries.append({"ph": "C", "name": "memory", "pid": 0, "ts": second * 1e6, "args": {"bytes alive": size}})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace to a file."""
    write(path, json.dumps(trace(timeline)))


def _span(name: str, category: str, row: int, start: float, seconds: float, details: dict[str, str]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": row,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": details,
    }


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}
