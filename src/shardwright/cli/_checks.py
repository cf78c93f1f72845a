"""Numbers on the command line that mean nothing, refused before any work."""

from __future__ import annotations

import math

from shardwright.errors import ShardwrightError
from shardwright.records import shown

WIDEST = 10_000
"""Characters of a drawing."""
MOST_SECONDS = 30 * 24 * 3600.0
"""A month: the most that any option may ask to be searched or waited for."""


def check_seconds(*, zero: bool = False, **options: float | None) -> None:
    """Refuse a time that nobody would wait for.

    >>> check_seconds(time_limit=3.0)
    """
    check_numbers(zero=zero, **options)
    for name, value in options.items():
        if value is not None and value > MOST_SECONDS:
            raise ShardwrightError(
                f"--{name.replace('_', '-')} {value:g} is longer than a month.", f"Give at most {MOST_SECONDS:.0f} s."
            )


def check_whole(flag: str, value: int | None, most: int, least: int = 1) -> None:
    """Refuse a whole number outside of what anybody could mean.

    >>> check_whole("--width", 120, 10_000)
    """
    if value is not None and not least <= value <= most:
        raise ShardwrightError(f"{flag} {shown(value)} means nothing.", f"Give a number from {least} to {most:,}.")


def check_numbers(*, zero: bool = False, **options: float | None) -> None:
    """Refuse an option that is not a finite number above zero (or zero, where that means something).

    >>> check_numbers(time_limit=3.0, batch=None)
    """
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            least = "of at least 0" if zero else "above 0"
            raise ShardwrightError(f"--{name.replace('_', '-')} {value} means nothing.", f"Give a number {least}.")
