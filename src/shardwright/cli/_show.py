"""What the commands share: tables, units, a progress line, JSON on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console() if Console().is_terminal else Console(width=140)
messages = Console(stderr=True)


def seconds_text(seconds: float) -> str:
    """Three digits in the unit that fits.

    >>> seconds_text(0.01234)
    '12.3 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.3g} ns"


def bytes_text(count: float) -> str:
    """Three digits in the decimal unit that fits.

    >>> bytes_text(2.5e9)
    '2.5 GB'
    """
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


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


def print_json(data: Any) -> None:
    """JSON on standard output, nothing else there."""
    print(json.dumps(data, indent=1, default=str))


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on standard error for long work."""
    if quiet or not messages.is_terminal:
        yield lambda text: None
        return
    with messages.status("starting") as status:
        yield lambda text: status.update(text)
