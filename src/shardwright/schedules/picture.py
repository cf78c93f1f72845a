"""A timed schedule as text, and as a trace for ui.perfetto.dev.

As text it has one line per device, time from left to right. An action is its letter and its micro-batch, as wide as it is
long (``F3--``); lower case marks the later stages of a device, a dot waiting. The trace has one process per device, its
passes as spans, what it holds as a counter (Trace Event Format, Google 2016); gaps between the spans are the bubbles.
"""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.files import write
from shardwright.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwright.schedules.timing import Timing


def draw(timing: Timing, width: int = 120) -> list[str]:
    """The lines, at most ``width`` characters for the whole makespan.

    >>> from shardwright.schedules import one_f_one_b, pipeline, run
    >>> print("\\n".join(draw(run(one_f_one_b(2, 2), pipeline(range(2), 2)), 27)))
    F0-F1-......B0----...B1----
    ...F0-B0----F1-B1----......
    """
    begin = min(float(start[0]) for start in timing.starts if len(start))
    lengths = np.concatenate([e - s for s, e in zip(timing.starts, timing.ends, strict=True)])
    shortest = float(np.min(lengths[lengths > 0], initial=inf))
    # Hops alone make a makespan in which no pass takes any time.
    scale = min(width / timing.makespan, 3 / shortest if shortest < inf else inf) if timing.makespan else 1.0
    lines = []
    for order, starts, ends in zip(timing.schedule.orders, timing.starts, timing.ends, strict=True):
        cells = ["."] * round(timing.makespan * scale)
        first = min(action.stage for action in order) if order else 0
        for action, start, end in zip(order, starts, ends, strict=True):
            left, right = round((start - begin) * scale), round((end - begin) * scale)
            label = f"{action.kind}{action.microbatch}"
            label = label if action.stage == first else label.lower()
            text = label if len(label) <= right - left else label[0]
            cells[left:right] = text.ljust(right - left, "-")[: right - left]
        lines.append("".join(cells))
    return lines


NAMES = {FORWARD: "forward", INPUT: "gradient of inputs", WEIGHT: "gradient of weights", BACKWARD: "backward"}


def trace(timing: Timing) -> dict[str, Any]:
    """The trace as a document.

    >>> from shardwright.schedules import one_f_one_b, pipeline, run
    >>> spans = [e for e in trace(run(one_f_one_b(2, 1), pipeline(range(2), 1)))["traceEvents"] if e["ph"] == "X"]
    >>> [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans][:2]
    [(0, '0F0', 0.0, 1000000.0), (0, '0B0', 4000000.0, 2000000.0)]
    """
    entries: list[dict[str, Any]] = []
    for device, order in enumerate(timing.schedule.orders):
        stages = ", ".join(map(str, timing.pipeline.stages_of(device)))
        name = f"device {device}, stages {stages}"
        entries.append({"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": {"name": name}})
        rows = zip(order, timing.starts[device], timing.ends[device], timing.memory[device], strict=True)
        for action, start, end, held in rows:
            begin = float(start) * 1e6
            entries.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": NAMES[action.kind],
                    "pid": device,
                    "tid": 0,
                    "ts": begin,
                    "dur": float(end - start) * 1e6,
                    "args": {"stage": action.stage, "pass": NAMES[action.kind], "micro-batch": action.microbatch},
                }
            )
            entries.append({"ph": "C", "name": "held", "pid": device, "ts": begin, "args": {"memory": float(held)}})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_trace(timing: Timing, path: str | Path) -> None:
    """Write the trace to a file."""
    write(path, json.dumps(trace(timing)))
