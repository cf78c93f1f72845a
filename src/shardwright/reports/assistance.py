"""What the assistant saw and did over a run as one picture: the step, the speed of every rank, the rows each had.

Read from the events that :func:`shardwright.assist` wrote. Every column lasts until the next observation; thin lines mark
moves, with their sentences where one can point at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwright.errors import FileError
from shardwright.files import parse_json, read_text, write
from shardwright.records import read_record
from shardwright.reports.cuts import COLOURS
from shardwright.reports.drawing import Box, Drawing, Words
from shardwright.runtime.assistant.events import Event
from shardwright.units import seconds_text

WIDTH, LEFT, RIGHT, PANEL, GAP = 1120.0, 90.0, 24.0, 110.0, 44.0
RANKS = [COLOURS[kind] for kind in ("batch", "features", "spatial", "sum", "sequence", "open sum")]
SOFT, MARK = "#4d5765", "#15191f"


def draw_events(path: Path) -> Path:
    """Draw a file of events beside it; gives the picture's name."""
    target = path.with_suffix(".svg")
    write(target, picture(events_of(path)).svg())
    return target


def events_of(path: Path) -> list[Event]:
    """The events of a file.

    Raises
    ------
    FileError
        When the file is not one that the assistant wrote.
    """
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        data = parse_json(line, f"line {number} of {path}", FileError)
        if isinstance(data, dict):
            data.pop("moved", None)  # follows from the rows
        where = f"line {number} of {path} is no event of the assistant"
        found.append(
            read_record(Event, data, where=where, error=FileError, remedy="Give the file that --events named.")
        )
    return found


def picture(events: Sequence[Event]) -> Drawing:
    """The events as a drawing: ``.svg()`` or ``.pdf()``."""
    seen = [event for event in events if event.event in ("observed", "reached")]
    seen = [event for event in seen if len(event.rows) == len(event.slowness) == len(seen[0].rows)]  # of all ranks
    if not seen:
        return Drawing(WIDTH, 40, (Words(12, 24, "The assistant has seen no steps.", 14),))
    first, last = seen[0].step, max(events[-1].step, seen[0].step + 1)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    items: list[Box | Words] = [Words(12, 24, f"Steps {first} to {last}", 16, bold=True)]
    longest = max(event.step_seconds for event in seen)
    ranks = range(len(seen[0].rows))
    top = 56.0
    items.append(Words(LEFT, top - 8, f"a step: up to {seconds_text(longest)}", colour=SOFT))
    for event, left, width in _columns(seen, first, last, scale):
        height = PANEL * event.step_seconds / longest
        hint = f"step {event.step}: {seconds_text(event.step_seconds)}"
        items.append(Box(left, top + PANEL - height, width, height, "#9aa8c4", hint))
    top += PANEL + GAP
    items.append(Words(LEFT, top - 8, "speed of every rank, against the median one", colour=SOFT))
    strip = PANEL / len(ranks)
    fastest = max(1 / min(event.slowness) for event in seen)
    for rank in ranks:
        items.append(Words(LEFT - 10, top + strip * (rank + 0.7), f"rank {rank}", 11, anchor="end"))
        for event, left, width in _columns(seen, first, last, scale):
            speed = 1 / event.slowness[rank]
            height = 0.9 * strip * speed / fastest
            place = top + strip * (rank + 1) - height
            items.append(Box(left, place, width, height, _colour(rank), f"step {event.step}: {speed:.2f}"))
    top += PANEL + GAP
    items.append(Words(LEFT, top - 8, f"rows of the batch, {sum(seen[0].rows)} in all", colour=SOFT))
    for event, left, width in _columns(seen, first, last, scale):
        bottom = top
        for rank, rows in enumerate(event.rows):
            height = PANEL * rows / sum(event.rows)
            items.append(Box(left, bottom, width, height, _colour(rank), f"rank {rank}: {rows} rows"))
            bottom += height
    for event in events:
        if event.event in ("moved", "could move", "refused"):
            left = LEFT + max(event.step - first, 0) * scale
            items.append(Box(left, 56, 1.5, top + PANEL - 56, MARK, str(event)))
    return Drawing(WIDTH, top + PANEL + 16, tuple(items))


def _columns(seen: Sequence[Event], first: int, last: int, scale: float) -> list[tuple[Event, float, float]]:
    """Every observation, where its column begins and how wide it is."""
    ends = [*(event.step for event in seen[1:]), last]
    places = [(event, LEFT + (event.step - first) * scale, end) for event, end in zip(seen, ends, strict=True)]
    return [(event, left, max((end - event.step) * scale, 0.5)) for event, left, end in places]


def _colour(rank: int) -> str:
    return RANKS[rank % len(RANKS)]
