"""One step of a change of layout, and the numbers with which one rank runs it. Nothing here has a price.

A change of layout is a sequence of steps, each along one mesh axis: gather, reduce, scatter, exchange, or a free local cut.
Which sequence is taken is a decision (:mod:`~shardwright.program.decisions`); :mod:`~shardwright.program.binding` checks
that it leads where it should and gives every step this rank's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.operators.rules import Cut, Window, chunk

COMMUNICATION = frozenset(("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "halo", "halo_reduce"))


@dataclass(frozen=True)
class Step:
    """One step on one mesh axis; bytes are those of the largest rank.

    ``dim`` is the dim gathered, scattered, sliced, padded or exchanged; an all-to-all turns shards of ``dim`` into
    shards of ``to_dim``. ``reduce`` is the reduction of an all-reduce or reduce-scatter.
    """

    kind: str
    axis: int
    dim: int | None
    to_dim: int | None
    bytes_in: int
    bytes_out: int
    reduce: str | None = None
    window: Window | None = None

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATION

    @property
    def wire_bytes(self) -> int:
        """Bytes the collective is about (the larger side); zero for steps that do not communicate."""
        return max(self.bytes_in, self.bytes_out) if self.kind in COMMUNICATION else 0

    @property
    def is_view(self) -> bool:
        """Whether the step only looks at a part of its source (rank zero's mask is the source itself)."""
        return self.kind in ("slice", "mask")

    @property
    def buffer_bytes(self) -> int:
        """Bytes needed beside input and result: pieces put in order before or after the collective."""
        inner = bool(self.dim) or bool(self.to_dim)
        if self.kind == "all_gather" and inner:
            return self.bytes_out
        if self.kind == "reduce_scatter" and inner:
            return self.bytes_in
        if self.kind == "all_to_all":
            return self.bytes_in + self.bytes_out
        return abs(self.bytes_out - self.bytes_in) if self.kind in ("halo", "halo_reduce") else 0


class Route(NamedTuple):
    """The steps of a change of layout and those that bring its gradient back."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def first_gather(kinds: Iterable[str]) -> int | None:
    """Which step of a parameter's change of layout is started ahead of use: the first that gathers, if any does.

    >>> first_gather(["slice", "all_gather", "all_gather"])
    1
    """
    return next((place for place, kind in enumerate(kinds) if kind == "all_gather"), None)


def first_scatter(kinds: Iterable[str]) -> int | None:
    """Which step on a gradient's way home is started without waiting: the first that scatters, if any does."""
    return next((place for place, kind in enumerate(kinds) if kind == "reduce_scatter"), None)


class Line(NamedTuple):
    """The ranks along one mesh axis through this rank: their process group (until the program runs, the axis' name), how
    many they are, which of them is this one, and how the axis cuts (the number, or the shares of its ranks)."""

    group: str
    size: int
    position: int
    cut: Cut = 0

    def piece(self, extent: int, index: int | None = None) -> Region:
        """The region that one rank of the line (this one, if none is named) holds of a dim of this extent."""
        return Region(*chunk(extent, self.cut or self.size, self.position if index is None else index))

    def longest(self, extent: int) -> int:
        """Length of the longest piece: what shards are padded to where a collective wants equal ones."""
        if not isinstance(self.cut, tuple):
            return -(-extent // self.size)
        return max(self.piece(extent, index).length for index in range(self.size))


class Region(NamedTuple):
    """``[start, stop)`` of a dim."""

    start: int
    stop: int

    def overlap(self, other: Region) -> Region:
        start = max(self.start, other.start)
        return Region(start, max(start, min(self.stop, other.stop)))

    @property
    def length(self) -> int:
        return self.stop - self.start


class BoundStep(NamedTuple):
    """A step with everything one rank needs to run it: only numbers and strings, which the compiler takes as constants.

    ``extent`` is the length of ``dim`` (``to_extent`` that of ``to_dim``) before this axis cuts it. ``wants`` and
    ``holds`` say for a window, per rank of the line, which region of ``dim`` it needs and which it has.
    """

    kind: str
    line: Line
    dim: int = 0
    extent: int = 0
    to_dim: int = 0
    to_extent: int = 0
    reduce: str = "sum"
    wants: tuple[Region, ...] = ()
    holds: tuple[Region, ...] = ()

    @property
    def mine(self) -> Region:
        """This rank's part of ``dim``: its window where there is one, else its shard."""
        return self.wants[self.line.position] if self.wants else self.line.piece(self.extent)
