"""What the commands share: tables, units, a progress line, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from math import isfinite
from typing import Any

from rich.console import Console
from rich.table import Table

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
]

console = Console() if Console().is_terminal else Console(width=140)
messages = Console(stderr=True)


def mesh_text(axes: Any) -> str:
    return " × ".join(f"{name} {size}" for name, size in axes)


def table(title: str, columns: list[str], rows: list[list[str]], caption: str = "") -> None:
    """Print one table: first column left, the others right."""
    grid = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


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
