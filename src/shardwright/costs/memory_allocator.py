"""PyTorch's caching allocator for CUDA, as far as sizes go.

Requests are rounded up to 512 bytes. Up to 1 MiB they are cut from segments of 2 MiB, up to 10 MiB from segments of 20 MiB,
and larger ones get a segment rounded up to 2 MiB. The smallest free block that fits is taken; what is left over
becomes a free block again if it is worth it (at least 512 bytes in small segments, more than 1 MiB in large ones), else
it is wasted. Freed neighbours merge; segments are kept. (``c10/cuda/CUDACachingAllocator.cpp``.) Replaying a step through
it tells the allocated peak, which counts waste, and the reserved one, which counts fragmentation too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

KiB, MiB = 1 << 10, 1 << 20
ROUNDING = 512
SMALL = MiB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_REQUEST, SEGMENT_ROUNDING = 2 * MiB, 20 * MiB, 10 * MiB, 2 * MiB


@dataclass(eq=False)
class Block:
    """A piece of a segment; ``before`` and ``after`` are its neighbours there."""

    size: int
    small: bool
    number: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


def rounded(size: int) -> int:
    """Bytes a request takes at least.

    >>> rounded(1), rounded(513)
    (512, 1024)
    """
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


class Allocator:
    """State of the allocator: bytes ``allocated`` and ``reserved`` now, and the most there ever were."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._count = 0

    def take(self, size: int) -> Block | None:
        """Allocate; nothing is asked for zero bytes."""
        if size == 0:
            return None
        size = rounded(size)
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= ROUNDING if small else left > SMALL:
            rest = self._block(left, small)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._release(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: Block | None) -> None:
        """Free a block."""
        if block is None:
            return
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.before = neighbour.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after is not None:
                        block.after.before = block
        self._release(block)

    def _best(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        if place == len(pool):
            return None
        block = pool.pop(place)[2]
        block.free = False
        return block

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            whole = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self._block(whole, small)

    def _block(self, size: int, small: bool) -> Block:
        self._count += 1
        return Block(size, small, self._count)

    def _release(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.number)))
        block.free = False
