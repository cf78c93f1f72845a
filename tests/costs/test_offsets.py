"""Packings against every possible one, on lives few enough to try all."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.costs.offsets import Lives, packed, packings

life = st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 5))


def lives_of(drawn: list[tuple[int, int, int]]) -> Lives:
    columns = [(size, born, born + length) for size, born, length in drawn]
    return Lives(*(np.array(column, dtype=np.int64) for column in zip(*columns, strict=True)))


def overlap(lives: Lives, offsets: np.ndarray) -> bool:
    count = len(lives.bytes)
    for i in range(count):
        for j in range(i):
            together = lives.born[i] < lives.dies[j] and lives.born[j] < lives.dies[i]
            if together and max(offsets[i], offsets[j]) < min(offsets[i] + lives.bytes[i], offsets[j] + lives.bytes[j]):
                return True
    return False


def least_end(lives: Lives) -> int:
    """Of the best packing: in the order of its offsets, everything lies as low as it can."""
    best = int(lives.bytes.sum())
    for order in permutations(range(len(lives.bytes))):
        placed: dict[int, int] = {}
        for i in order:
            near = [j for j in placed if lives.born[i] < lives.dies[j] and lives.born[j] < lives.dies[i]]
            ends = sorted(int(placed[j] + lives.bytes[j]) for j in near)
            placed[i] = next(
                at
                for at in (0, *ends)
                if all(at + lives.bytes[i] <= placed[j] or placed[j] + lives.bytes[j] <= at for j in near)
            )
        best = min(best, max(int(at + lives.bytes[i]) for i, at in placed.items()))
    return best


@given(st.lists(life, min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_no_packing_overlaps_or_undercuts_the_best(drawn: list[tuple[int, int, int]]) -> None:
    lives = lives_of(drawn)
    least = least_end(lives)
    assert lives.bound() <= least
    for found in packings(lives):
        assert not overlap(lives, found.offsets)
        assert found.end == int((found.offsets + lives.bytes).max()) >= least
    assert packed(lives).end == min(found.end for found in packings(lives)) <= 1.5 * least


@given(st.lists(life, min_size=2, max_size=12), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_what_is_fixed_stays_and_nothing_lies_upon_it(drawn: list[tuple[int, int, int]], offset: int) -> None:
    lives = lives_of(drawn)
    found = packed(lives, {0: offset})
    assert found.offsets[0] == offset
    assert not overlap(lives, found.offsets)


def test_equal_layers_reach_the_bound() -> None:
    """Activations of a deep model with something large at the end, and buffers that come and go with every layer."""
    layers = [(12, 2 * i, 100 - 2 * i) for i in range(12)] + [(7, 2 * i, 3) for i in range(12)] + [(100, 24, 10)]
    lives = lives_of(layers)
    assert packed(lives).end == lives.bound() == 12 * 12 + 100 + 7
