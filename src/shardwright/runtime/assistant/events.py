"""What the assistant saw and did: a line for people and a JSON object for programs, one of each per decision.

A file of events holds one object per line: ``observed`` (speeds, rows and the step, at most one a second), ``moved``,
``could move`` (when it only watches), ``refused`` (some rank has no program for such rows) and ``reached`` (the step some
steps after a move, beside what was expected); ``changed`` and ``could change`` speak of another plan, for links or ranks. A
move that leaves nothing to a rank leaves the rank out, and one that gives it something again takes it back.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from shardwright.units import seconds_text

log = logging.getLogger("shardwright.assistant")
APART = 1.0
"""Seconds between two observations in a file."""


@dataclass(frozen=True)
class Event:
    """One decision, or one observation. ``rank`` counts along the mesh axis whose shares move, or the stages of a pipeline;
    seconds are of a step.

    >>> print(Event("moved", 420, (16, 16), (25, 7), (1.0, 1.8), 1, 412, 1.31, 1.02, 0.97))
    rank 1 is 1.8 × slower since step 412: moved 9 of 32 rows; step 1.31 s → 1.02 s, possible 970 ms
    >>> print(Event("moved", 520, (25, 7), (16, 16), (1.0, 1.01), 1, 513, 1.1, 0.73, 0.73))
    rank 1 is as fast as the others since step 513: moved 9 of 32 rows; step 1.1 s → 730 ms, possible 730 ms
    >>> print(Event("moved", 620, (16, 8, 8), (17, 15, 0), (1.0, 1.0, 40.0), 2, 612, 3.6, 0.8, 0.77))
    rank 2 is 40 × slower since step 612: went on without it; step 3.6 s → 800 ms, possible 770 ms
    """

    event: str
    step: int
    rows_before: tuple[int, ...]
    rows: tuple[int, ...]
    slowness: tuple[float, ...]
    rank: int = 0
    since: int = 0
    step_seconds: float = 0.0
    expected_seconds: float = 0.0
    possible_seconds: float = 0.0
    move_seconds: float = 0.0
    what: str = "rows"
    """What is dealt out: rows of the batch, parts of cut loops with their parameters, blocks of a pipeline's stages; or
    what another plan is for: links or ranks."""

    @property
    def moved(self) -> int:
        """How many rows change hands."""
        pairs = zip(self.rows_before, self.rows, strict=True)
        return sum(max(after - before, 0) for before, after in pairs)

    def __str__(self) -> str:
        if self.event == "reached":
            return (
                f"with {self.what} {', '.join(map(str, self.rows))} a step takes {seconds_text(self.step_seconds)}: "
                f"expected {seconds_text(self.expected_seconds)}, possible {seconds_text(self.possible_seconds)}"
            )
        how = _how(self.slowness[self.rank])
        if self.what.startswith("plan"):
            done = {"changed": "went over to", "could change": "could go over to", "refused": "could not go over to"}
            who = f"rank {self.rank} is {how}" if self.what.endswith("ranks") else f"links are {how} than planned"
            since = f"{who} since step {self.since}"
            times = f"step {seconds_text(self.step_seconds)} → {seconds_text(self.expected_seconds)}"
            return f"{since}: {done[self.event]} another plan; {times}"
        rows = f"move {self.moved} of {sum(self.rows)} {self.what}"
        moved = rows.replace("move", "moved")
        if 0 in self.rows and 0 not in self.rows_before:
            rows, moved = "go on without it", "went on without it"
        elif 0 in self.rows_before and 0 not in self.rows:
            rows, moved = "take it back", "took it back"
        what = {"moved": moved, "could move": f"could {rows}", "refused": f"could not {rows}"}
        times = f"step {seconds_text(self.step_seconds)} → {seconds_text(self.expected_seconds)}"
        possible = f"possible {seconds_text(self.possible_seconds)}"
        return f"rank {self.rank} is {how} since step {self.since}: {what[self.event]}; {times}, {possible}"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "moved": self.moved}


def _how(slowness: float) -> str:
    if slowness > 1.05:
        return f"{slowness:.2g} × slower"
    return f"{1 / slowness:.2g} × faster" if slowness < 0.95 else "as fast as the others"


class Diary:
    """Tells of events: only one rank has one. ``path`` is the file they are added to, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.events: list[Event] = []
        self._path, self._last = path, -APART

    def tell(self, event: Event) -> None:
        """A decision, or what came of it."""
        log.warning("shardwright: %s", event)
        self.events.append(event)
        self._write(event)

    @property
    def due(self) -> bool:
        """Whether an observation would be written now."""
        return self._path is not None and monotonic() - self._last >= APART

    def observe(self, event: Event) -> None:
        """An observation: into the file alone, and not too often."""
        if self.due:
            self._last = monotonic()
            self._write(event)

    def _write(self, event: Event) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event.as_dict()) + "\n")
