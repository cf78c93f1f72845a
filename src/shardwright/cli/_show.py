"""What the commands share: tables, units, a progress line, JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from math import isfinite
from typing import Any

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.units import bytes_text, seconds_text

__all__ = [
    "bytes_text",
    "console",
    "finite",
    "mesh_text",
    "messages",
    "print_json",
    "progress",
    "seconds_text",
    "table",
    "tell",
]

RULED = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
"""A rule below the head and nothing else, which leaves 80 columns to what is said."""

console = Console() if Console().is_terminal or "COLUMNS" in os.environ else Console(width=140)
messages = Console(stderr=True)


def mesh_text(axes: Any) -> str:
    return " × ".join(f"{name} {size}" for name, size in axes)


PROSE = 80
"""Characters of a line of sentences, where they go into a file or to another command."""


def tell(text: str) -> None:
    """Print a remark as a sentence: as wide as the terminal, or as a page of text."""
    told = text[:1].upper() + text[1:]
    told += "" if told.endswith((".", ":", "?", "!")) else "."
    width = console.width if console.is_terminal else min(PROSE, console.width)
    console.print(told, width=width, highlight=False, markup=False)


SHORT = 10
"""Cells of so many letters are not broken at their spaces: figures with their units."""


def table(
    title: str, columns: list[str], rows: list[list[str]], caption: str = "", spare: tuple[str, ...] = ()
) -> None:
    """Print one table: first column left, the others right; no name and no figure is cut. Where the terminal is too narrow,
    columns named in ``spare`` are left out, in that order, and the caption says which."""
    cells = [list(column) for column in zip(columns, *rows, strict=True)]
    least = [max(map(_least_width, column)) for column in cells]
    shown, missing = list(range(len(columns))), []
    for name in spare:
        if sum(least[n] for n in shown) <= _room(shown):
            break
        shown.remove(columns.index(name))
        missing.append(name)
    if missing:
        caption = f"{caption} Left out, the terminal being narrow: {', '.join(missing)}.".strip()
    widths = {n: max(Text.from_markup(cell).cell_len for cell in cells[n]) for n in shown}
    while sum(widths.values()) > _room(shown):
        widest = max(shown, key=lambda n: (widths[n] > least[n], widths[n]))
        if widths[widest] == least[widest]:
            break  # lines are folded by the terminal
        widths[widest] -= 1
    grid = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left", box=RULED)
    grid.show_edge, grid.pad_edge, grid.padding = False, False, (0, 1, 0, 0)
    for number in shown:
        side: Any = "left" if number == 0 else "right"
        grid.add_column(columns[number], justify=side, width=widths[number], overflow="fold")
    for row in rows:
        grid.add_row(*[row[number] for number in shown])
    console.print(grid)


def _room(shown: Sequence[int]) -> int:
    """What the terminal has for the cells of a row, two spaces between them."""
    return console.width - 2 * (len(shown) - 1)


def _least_width(cell: str) -> int:
    """How narrow a column may be for this cell."""
    text = Text.from_markup(cell)
    return text.cell_len if text.cell_len <= SHORT else max(cell_len(word) for word in text.plain.split())


def finite(number: float) -> float | None:
    """A number as JSON knows it: nothing in the place of infinity, the gap to what is not bounded."""
    return number if isfinite(number) else None


def print_json(data: Any) -> None:
    """JSON on standard output, nothing else there."""
    print(json.dumps(data, indent=1, default=str))


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on standard error for long work.

    What others print meanwhile (a model that says hello) goes there too: standard output is for the answer.
    """
    with redirect_stdout(sys.stderr):
        if quiet or not messages.is_terminal:
            yield lambda text: None
            return
        with messages.status("starting") as status:
            yield lambda text: status.update(text)
