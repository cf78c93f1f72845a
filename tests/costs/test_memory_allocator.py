"""The allocator model: nothing is lost, nothing overlaps, rounding is PyTorch's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.costs.memory_allocator import LARGE_SEGMENT, Allocator, KiB, MiB, rounded

sizes = st.one_of(st.integers(1, 4 * KiB), st.integers(1, MiB), st.integers(MiB, 40 * MiB))


@given(st.lists(st.tuples(sizes, st.integers(0, 10)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_bytes_are_conserved(requests: list[tuple[int, int]]) -> None:
    allocator = Allocator()
    held: list = []
    asked = 0
    for size, victim in requests:
        block = allocator.take(size)
        assert block is not None and block.size >= rounded(size)
        assert block.size - rounded(size) <= MiB
        held.append((block, size))
        asked += rounded(size)
        if victim < 5 and held:
            gone, its = held.pop(victim % len(held))
            allocator.give(gone)
            asked -= rounded(its)
        assert allocator.allocated == sum(b.size for b, _ in held) >= asked
        assert allocator.reserved >= allocator.allocated
        assert len({id(b) for b, _ in held}) == len(held)
    for block, _ in held:
        allocator.give(block)
    assert allocator.allocated == 0
    free = sum(size for space in (allocator.small, allocator.large) for size in space.free.values())
    assert free == allocator.reserved  # every segment is whole again
    assert allocator.peak_reserved >= allocator.peak_allocated


def test_small_requests_share_a_segment() -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.take(512 * KiB)
    assert (allocator.allocated, allocator.reserved) == (2 * MiB, 2 * MiB)


def test_middle_requests_share_twenty_mebibytes() -> None:
    allocator = Allocator()
    allocator.take(3 * MiB)
    assert (allocator.allocated, allocator.reserved) == (3 * MiB, LARGE_SEGMENT)


def test_what_is_left_of_a_large_block_is_wasted_up_to_a_mebibyte() -> None:
    allocator = Allocator()
    allocator.take(11 * MiB + 512)
    assert (allocator.allocated, allocator.reserved) == (12 * MiB, 12 * MiB)
    allocator.take(10 * MiB + 512 * KiB)
    assert allocator.allocated == 12 * MiB + 10 * MiB + 512 * KiB
    assert allocator.reserved == 24 * MiB


def test_freed_neighbours_merge() -> None:
    allocator = Allocator()
    blocks = [allocator.take(6 * MiB) for _ in range(3)]
    for block in blocks:
        allocator.give(block)
    allocator.take(18 * MiB)
    assert allocator.reserved == LARGE_SEGMENT
