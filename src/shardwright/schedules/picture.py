"""A timed schedule as text: one line per device, time from left to right.

An action is its letter and its micro-batch, as wide as it is long (``F3--``); lower case marks the later stages of a
device, a dot waiting.
"""

from __future__ import annotations

from math import inf

import numpy as np

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
