"""A timed schedule as a trace for ui.perfetto.dev: one process per device, its passes as spans, what it holds as a counter.

Seconds become microseconds (Trace Event Format, Google 2016); gaps between the spans are the bubbles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.files import write
from shardwright.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwright.schedules.timing import Timing

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
