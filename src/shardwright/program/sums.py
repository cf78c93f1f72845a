"""How gradients are summed between replicas: the legs of a nest of collectives over one flat tensor.

Replicas along one mesh axis are summed by an all-reduce. Along several axes sums may be scattered along some of the faster
ones, fastest first, the remaining piece all-reduced along the others, and gathered back in opposite order, so that the
slowest link carries only a piece of the bytes (BlueConnect, Cho et al., MLSys 2019; what communication libraries do across
nodes). Along which axes is decided elsewhere. A bucket is one flat tensor, padded so that every scatter divides it evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.operators.rules import Layout, Shard


@dataclass(frozen=True)
class Leg:
    """One collective on a mesh axis; ``elements`` are those of its larger side."""

    kind: str
    axis: int
    elements: int


@dataclass(frozen=True)
class ReplicaSum:
    """The legs that sum a flat tensor, which has to be padded to ``elements``."""

    legs: tuple[Leg, ...]
    elements: int


def replica_axes(resting: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes along which replicas of a parameter with this resting layout are summed.

    >>> from torch.distributed.tensor import Replicate
    >>> replica_axes((Replicate(), Shard(0), Replicate()), (2, 4, 1))
    (0,)
    """
    return tuple(axis for axis, p in enumerate(resting) if not isinstance(p, Shard) and sizes[axis] > 1)


def nested(elements: int, axes: tuple[int, ...], scattered: tuple[int, ...], sizes: Sequence[int]) -> ReplicaSum:
    """The legs of the nest that scatters along ``scattered`` (a part of ``axes``, both in mesh order).

    >>> [(leg.kind, leg.axis, leg.elements) for leg in nested(100, (0, 1), (1,), (2, 8)).legs]
    [('reduce_scatter', 1, 104), ('all_reduce', 0, 13), ('all_gather', 1, 104)]
    """
    pieces = prod(sizes[axis] for axis in scattered)
    padded = -(-elements // pieces) * pieces
    down, held = [], padded
    for axis in reversed(scattered):
        down.append((axis, held))
        held //= sizes[axis]
    legs = [Leg("reduce_scatter", axis, count) for axis, count in down]
    legs += [Leg("all_reduce", axis, held) for axis in axes if axis not in scattered]
    legs += [Leg("all_gather", axis, count) for axis, count in reversed(down)]
    return ReplicaSum(tuple(legs), padded)
