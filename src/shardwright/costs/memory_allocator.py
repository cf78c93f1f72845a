"""PyTorch's caching allocator for CUDA, as far as sizes and places go.

Requests are rounded up to 512 bytes. Up to 1 MiB they are cut from segments of 2 MiB, up to 10 MiB from segments of 20 MiB,
and larger ones get a segment rounded up to 2 MiB. The smallest free block that fits is taken, of equal ones the first in
memory; what is left over becomes a free block again if it is worth it (at least 512 bytes in small segments, more than 1 MiB
in large ones), else it is wasted. Freed neighbours merge; segments are kept. (``c10/cuda/CUDACachingAllocator.cpp``.)
Replaying a step through it tells the allocated peak, which counts waste, and the reserved one, which counts fragmentation
too. Segments lie here in the order in which they were asked for; where a device puts them is not known.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

KiB, MiB = 1 << 10, 1 << 20
ROUNDING = 512
SMALL = MiB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_REQUEST, SEGMENT_ROUNDING = 2 * MiB, 20 * MiB, 10 * MiB, 2 * MiB


class MemoryBlock(NamedTuple):
    """Bytes that were handed out, and where they begin."""

    start: int
    size: int


def rounded(size: int) -> int:
    """Bytes a request takes at least.

    >>> rounded(1), rounded(513)
    (512, 1024)
    """
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def segment_for(size: int) -> int:
    """Bytes of the segment that is taken from the device for a rounded request.

    >>> [segment_for(n * MiB) // MiB for n in (1, 9, 11)]
    [2, 20, 12]
    """
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class AddressSpace:
    """The free blocks of segments of one kind. ``least`` bytes or more that are left over become a block again."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.free: dict[int, int] = {}
        """Size by start."""
        self._ends: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def copy(self) -> AddressSpace:
        other = AddressSpace(self.least)
        other.free, other._ends, other._by_size = self.free.copy(), self._ends.copy(), self._by_size.copy()
        return other

    def take(self, size: int) -> MemoryBlock | None:
        """The best block for a rounded request; nothing where none is large enough."""
        place = bisect_left(self._by_size, (size, -1))
        if place == len(self._by_size):
            return None
        there, start = self._by_size[place]
        self._remove(start, place)
        if there - size >= self.least:
            self._add(start + size, there - size)
            there = size
        return MemoryBlock(start, there)

    def give(self, block: MemoryBlock) -> None:
        """Make a block free; it merges with its neighbours."""
        start, end = block.start, block.start + block.size
        before = self._ends.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self.free:
            after = end + self.free[end]
            self._remove(end)
            end = after
        self._add(start, end - start)

    def _add(self, start: int, size: int) -> None:
        self.free[start] = size
        self._ends[start + size] = start
        insort(self._by_size, (size, start))

    def _remove(self, start: int, place: int | None = None) -> None:
        size = self.free.pop(start)
        del self._ends[start + size]
        self._by_size.pop(bisect_left(self._by_size, (size, start)) if place is None else place)


class Allocator:
    """State of the allocator: bytes ``allocated`` and ``reserved`` now, and the most there ever were."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.small, self.large = AddressSpace(ROUNDING), AddressSpace(SMALL + 1)
        self._end = 0

    def take(self, size: int) -> MemoryBlock | None:
        """Allocate; nothing is asked for zero bytes."""
        if size == 0:
            return None
        size = rounded(size)
        space = self.small if size <= SMALL else self.large
        block = space.take(size)
        if block is None:
            self._segment(space, segment_for(size))
            block = space.take(size)
            assert block is not None
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: MemoryBlock | None) -> None:
        """Free a block."""
        if block is not None:
            self.allocated -= block.size
            (self.small if block.size <= SMALL else self.large).give(block)

    def _segment(self, space: AddressSpace, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        space.give(MemoryBlock(self._end, size))
        self._end += size + ROUNDING  # blocks of different segments never merge
