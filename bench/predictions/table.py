"""The stored table: reading it, telling what moved, storing it with a reason.

A case is a line of JSON; numbers are written so that reading them gives the same number. ``log.md`` says of every move when,
on top of which commit, why, how many cases moved and which of their numbers most.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
LOG = HERE / "log.md"
TABLES = {"plans": HERE / "plans.jsonl", "searches": HERE / "searches.jsonl"}
SAME = 1e-9
"""Relative difference up to which two numbers are the same."""
STORED_WITH = "2.13"
"""The release of PyTorch whose autograd the table was stored with."""
FROM_AUTOGRAD = ("bytes", "links")
"""What depends on how much autograd keeps, which may differ between releases of PyTorch: bytes that a rank needs, and the
links between instructions (their working memory is among them)."""

Row = Mapping[str, Any]


class Move(NamedTuple):
    """A quantity of a case that is not what was stored; ``None``: it is not there."""

    case: str
    quantity: str
    before: Any
    after: Any

    @property
    def share(self) -> float | None:
        """How far a number moved, relative to what it was."""
        if not (_number(self.before) and _number(self.after)):
            return None
        return (self.after - self.before) / abs(self.before) if self.before else float("inf")

    def cells(self) -> tuple[str, str, str, str, str]:
        percent = "" if self.share is None else f"{100 * self.share:+.4g} %"
        return self.case, self.quantity, _shown(self.before), _shown(self.after), percent


def read(kind: str) -> dict[str, Row]:
    """The stored rows by case."""
    path = TABLES[kind]
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line]
    return {row["case"]: row for row in rows}


def write(kind: str, rows: Iterable[Row]) -> None:
    """One line for every case, in the order of their names."""
    text = [json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(rows, key=lambda row: str(row["case"]))]
    TABLES[kind].write_text("".join(text))


def moves(before: Row | None, after: Row | None) -> list[Move]:
    """What differs between two rows of a case.

    >>> moves({"case": "a", "seconds": 1.0}, {"case": "a", "seconds": 1.1})[0].cells()
    ('a', 'seconds', '1.0', '1.1', '+10 %')
    """
    old, new = flat(before or {}), flat(after or {})
    case = str((after or before or {}).get("case", ""))
    return [
        Move(case, name, old.get(name), new.get(name))
        for name in dict.fromkeys([*old, *new])
        if name != "case" and not same(old.get(name), new.get(name))
    ]


def same(a: Any, b: Any) -> bool:
    """Numbers to :data:`SAME`, everything else exactly.

    >>> same(1.0, 1.0 + 1e-12), same(1, 2), same("a", None)
    (True, False, False)
    """
    if _number(a) and _number(b):
        return abs(a - b) <= SAME * max(abs(a), abs(b))
    return bool(a == b)


def flat(row: Row, before: str = "") -> dict[str, Any]:
    """A row as one level of quantities; a phase as its number of instructions and its two digests.

    >>> flat({"ranks": {"0-3": {"forward": "12 ab cd"}}})
    {'ranks 0-3 forward': 12, 'ranks 0-3 forward what': 'ab', 'ranks 0-3 forward links': 'cd'}
    """
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name} ")
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                found |= flat(entry, f"{name} {number} ")
        elif before.startswith("ranks") and isinstance(value, str):
            count, what, links = value.split(" ")
            found |= {name: int(count), f"{name} what": what, f"{name} links": links}
        else:
            found[name] = value
    return found


def comparable(found: Sequence[Move]) -> list[Move]:
    """The moves that have a meaning with this PyTorch: with another release than the table was stored with, those that do
    not depend on what autograd keeps."""
    if torch.__version__.startswith(f"{STORED_WITH}."):
        return list(found)
    return [move for move in found if move.quantity.split(" ")[-1] not in FROM_AUTOGRAD]


def lines(found: Sequence[Move]) -> list[str]:
    """The moves as a table; a new case is one line, and ranks that moved alike are."""
    shown: dict[tuple[str, ...], tuple[str, ...]] = {}
    whole = [case for case in {m.case for m in found} if all(m.before is None for m in found if m.case == case)]
    for move in found:
        words = move.quantity.split(" ")
        if move.case in whole:
            shown[move.case, ""] = (move.case, "new", "", "", "")
        elif words[0] == "ranks":
            key = move.case, " ".join(words[2:])
            rank = f"{shown[key][1]}, {words[1]}" if key in shown else f"{' '.join(words[2:])} of ranks {words[1]}"
            shown[key] = (move.case, rank, *shown.get(key, move.cells())[2:])
        else:
            shown[move.case, move.quantity] = move.cells()
    rows = [("case", "quantity", "before", "after", "moved"), *shown.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def log(reason: str, found: Sequence[Move]) -> None:
    """A line about a move that is stored."""
    cases = list(dict.fromkeys(move.case for move in found))
    numbers = [move for move in found if move.share is not None and not move.quantity.startswith("ranks")]
    largest = max(numbers, key=lambda move: abs(move.share or 0.0), default=None)
    most = "" if largest is None else f"{largest.case}: {largest.quantity} {largest.cells()[-1]}"
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    with LOG.open("a") as file:
        file.write(f"| {day} | {_parent()} | {reason.replace('|', '/')} | {_few(cases)} | {most} |\n")


def _few(cases: Sequence[str]) -> str:
    shown = ", ".join(cases[:6])
    return f"{len(cases)}: {shown}{', …' if len(cases) > 6 else ''}"


def _parent() -> str:
    """The commit that the move comes on top of."""
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
