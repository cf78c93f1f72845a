"""Where everything lies in one piece of memory: bytes with known lifetimes packed so that none overlap, with a bound.

Dynamic storage allocation is NP-hard, but what is alive at once bounds it from below, and placing the large and the
long-lived first, each into the smallest gap that stays open over its life, reaches that bound for most steps. Several
orders are tried until one does; the best is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_OPEN = 1 << 60


@dataclass(frozen=True)
class Lives:
    """Bytes that are needed, from which moment on and until (excluding) which."""

    bytes: Numbers
    born: Numbers
    dies: Numbers

    def bound(self) -> int:
        """The most that is alive at once: no packing takes less.

        >>> Lives(np.array([3, 4, 5]), np.array([0, 1, 2]), np.array([2, 3, 4])).bound()
        9
        """
        if not len(self.bytes):
            return 0
        change = np.zeros(int(self.dies.max()) + 1, dtype=np.int64)
        np.add.at(change, self.born, self.bytes)
        np.add.at(change, self.dies, -self.bytes)
        return int(np.cumsum(change).max())


@dataclass(frozen=True)
class Packing:
    """``offsets`` of all lives, where the last byte ends, and the bound that no packing of them undercuts."""

    offsets: Numbers
    end: int
    bound: int


def packed(lives: Lives, fixed: Mapping[int, int] | None = None) -> Packing:
    """The best packing found; those of ``fixed``, by their number, lie where it says.

    >>> packed(Lives(np.array([2, 2, 4]), np.array([0, 0, 1]), np.array([1, 2, 2]))).end
    6
    """
    best: Packing | None = None
    for found in packings(lives, fixed):
        if best is None or found.end < best.end:
            best = found
        if best.end <= best.bound:
            break
    assert best is not None
    return best


def packings(lives: Lives, fixed: Mapping[int, int] | None = None) -> Iterator[Packing]:
    """Packings in several orders."""
    bound = lives.bound()
    for order in _orders(lives):
        yield _placed(lives, order, fixed or {}, bound)


def _orders(lives: Lives) -> Iterator[Numbers]:
    size, length = lives.bytes, lives.dies - lives.born
    yield np.lexsort((-length, -size))
    yield np.lexsort((lives.born, -size))
    yield np.argsort(-size * length, kind="stable")
    yield np.lexsort((-size, -length))
    yield np.lexsort((-size, lives.born))


def _placed(lives: Lives, order: Numbers, fixed: Mapping[int, int], bound: int) -> Packing:
    """One after the other into the smallest gap that is open over its whole life."""
    offsets = np.zeros(len(lives.bytes), dtype=np.int64)
    ends = np.zeros_like(offsets)
    there = np.zeros(len(offsets), dtype=bool)
    for number, offset in fixed.items():
        offsets[number], ends[number], there[number] = offset, offset + lives.bytes[number], True
    for number in order:
        if number in fixed:
            continue
        near = np.flatnonzero(there & (lives.born < lives.dies[number]) & (lives.dies > lives.born[number]))
        near = near[np.argsort(offsets[near], kind="stable")]
        begins = np.append(0, np.maximum.accumulate(ends[near])) if len(near) else np.zeros(1, dtype=np.int64)
        gaps = np.append(offsets[near], _OPEN) - begins
        gaps[gaps < lives.bytes[number]] = _OPEN + 1
        at = begins[int(gaps.argmin())]
        offsets[number], ends[number], there[number] = at, at + lives.bytes[number], True
    return Packing(offsets, int(ends.max(initial=0)), bound)
