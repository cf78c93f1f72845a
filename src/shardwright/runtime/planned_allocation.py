"""Offsets that were planned, in an allocator that decides for itself.

Operators take their memory from PyTorch's caching allocator, which gives the smallest free block that fits. If all memory is
one segment (the ``arena``), and if everything but the place where a result should lie is held by somebody else meanwhile,
the allocator has no choice. So the requests of a rehearsal are packed (:mod:`~shardwright.costs.offsets`) and, before each
part of the performance (a ``window``), a script takes and gives back memory that nobody writes to, until only the planned
places are open. Every window is tried on a model of the allocator; where something lands elsewhere, whatever was to lie
there is moved.

Only requests above 1 MiB are planned: smaller ones lie in segments of their own. What a script wants is never needed for
the numbers: a performance that differs from its rehearsal takes more memory, that is all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.costs.memory_allocator import SMALL, AddressSpace, Allocator, MemoryBlock, MiB, rounded, segment_for
from shardwright.costs.offsets import Lives, Numbers, Packing, packed, packings

_WALKS = 4
"""So often an arena that turned out too small is made larger."""
_PATIENCE = 40
"""So often the rest is packed anew, in all walks together."""
_COARSE = 64 * MiB
"""What is larger may be packed in multiples of 2 MiB: unlike sizes that are nearly the same fit each other then."""
_MORE = 2 * MiB
"""What makes one place larger than another: more than what the allocator does not cut off."""


@dataclass(frozen=True)
class AllocatorEvent:
    """A request of ``size`` bytes under a number, or the end of its life (size 0)."""

    number: int
    size: int


Window = Sequence[AllocatorEvent]
Slot = tuple[int, int]
"""Where a place begins, and its bytes."""
Script = tuple[int, ...]
"""What is done before a window, after everything that was held before the last one is given back: a positive number takes so
many bytes, the complement of a number gives back what was taken as that number (from 0) of this script."""


@dataclass(frozen=True)
class PlannedAllocation:
    """``arena``: bytes of the one segment; ``scripts``: by window; ``reserved``: bytes that all requests take from the
    device, small ones too; ``bound``: what is alive at once of large requests; ``left``: what the allocator takes by itself.
    """

    arena: int
    scripts: dict[int, Script]
    reserved: int
    bound: int
    left: int


def planned_allocation(windows: Sequence[Window]) -> PlannedAllocation:
    """A script by which requests lie where they were planned, or none where the allocator does as well by itself."""
    left, plan = performed(windows), _Plan(windows)
    bound = plan.lives.bound()
    if plan.place:
        arena, scripts = plan.walked()
        reserved = performed(windows, arena, scripts)
        if reserved < left:
            return PlannedAllocation(arena, scripts, reserved, bound, left)
    return PlannedAllocation(0, {}, left, bound, left)


def performed(windows: Sequence[Window], arena: int = 0, scripts: Mapping[int, Script] | None = None) -> int:
    """Bytes that the allocator reserves when a script is performed beside the requests."""
    allocator = Allocator()
    allocator.give(allocator.take(arena))
    blocks: dict[int, MemoryBlock | None] = {}
    held: list[MemoryBlock | None] = []
    for number, window in enumerate(windows):
        script = (scripts or {}).get(number)
        if script is not None:
            for block in held:
                allocator.give(block)
            held.clear()
            for step in script:
                if step > 0:
                    held.append(allocator.take(step))
                else:
                    allocator.give(held[~step])
                    held[~step] = None
        for event in window:
            if event.size:
                blocks[event.number] = allocator.take(event.size)
            else:
                allocator.give(blocks.pop(event.number))
    return allocator.peak_reserved


class _Plan:
    """Large requests, where they should lie, and the walk through all windows that says where they will."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self.sizes: dict[int, int] = {}
        seen: dict[int, list[tuple[int, int]]] = {}
        count = 0
        for place, window in enumerate(windows):
            for event in window:
                count += 1
                if event.size and rounded(event.size) > SMALL:
                    self.sizes[event.number] = rounded(event.size)
                if event.number in self.sizes:
                    seen.setdefault(event.number, []).append((count, place))
        self.place = {number: i for i, number in enumerate(self.sizes)}
        self.passing = {n for n, ends in seen.items() if len(ends) == 2 and ends[0][1] == ends[1][1]}
        """What lives within one window: it may lie anywhere."""
        born = [ends[0][0] for ends in seen.values()]
        dies = [ends[1][0] if len(ends) == 2 else count + 1 for ends in seen.values()]
        size = np.array([self.sizes[n] for n in seen], dtype=np.int64)
        self.lives = Lives(size, np.array(born, dtype=np.int64), np.array(dies, dtype=np.int64))
        self.patience = _PATIENCE

    def walked(self) -> tuple[int, dict[int, Script]]:
        """Bytes of the arena and the scripts: the smallest arena of walks that begin with several packings."""
        exact = self.lives
        best: tuple[int, dict[int, Script]] = 0, {}
        least = segment_for(rounded(exact.bound()))
        even = np.where(exact.bytes >= _COARSE, -(-exact.bytes // _MORE) * _MORE, exact.bytes)
        for self.lives in (exact, Lives(even, exact.born, exact.dies)):
            for packing in packings(self.lives):
                arena, scripts = self._settled(packing, best[0])
                if arena and (not best[0] or arena < best[0]):
                    best = arena, scripts
                if self.patience == 0 or 0 < best[0] <= least:
                    return best
        return best

    def _settled(self, packing: Packing, known: int) -> tuple[int, dict[int, Script]]:
        """An arena in which the walk ends, if there is one below ``known``."""
        self.offsets, end = packing.offsets, packing.end
        for _ in range(_WALKS):
            walk = _Walk(self, segment_for(rounded(end)))
            if walk.end <= walk.arena:
                return walk.arena, walk.scripts
            end = walk.end
            if 0 < known <= end:
                break
        return 0, {}

    def around(self, landed: dict[int, MemoryBlock], offsets: Numbers) -> Packing:
        """Some lie elsewhere than planned: who was to lie there is moved, all others stay."""
        offsets, sizes, lives = offsets.copy(), self.lives.bytes.copy(), self.lives
        for number, block in landed.items():
            offsets[self.place[number]], sizes[self.place[number]] = block
        moved = np.zeros(len(offsets), dtype=bool)
        for number in landed:
            i = self.place[number]
            upon = (offsets < offsets[i] + sizes[i]) & (offsets + sizes > offsets[i])
            moved |= upon & (lives.born < lives.dies[i]) & (lives.dies > lives.born[i])
        for number in landed:
            moved[self.place[number]] = False
        if not moved.any():
            return Packing(offsets, 0, 0)
        fixed = {int(i): int(offsets[i]) for i in np.flatnonzero(~moved)}
        return packed(Lives(sizes, lives.born, lives.dies), fixed)

    def slot(self, number: int) -> Slot:
        return int(self.offsets[self.place[number]]), int(self.lives.bytes[self.place[number]])


class _Tried(NamedTuple):
    """A window in one way: how large the arena must be then, and all that follows from it."""

    end: int
    offsets: Numbers
    space: AddressSpace
    script: Script
    held: list[MemoryBlock]
    live: dict[int, MemoryBlock]
    landed: dict[int, MemoryBlock]


class _Walk:
    """All windows in turn in an arena of a certain size. ``end``: how large it should have been."""

    def __init__(self, plan: _Plan, arena: int) -> None:
        self.plan, self.arena, self.end = plan, arena, arena
        self.scripts: dict[int, Script] = {}
        self.space = AddressSpace(SMALL + 1)
        self.space.give(MemoryBlock(0, arena))
        self.live: dict[int, MemoryBlock] = {}
        self.held: list[MemoryBlock] = []
        self.landed: dict[int, int] = {}
        for number, window in enumerate(plan.windows):
            asked = [e.number for e in window if e.size and e.number in plan.place]
            if asked:
                self._window(number, window, asked)
            else:
                self._play(self.space, window, self.live)
            if self.end > arena:
                return

    def _window(self, number: int, window: Window, asked: list[int]) -> None:
        base = self.space.copy()
        for block in self.held:
            base.give(block)
        best = self._best(base, window, asked)
        if (best is None or best.end > self.arena) and self.plan.patience > 0:
            self.plan.patience -= 1
            mine = {self.plan.place[n] for n in asked}
            for fixed in ({i: int(x) for i, x in enumerate(self.plan.offsets) if i not in mine}, self.landed):
                self.plan.offsets = packed(self.plan.lives, fixed).offsets
                found = self._best(base, window, asked)
                if best is None or (found is not None and found.end < best.end):
                    best = found
                if best is not None and best.end <= self.arena:
                    break
        if best is None:
            self.end = self.arena + _MORE
            return
        self.end = max(self.end, best.end)
        self.plan.offsets, self.space, self.scripts[number] = best.offsets, best.space, best.script
        self.held, self.live = best.held, best.live
        for n, block in best.landed.items():
            self.landed[self.plan.place[n]] = block.start

    def _best(self, base: AddressSpace, window: Window, asked: list[int]) -> _Tried | None:
        """The way that lets the arena be smallest: the first that needs no larger one."""
        best: _Tried | None = None
        slots = {n: self.plan.slot(n) for n in asked}
        freed = [self.live[event.number] for event in window if event.number in self.live]
        for opened in (*_ways(base, slots, self.plan.passing, freed), None):
            space, live = base.copy(), self.live.copy()
            script, held = ((), []) if opened is None else _opened(space, opened)
            landed = self._play(space, window, live)
            if landed is None:
                continue
            staying = {n: block for n, block in landed.items() if n not in self.plan.passing}
            packing = self.plan.around(staying, self.plan.offsets)
            if best is None or packing.end < best.end:
                best = _Tried(packing.end, packing.offsets, space, script, held, live, landed)
            if best.end <= self.arena:
                break
        return best

    def _play(self, space: AddressSpace, window: Window, live: dict[int, MemoryBlock]) -> dict[int, MemoryBlock] | None:
        """What the allocator does in a window: where requests land, or nothing if one does not fit."""
        landed: dict[int, MemoryBlock] = {}
        for event in window:
            if event.number in live:
                space.give(live.pop(event.number))
            elif event.size and event.number in self.plan.place:
                block = space.take(rounded(event.size))
                if block is None:
                    return None
                live[event.number] = landed[event.number] = block
        return landed


def _ways(
    space: AddressSpace, slots: dict[int, Slot], passing: set[int], freed: list[MemoryBlock]
) -> Iterator[list[Slot]]:
    """What may be open in a window, the simplest first. ``freed``: what the window frees that was there before.

    The allocator takes the smallest place that fits, of equal ones the first. So places that should not be taken yet are
    made larger, and what only passes is offered others.
    """
    yield list(slots.values())
    staying = [slot for n, slot in slots.items() if n not in passing]
    beside = [(b.start - _MORE, _MORE) for b in freed] + [(b.start + b.size, _MORE) for b in freed]
    if freed:  # places that are freed too early, larger
        yield [*slots.values(), *beside]
    if not 0 < len(staying) < len(slots):
        return
    yield staying
    order = list(slots)
    first = next(i for i, n in enumerate(order) if n in passing)
    later = [(slots[n][0] + slots[n][1], _MORE) for n in order[first:] if n not in passing]
    for more in ([], later, beside, [*later, *beside]):
        for choice in (min, max):
            opened = staying + more
            for n in order:
                if n in passing and (places := _apart(space, slots[n][1], opened)):
                    opened.append((choice(places), slots[n][1]))
            yield opened
    halls = [(there, at) for at, there in space.free.items() if all(at + there <= a or a + n <= at for a, n in staying)]
    if halls:  # one large place for all that passes, or all there are
        yield [*staying, max(halls)[::-1]]
        yield [*staying, *beside, max(halls)[::-1]]
        yield [*staying, *(hall[::-1] for hall in halls)]


def _apart(space: AddressSpace, size: int, opened: list[Slot]) -> list[int]:
    """Free places that touch none of those that are opened."""
    found = []
    for start, there in space.free.items():
        within = [(at, n) for at, n in opened if start <= at < start + there]
        edges = [
            start,
            start + there - size,
            *(at + n + _MORE for at, n in within),
            *(at - _MORE - size for at, n in within),
        ]
        found += [
            at
            for at in edges
            if start <= at <= start + there - size
            and all(at + size + _MORE <= other or other + n + _MORE <= at for other, n in opened)
        ]
    return found


def _opened(space: AddressSpace, slots: list[Slot]) -> tuple[Script, list[MemoryBlock]]:
    """Take everything that is free but some places."""
    script: list[int] = []
    taken: list[MemoryBlock | None] = []

    def take(size: int) -> None:
        block = space.take(size)
        assert block is not None
        script.append(size)
        taken.append(block)

    def give(number: int) -> None:
        block = taken[number]
        assert block is not None
        space.give(block)
        taken[number] = None
        script.append(~number)

    holes = sorted((size, start) for start, size in space.free.items() if size > SMALL)
    for size, _ in holes:
        take(size)
    opened: list[int] = []
    for number, (size, start) in enumerate(holes):
        pieces = _pieces(start, size, slots)
        if not any(free for _, free in pieces):
            continue
        give(number)
        for length, free in pieces:
            take(length)
            if free:
                opened.append(len(taken) - 1)
    for number in opened:
        give(number)
    return tuple(script), [block for block in taken if block is not None]


def _pieces(start: int, size: int, slots: list[Slot]) -> list[tuple[int, bool]]:
    """A hole cut into what stays open and what does not, by their lengths; nothing is as short as 1 MiB."""
    end = start + size
    inside = sorted((max(a, start), min(a + n, end)) for a, n in slots if min(a + n, end) - max(a, start) > SMALL)
    pieces: list[list[int]] = []
    for a, b in inside:
        if pieces and a - pieces[-1][1] <= SMALL:
            pieces[-1][1] = max(pieces[-1][1], b)
        else:
            pieces.append([start if a - start <= SMALL else a, b])
    if pieces and end - pieces[-1][1] <= SMALL:
        pieces[-1][1] = end
    found: list[tuple[int, bool]] = []
    at = start
    for a, b in pieces:
        if a > at:
            found.append((a - at, False))
        found.append((b - a, True))
        at = b
    if at < end:
        found.append((end - at, False))
    return found
