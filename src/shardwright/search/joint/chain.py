"""Where a run of alike blocks is cut into stages: between blocks, so a stage is told by how many it has and by its ends."""

from __future__ import annotations

from functools import cached_property
from math import ceil

import numpy as np

from shardwright.search.joint.problem import Floats

MOST_CUTS = 128
"""Blocks are counted in grains of so many that there are at most so many of them."""


class Chain:
    """The cuts of so many blocks, from block to block of which so many bytes of a micro-batch go."""

    between = "blocks"
    halves = True
    """Half of what a group of devices has can be each of two stages."""

    def __init__(self, blocks: int, boundary_bytes: float) -> None:
        self.blocks, self.boundary_bytes = blocks, boundary_bytes
        self.grain = ceil(blocks / MOST_CUTS)
        self.count = ceil(blocks / self.grain) + 1

    @cached_property
    def nested(self) -> np.ndarray:
        """[a, b]: whether a stage leads from cut a to b."""
        return np.triu(np.ones((self.count, self.count), dtype=bool), 1)

    def next_to(self, cut: int, by: int) -> tuple[int, ...]:
        """The next cut before (``by`` -1) or after (1) one."""
        return (cut + by,) if 0 <= cut + by < self.count else ()

    def kinds(self, start: np.ndarray, end: np.ndarray, both_ends: bool = False) -> np.ndarray:
        """What prices of stages between cuts depend on, as columns: how many blocks, whether the model's first and last
        operators are theirs. ``both_ends``: who has the first has the last too."""
        first, last = start == 0, end == self.count - 1
        begins, ends = (np.minimum(cut * self.grain, self.blocks) for cut in (start, end))
        return np.stack([ends - begins, first, first if both_ends else last])

    def borders(self, kinds: np.ndarray) -> tuple[Floats, Floats]:
        """Bytes of a micro-batch that stages receive, and that they send."""
        _, first, last = kinds
        return self.boundary_bytes * (1.0 - first), self.boundary_bytes * (1.0 - last)

    def number(self, cut: int) -> int:
        """How many blocks lie before a cut."""
        return min(cut * self.grain, self.blocks)

    def cut_at(self, number: int) -> int:
        """The cut before which so many blocks lie."""
        return ceil(number / self.grain)

    def operators(self, start: int, end: int) -> tuple[str, ...]:
        """None by name: blocks tell which they are."""
        return ()

    def even(self, stages: int) -> list[int]:
        """Cuts into equal runs of blocks."""
        return even_cuts(self.count - 1, stages)


def even_cuts(blocks: int, stages: int) -> list[int]:
    """Equal runs of blocks; what does not divide goes to the stages in the middle, for the first and last have more to do.

    >>> even_cuts(7, 3)
    [0, 2, 5, 7]
    """
    counts = [blocks // stages] * stages
    middle = sorted(range(stages), key=lambda k: (k in (0, stages - 1), k))
    for k in middle[: blocks % stages]:
        counts[k] += 1
    return [sum(counts[:k]) for k in range(stages + 1)]
