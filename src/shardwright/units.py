"""Seconds and bytes as people read them: three digits in the unit that fits."""

from __future__ import annotations


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
