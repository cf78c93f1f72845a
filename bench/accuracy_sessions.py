"""Several sessions of one measurement: the same cases on other days or machines, whose hosts other people share.

    python bench/accuracy_sessions.py bench/measured/h200_steps.json more.json     # adds the sessions of the second file

A row's ``sessions`` are lists of seconds per step. Of a session the fastest counts, since other work on the host only adds;
of several sessions the median, as of several calibrations. Rows measured with another runtime are not put together.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def seconds(sessions: Sequence[Sequence[float]]) -> float:
    """What counts as measured.

    >>> seconds([[3.0, 2.0], [5.0, 4.0], [9.0]])
    4.0
    """
    return statistics.median(min(walls) for walls in sessions)


def spread(sessions: Sequence[Sequence[float]]) -> str:
    """The fastest and the slowest session, in milliseconds.

    >>> spread([[0.003, 0.002], [0.005]])
    '2.0 to 5.0 (2)'
    """
    fastest = sorted(1e3 * min(walls) for walls in sessions)
    return f"{fastest[0]:.1f} to {fastest[-1]:.1f} ({len(fastest)})"


def _which(row: Row) -> str:
    keys = ("case", "runtime") if "case" in row else ("reference", "batch", "dtype", "seq")
    return json.dumps([row.get(key) for key in keys])


def merged(kept: list[Row], more: list[Row]) -> list[Row]:
    """The kept rows with the further sessions of the others; rows of neither kind are not lost."""
    new = {_which(row): row for row in more if "error" not in row}
    rows = []
    for row in kept:
        other = new.pop(_which(row), None)
        if other is not None:
            together = [*row.get("sessions", []), *other["sessions"]]
            row = {**row, **other, "sessions": together, "seconds": seconds(together)}
            row.pop("error", None)
        rows.append(row)
    return [*rows, *new.values()]


def main() -> None:
    kept_path, *paths = map(Path, sys.argv[1:])
    kept = json.loads(kept_path.read_text())
    for path in paths:
        more = json.loads(path.read_text())
        if isinstance(kept, dict):
            kept["rows"] = merged(kept["rows"], more["rows"])
        else:
            kept = merged(kept, more)
    kept_path.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
