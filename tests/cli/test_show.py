"""Tables of the terminal: names and figures stay whole, columns that may go are named when they do."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardwright.cli import _show

COLUMNS = ["strategy", "mesh", "step", "memory", "fits"]
ROWS = [
    ["found", "node 2 × gpu 8", "1.07 ms", "109 MB", "yes"],
    ["one-weird-trick", "outer 2 × inner 4", "16.4 ms", "1.05 GB", "no: every device needs 5 GB more than there are"],
]


def printed(width: int, rows: list[list[str]], spare: tuple[str, ...] = ("mesh", "memory")) -> list[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_show, "console", Console(file=io.StringIO(), width=width))
        _show.table("a title", COLUMNS, rows, "A caption.", spare)
        return _show.console.file.getvalue().splitlines()  # type: ignore[attr-defined] # the StringIO above


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_line_is_wider_than_the_terminal_and_no_name_or_figure_is_cut(width: int) -> None:
    lines = printed(width, ROWS)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    shown = ["strategy", "found", "one-weird-trick", "1.07 ms", "16.4 ms", "yes"]
    assert all(word in text for word in shown)
    left = [name for name in ("mesh", "memory") if name not in lines[1]]
    assert ("Left out" in text) == bool(left) and all(name in text for name in left)


def test_a_wide_terminal_shows_all_columns_in_one_line_a_row() -> None:
    lines = printed(140, ROWS)
    assert [line.split("  ")[0] for line in lines[3:5]] == ["found", "one-weird-trick"]
    assert ROWS[1][1] in lines[4] and ROWS[1][4] in lines[4] and "Left out" not in "".join(lines)


@settings(max_examples=60, deadline=None)
@given(st.integers(70, 160), st.lists(st.lists(st.text("ab 19×", max_size=30), min_size=5, max_size=5), max_size=4))
def test_every_word_is_shown_or_its_column_is_named(width: int, rows: list[list[str]]) -> None:
    lines = printed(width, rows)
    text = "\n".join(lines)
    for column, cells in zip(COLUMNS, zip(*rows, strict=True) if rows else [()] * 5, strict=True):
        if column not in lines[1]:
            assert column in text.partition("Left out")[2]
        elif "mesh" in lines[1]:  # all columns stand: no word may be broken
            assert all(word in text for cell in cells for word in cell.split())
