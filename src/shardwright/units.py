"""Seconds, bytes and counts as people read them: three digits in the unit that fits."""

from __future__ import annotations

from math import isinf, log10


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


def count_text(count: int) -> str:
    """Three digits of a whole number, which may be beyond every float.

    >>> count_text(1_234_567), count_text(2**20_000)
    ('1.23e+06', 'about 10^6020')
    """
    return f"{count:.3g}" if count < 10**300 else f"about 10^{int(count.bit_length() * log10(2))}"


def gap_text(gap: float, of: str) -> str:
    """How good something provably is among ``of``, by its gap.

    >>> gap_text(0.357, "all pipelines"), gap_text(0.0, "all pipelines")
    ('at most 35.7 % above the optimum of all pipelines', 'optimal among all pipelines')
    """
    if isinf(gap):
        return f"no bound over {of}"
    return f"at most {100 * gap:.3g} % above the optimum of {of}" if gap > 0 else f"optimal among {of}"
