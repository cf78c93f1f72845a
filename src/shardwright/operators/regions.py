"""Symbolic intervals: which region of a dim one piece of a loop reads (Tofu, EuroSys 2019, section 4).

The loops that are cut together run over ``[unit*a, unit*b)`` with symbols ``a`` and ``b``; every other loop runs over all
its points. An index then lies between ``slope*a + low`` and ``slope*b + high``, exactly, as long as piece borders are
multiples of ``unit``. From these two ends follows whether the region is a shard of the dim, a window, or all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.operators.indices import Affine, Loop, Quotient, Remainder, bounds, loops_of


class Coarser(Exception):  # noqa: N818 - a request for another unit, not a failure
    """The interval is exact only for piece borders that are multiples of ``unit``."""

    def __init__(self, unit: int) -> None:
        super().__init__(unit)
        self.unit = unit


@dataclass(frozen=True)
class Interval:
    """All values from ``slope*a + low`` to ``slope*b + high``, both included."""

    slope: int
    low: int
    high: int


@dataclass(frozen=True)
class Region:
    """What a piece reads of one dim: ``kind`` is ``shard``, ``window`` or ``whole``."""

    kind: str
    scale: int = 1
    low: int = 0
    high: int = 0
    tiled: bool = False
    """A shard whose pieces must be equal, because one point of the loop is several elements of the dim."""


def interval(index: Affine, cut: frozenset[str], unit: int) -> Interval | None:
    """The values of ``index`` over one piece; ``None`` where they have no such form (the whole dim is safe)."""
    slope = 0
    low = high = index.constant
    for atom, coefficient in index.terms:
        if isinstance(atom, Loop):
            if atom.name in cut:
                if coefficient < 0:
                    return None  # reversed: the first piece reads the last elements
                slope, high = slope + coefficient * unit, high - coefficient
            else:
                ends = (0, coefficient * (atom.extent - 1))
                low, high = low + min(ends), high + max(ends)
            continue
        if not any(loop.name in cut for loop in loops_of(atom.of)):
            first, last = bounds(Affine(((atom, 1),)))
            ends = (coefficient * first, coefficient * last)
            low, high = low + min(ends), high + max(ends)
            continue
        inner = interval(atom.of, cut, unit)
        if inner is None or coefficient < 0:
            return None
        if isinstance(atom, Quotient):
            if inner.slope % atom.by:
                raise Coarser(unit * (atom.by // math.gcd(inner.slope, atom.by)))
            slope += coefficient * (inner.slope // atom.by)
            low, high = low + coefficient * (inner.low // atom.by), high + coefficient * (inner.high // atom.by)
        else:
            high += coefficient * (atom.by - 1)  # a remainder may take every value
    return Interval(slope, low, high)


def period(index: Affine | None, cut: frozenset[str]) -> int | None:
    """After how many points of the cut loops an index repeats itself, if it does so at all (1: it does not mention them).

    A piece of whole periods takes every value equally often wherever it lies: cut there, the index is independent.
    """
    periods = [1]
    for atom, _ in () if index is None else index.terms:
        if not any(loop.name in cut for loop in loops_of(Affine(((atom, 1),)))):
            continue
        if not isinstance(atom, Remainder):
            return None
        slope = 0
        for inner, coefficient in atom.of.terms:
            if isinstance(inner, Loop):
                slope += coefficient if inner.name in cut else 0
            elif any(loop.name in cut for loop in loops_of(inner.of)):
                return None
        periods.append(atom.by // math.gcd(slope, atom.by))
    return math.lcm(*periods)


def region(index: Affine | None, cut: frozenset[str], unit: int, points: int, extent: int) -> Region | None:
    """The region of a dim of ``extent`` for one piece of a loop of ``points`` units; ``None``: independent of the cut."""
    if index is None or not any(loop.name in cut for loop in loops_of(index)):
        return None
    found = interval(index, cut, unit)
    if found is None or found.slope == 0:
        return Region("whole")
    if found.low == 0 and found.high == -1 and found.slope * points == extent:
        return Region("shard", found.slope, tiled=found.slope != 1 or unit != 1)
    high = found.slope + found.high
    displaced = max(abs(found.low), abs(high - found.slope + 1), abs(extent - found.slope * points))
    if unit == 1 and displaced * 3 <= extent:
        return Region("window", found.slope, found.low, high)
    return Region("whole")
