"""What it costs to sum gradients between replicas, and which nest of collectives is the cheapest.

The legs are those of :mod:`shardwright.program.sums`; the search charges every gradient its share of a full bucket.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.program.decisions import Sizes
from shardwright.program.sums import Leg, nested


def leg_seconds(leg: Leg, itemsize: int, mesh: Mesh) -> float:
    """Seconds of one leg of a sum between replicas."""
    return float(collectives.SECONDS[leg.kind](leg.elements * itemsize, mesh.axes[leg.axis]))


@lru_cache(maxsize=4096)
def cheapest_nest(
    elements: int, itemsize: int, axes: tuple[int, ...], mesh: Mesh, weights: tuple[float, ...] = ()
) -> tuple[tuple[int, ...], float]:
    """Along which of ``axes`` (in mesh order, slowest first) to scatter a flat tensor that is summed, and the seconds of it;
    ``weights`` say what a second counts along every axis of the mesh.

    >>> from shardwright.cluster import mesh_of, parse_cluster
    >>> cheapest_nest(10**7, 4, (0, 1), mesh_of(parse_cluster("2x8xH100")))[0]
    (1,)
    """
    best: tuple[float, int, tuple[int, ...]] | None = None
    for scattered in (s for count in range(len(axes)) for s in itertools.combinations(axes[1:], count)):
        legs = nested(elements, axes, scattered, mesh.sizes).legs
        counted = (leg_seconds(leg, itemsize, mesh) * (weights[leg.axis] if weights else 1.0) for leg in legs)
        found = (sum(counted), len(legs), scattered)
        best = found if best is None else min(best, found)
    return ((), 0.0) if best is None else (best[2], best[0])


def share_seconds(size: int, axes: tuple[int, ...], mesh: Mesh) -> float:
    """Seconds that a gradient of ``size`` bytes costs: its copy into a bucket, and its share of a full one (or its own)."""
    if not axes:
        return 0.0
    whole = max(int(size), Sizes().bucket)
    packed = max(2 * size / mesh.device.bandwidth, mesh.device.launch_overhead)
    return packed + cheapest_nest(whole, 1, axes, mesh)[1] * size / whole
