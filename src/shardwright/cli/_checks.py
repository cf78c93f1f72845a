"""Numbers on the command line that mean nothing, refused before any work."""

from __future__ import annotations

import math

from shardwright.errors import ShardwrightError


def check_numbers(*, zero: bool = False, **options: float | None) -> None:
    """Refuse an option that is not a finite number above zero (or zero, where that means something).

    >>> check_numbers(time_limit=3.0, batch=None)
    """
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            least = "of at least 0" if zero else "above 0"
            raise ShardwrightError(f"--{name.replace('_', '-')} {value} means nothing.", f"Give a number {least}.")
