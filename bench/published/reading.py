"""What all readers of published problems refuse, in one sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.errors import ProblemError
from shardwright.files import read_json
from shardwright.records import shown

REMEDY = "Write it as in the published problem."


def check(right: bool, complaint: str) -> None:
    """Refuse a problem with a complaint."""
    if not right:
        raise ProblemError(f"{complaint}.", REMEDY)


def between(value: float, low: float, high: float, what: str) -> None:
    """Refuse a number outside of what can be meant.

    >>> between(3, 1, 10, "devices")
    """
    check(low <= value <= high, f"{what} is {shown(value)}, not between {low:g} and {high:g}")


def read_source(source: str | Path | dict[str, Any], model: str | None) -> Any:
    """The content of a file, or of one problem of a list of them, chosen by its name."""
    data = source if isinstance(source, dict) else read_json(source)
    if not isinstance(data, list):
        return data
    named = {str(one.get("name", place)): one for place, one in enumerate(data) if isinstance(one, dict)}
    if model is None and len(named) == 1:
        return next(iter(named.values()))
    if model is None or model not in named:
        asked = "the file has several problems" if model is None else f"there is no problem {model!r} in the file"
        raise ProblemError(f"{asked}.", f"Name one with --model: {', '.join(named)}.")
    return named[model]
