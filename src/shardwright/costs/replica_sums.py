"""How gradients are summed between replicas: one description of buckets and their collectives, priced and performed.

Replicas along one mesh axis are summed by an all-reduce. Along several axes the cheapest nest is taken: scatter the
sums along some of the faster axes, fastest first, all-reduce the remaining piece along the others, gather back in
opposite order, so that the slowest link carries only a piece of the bytes (BlueConnect, Cho et al., MLSys 2019; what
communication libraries do across nodes). A bucket is one flat tensor, padded so that every scatter divides it evenly.
The walk prices these legs, the runtime performs them, the search charges every gradient its share of a full bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.operators.rules import Layout, Shard

BUCKET_BYTES = 25 * 2**20
"""A bucket with this many bytes is full."""
FIRST_BUCKET_BYTES = 2**20
"""The first bucket of a kind is small, so that communication starts early."""
IN_FLIGHT_BYTES = 64 * 2**20
"""With more bytes of gradients being scattered, the oldest are awaited, which frees them."""


@dataclass(frozen=True)
class Leg:
    """One collective on a mesh axis; ``elements`` are those of its larger side."""

    kind: str
    axis: int
    elements: int
    seconds: float


@dataclass(frozen=True)
class ReplicaSum:
    """The legs that sum a flat tensor, which has to be padded to ``elements``."""

    legs: tuple[Leg, ...]
    elements: int

    @property
    def seconds(self) -> float:
        return sum(leg.seconds for leg in self.legs)


def replica_axes(resting: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes along which replicas of a parameter with this resting layout are summed.

    >>> from torch.distributed.tensor import Replicate
    >>> replica_axes((Replicate(), Shard(0), Replicate()), (2, 4, 1))
    (0,)
    """
    return tuple(axis for axis, p in enumerate(resting) if not isinstance(p, Shard) and sizes[axis] > 1)


@lru_cache(maxsize=4096)
def replica_sum(elements: int, itemsize: int, axes: tuple[int, ...], mesh: Mesh) -> ReplicaSum:
    """The cheapest way to sum a flat tensor between the replicas along ``axes`` (in mesh order, slowest first).

    >>> from shardwright.cluster import mesh_of, parse_cluster
    >>> mesh = mesh_of(parse_cluster("2x8xH100"))
    >>> [(leg.kind, leg.axis, leg.elements) for leg in replica_sum(10**7, 4, (0, 1), mesh).legs]
    [('reduce_scatter', 1, 10000000), ('all_reduce', 0, 1250000), ('all_gather', 1, 10000000)]
    """
    subsets = (s for count in range(len(axes)) for s in itertools.combinations(axes[1:], count))
    ways = [_nest(elements, itemsize, axes, scattered, mesh) for scattered in subsets]
    return min(ways, key=lambda way: (way.seconds, len(way.legs)), default=ReplicaSum((), elements))


def _nest(elements: int, itemsize: int, axes: tuple[int, ...], scattered: tuple[int, ...], mesh: Mesh) -> ReplicaSum:
    def leg(kind: str, axis: int, count: int) -> Leg:
        seconds = float(collectives.SECONDS[kind](count * itemsize, mesh.axes[axis]))
        return Leg(kind, axis, count, seconds)

    pieces = prod(mesh.sizes[axis] for axis in scattered)
    padded = -(-elements // pieces) * pieces
    down, held = [], padded
    for axis in reversed(scattered):
        down.append((axis, held))
        held //= mesh.sizes[axis]
    legs = [leg("reduce_scatter", axis, count) for axis, count in down]
    legs += [leg("all_reduce", axis, held) for axis in axes if axis not in scattered]
    legs += [leg("all_gather", axis, count) for axis, count in reversed(down)]
    return ReplicaSum(tuple(legs), padded)


def share_seconds(size: int, axes: tuple[int, ...], mesh: Mesh) -> float:
    """Seconds that a gradient of ``size`` bytes costs: its copy into a bucket, and its share of a full one (or its own)."""
    if not axes:
        return 0.0
    whole = max(int(size), BUCKET_BYTES)
    packed = max(2 * size / mesh.device.bandwidth, mesh.device.launch_overhead)
    return packed + replica_sum(whole, 1, axes, mesh).seconds * size / whole
