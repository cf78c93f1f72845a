"""``docs/accuracy.md`` says what the stored rows say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import accuracy_page


def test_the_page_is_rendered_from_the_stored_rows() -> None:
    assert accuracy_page.PAGE.read_text() == accuracy_page.page(), "python bench/accuracy_page.py"


def test_rows_without_a_prediction_are_counted_and_the_worst_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## Rows\n\n| a | b |\n|---|--:|\n| x | -3.0 % |\n| y | +1.0 % |\n| z | did not run |\n")
    errors = accuracy_page._own("## Rows", (0,), 1, "what", page)
    assert errors.cells() == "| what | 2 of 3 | 2.0 % | 2.0 % | -3.0 % | x |"


@pytest.mark.parametrize("source", accuracy_page.SOURCES)
def test_every_judged_run_is_in_the_table(source: str) -> None:
    judged = accuracy_page._figures("engine's", source)
    errors = accuracy_page._world("engine's", source)
    assert (len(errors.rows), errors.without) == (judged["runs"], judged["left out"])
