"""The graph of layouts of a tensor: which one step leads from one layout to another, independent of sizes.

A layout of a tensor of rank r on a mesh of n axes is one of (r+2)^n states: per axis Replicate, Partial or Shard(dim).
One step changes one axis. Shards of one dim on several axes nest in mesh order (the outer axis cuts first), so a shard
may be added to or removed from an axis only while no later axis shards the same dim. Unreduced sums may be made from
anything (zeros elsewhere); other unreduced values (max, min, prod) may only be reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.operators.rules import Cut, Layout, Partial, Placement, Replicate, Shard, chunk

REPLICATE, PARTIAL, SHARD = 0, 1, 2
_REPLICATE, _SUM = Replicate(), Partial("sum")
KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "zero_pad", "mask")


@dataclass(frozen=True, eq=False)
class LayoutGraph:
    """States as digits per axis (0 Replicate, 1 Partial, 2+d Shard(d)) and all single steps between them.

    Edge arrays run in parallel: ``source``, ``target`` (states), ``kind`` (index into ``KINDS``), ``axis``, ``dim``
    (gathered, scattered, sliced or padded dim; for an all-to-all the dim that stops being sharded) and ``to_dim``.
    """

    rank: int
    axes: int
    digits: np.ndarray
    source: np.ndarray
    target: np.ndarray
    kind: np.ndarray
    axis: np.ndarray
    dim: np.ndarray
    to_dim: np.ndarray
    leaving: tuple[np.ndarray, ...]
    """Per state the edges that start there."""

    def state(self, layout: Sequence[Placement]) -> int:
        """The number of a layout."""
        number = 0
        for placement in layout:
            number = number * (self.rank + 2) + digit(placement)
        return number


def digit(placement: Placement) -> int:
    """The digit of one placement."""
    kind = type(placement)  # millions are asked, and torch's isinstance is Python
    if kind is Shard:
        return SHARD + placement.dim  # type: ignore[union-attr] # it is one
    return PARTIAL if kind is Partial else REPLICATE


def _change(old: int, new: int) -> tuple[int, int, int]:
    """Kind, dim and to_dim of the step that turns one digit into another."""
    if old >= SHARD and new >= SHARD:
        return KINDS.index("all_to_all"), old - SHARD, new - SHARD
    if old >= SHARD:
        return KINDS.index("all_gather" if new == REPLICATE else "zero_pad"), old - SHARD, -1
    if new >= SHARD:
        return KINDS.index("reduce_scatter" if old == PARTIAL else "slice"), new - SHARD, -1
    return KINDS.index("all_reduce" if old == PARTIAL else "mask"), -1, -1


@lru_cache(maxsize=256)
def layout_graph(rank: int, axes: int, linear: tuple[bool, ...]) -> LayoutGraph:
    """All layouts of a tensor of this rank and the steps between them; ``linear``: per axis, Partial means a sum."""
    base = rank + 2
    digits = np.array(list(itertools.product(range(base), repeat=axes)), dtype=np.int64).reshape(base**axes, axes)
    weights = base ** np.arange(axes - 1, -1, -1, dtype=np.int64)
    edges: list[tuple[np.ndarray, np.ndarray, int, int, int, int]] = []
    for axis in range(axes):
        later = digits[:, axis + 1 :]
        for old, new in itertools.permutations(range(base), 2):
            if new == PARTIAL and not linear[axis]:
                continue
            free = digits[:, axis] == old
            for moved in (old, new):
                if moved >= SHARD:
                    free &= ~(later == moved).any(axis=1)
            start = np.flatnonzero(free)
            kind, dim, to_dim = _change(old, new)
            edges.append((start, start + (new - old) * weights[axis], kind, axis, dim, to_dim))
    counts = [len(edge[0]) for edge in edges]
    source = np.concatenate([edge[0] for edge in edges])
    order = np.argsort(source, kind="stable")
    columns = [np.repeat([int(edge[i]) for edge in edges], counts)[order] for i in range(2, 6)]
    source = source[order]
    starts = np.searchsorted(source, np.arange(len(digits) + 1))
    return LayoutGraph(
        rank,
        axes,
        digits,
        source,
        target=np.concatenate([edge[1] for edge in edges])[order],
        kind=columns[0],
        axis=columns[1],
        dim=columns[2],
        to_dim=columns[3],
        leaving=tuple(np.arange(a, b) for a, b in itertools.pairwise(starts)),
    )


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with this layout.

    >>> dual((Shard(0), Replicate()))
    (Shard(dim=0), Partial(sum))
    """
    return tuple(p if type(p) is Shard else _REPLICATE if type(p) is Partial else _SUM for p in layout)


def nonempty(extent: int, cuts: Sequence[Cut]) -> bool:
    """Whether cutting an extent by these axes in turn leaves every rank something."""
    if not cuts:
        return extent > 0
    count = len(cuts[0]) if isinstance(cuts[0], tuple) else cuts[0]
    lengths = {stop - start for start, stop in (chunk(extent, cuts[0], i) for i in _ends(count, cuts[0]))}
    return min(lengths) > 0 and all(nonempty(length, cuts[1:]) for length in lengths)


def _ends(count: int, cut: Cut) -> Sequence[int]:
    """The pieces to look at: all where shares differ, the first and the last of equal ones."""
    return range(count) if isinstance(cut, tuple) else (0, count - 1)


def largest(extent: int, cuts: Sequence[Cut]) -> int:
    """Length of the largest piece after cutting by these axes in turn."""
    for cut in cuts:
        count = len(cut) if isinstance(cut, tuple) else cut
        extent = max(stop - start for start, stop in (chunk(extent, cut, i) for i in _ends(count, cut)))
    return extent


def local_elements(shape: Sequence[int], graph: LayoutGraph, sizes: Sequence[Cut]) -> np.ndarray:
    """Elements of the largest shard in every state; infinite where some rank would have nothing."""
    elements = np.ones(len(graph.digits))
    subsets = [s for count in range(graph.axes + 1) for s in itertools.combinations(range(graph.axes), count)]
    place = np.arange(graph.axes)
    for dim, extent in enumerate(shape):
        cut = graph.digits == SHARD + dim
        mask = (cut << place).sum(axis=1)
        table = np.ones(2**graph.axes)
        for subset in subsets:
            pieces = [sizes[axis] for axis in subset]
            fits = extent == 0 or nonempty(extent, pieces)
            table[sum(1 << axis for axis in subset)] = largest(extent, pieces) if fits else np.inf
        elements *= np.where(np.isinf(table[mask]), np.inf, np.maximum(table[mask], 1e-9))
    return elements
