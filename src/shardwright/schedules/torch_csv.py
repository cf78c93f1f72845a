"""Schedules as the CSV files of ``torch.distributed.pipelining``: one row per rank, one cell per action.

The computing cells (``0F0``, ``1I2``, ``1W2``, ``2B1``) are written, which is what torch loads as ``compute_only``.
Read is every file torch writes: its cells for sends, receives, gathering and reducing say what the runtime adds
around the computation and are left out, empty cells (torch's picture of waiting) too, and an overlapped pair
``(0F4;3B2)OVERLAP_F_B`` is read as its two actions in that order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwright.errors import ProblemError
from shardwright.files import read_text, write
from shardwright.schedules.schedule import Action, Schedule

_OTHER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_OVERLAP = re.compile(r"\(([^)]*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the file; ``_PipelineScheduleRuntime._load_csv(path, format="compute_only")`` reads it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.orders)
    write(path, text.getvalue())


def read_csv(path: str | Path) -> Schedule:
    """Read a file written by this module or by torch, with or without communication."""
    try:
        rows = list(csv.reader(read_text(path, ProblemError).splitlines()))
    except csv.Error as problem:
        raise ProblemError(f"{str(path)!r} is not CSV: {problem}.", "Write it again.") from None
    return Schedule(tuple(tuple(_actions(row)) for row in rows))


def _actions(cells: Iterable[str]) -> Iterator[Action]:
    for cell in map(str.strip, cells):
        if overlap := _OVERLAP.fullmatch(cell):
            yield from _actions(overlap[1].split(";"))
        elif cell and not _OTHER.fullmatch(cell):
            yield Action.parse(cell)
