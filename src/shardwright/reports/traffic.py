"""Who sends how much to whom in one step, and over which axis' link.

A collective's bytes travel as its algorithm sends them: around a ring to the next rank of the group (all-gather and
reduce-scatter send (p-1)/p of the larger side, all-reduce twice that: Thakur, Rabenseifner, Gropp 2005), to every other rank
(all-to-all), or to both neighbours (halo). Short all-reduces may go over a tree instead; their bytes are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.cluster import Mesh

RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Flow:
    """What one rank sends along an axis: ``bytes`` to each peer that ``to`` (``next``, ``all``, ``sides``) names."""

    axis: str
    collective: str
    to: str
    bytes: float
    times: int


RECEIVERS = {"next": "the next rank", "all": "each other rank", "sides": "both neighbours"}


def flows(communication: Mapping[tuple[str, str], tuple[int, int]], mesh: Mesh) -> list[Flow]:
    """Per (collective, axis) with times and bytes of one step, what one rank sends to each of its peers."""
    sizes = {axis.name: axis.size for axis in mesh.axes}
    found = []
    for (kind, axis), (times, size) in communication.items():
        p = sizes[axis]
        if kind in RING:
            found.append(Flow(axis, kind, "next", RING[kind] * (p - 1) / p * size, times))
        elif kind == "all_to_all":
            found.append(Flow(axis, kind, "all", size / p, times))
        else:
            found.append(Flow(axis, kind, "sides", size / 2, times))
    return found


def matrix(found: Sequence[Flow], mesh: Mesh) -> dict[tuple[int, int], float]:
    """Bytes from rank to rank; pairs that exchange nothing are absent."""
    steps, stride = {}, 1
    for axis in reversed(mesh.axes):
        steps[axis.name] = (axis.size, stride)
        stride *= axis.size
    sent: dict[tuple[int, int], float] = {}
    for flow in found:
        size, stride = steps[flow.axis]
        for rank in range(mesh.devices):
            place = rank // stride % size
            for other in _peers(place, size, flow.to):
                pair = (rank, rank + (other - place) * stride)
                sent[pair] = sent.get(pair, 0.0) + flow.bytes
    return sent


def _peers(place: int, size: int, to: str) -> list[int]:
    if to == "next":
        return [(place + 1) % size] if size > 1 else []
    if to == "all":
        return [other for other in range(size) if other != place]
    return [other for other in (place - 1, place + 1) if 0 <= other < size]
