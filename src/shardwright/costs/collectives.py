"""Seconds of the collectives on one mesh axis, by the algorithm a communication library picks.

Ring and tree schedules over p devices with latency a and bandwidth b per device (Thakur, Rabenseifner, Gropp 2005): a
ring all-gather sends (p-1)/p of the result in p-1 hops, a ring all-reduce twice that, a tree log2(p) hops with the whole
message. Where a link was measured, the fitted latency and bandwidth of that collective stand in for the link's own, and
long messages are priced by how far they were from that line.
All functions take numbers or numpy arrays of bytes. An axis of one device costs nothing.

Bytes always count the larger side of one rank: what an all-gather gives, what a reduce-scatter takes, what an
all-reduce, all-to-all, broadcast or neighbour exchange sends.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardwright.cluster import Axis

Amount = Any
"""Bytes: a number, or a numpy array of them."""


def _figures(kind: str, axis: Axis) -> tuple[float, float, bool]:
    """Latency and bandwidth for this kind; whether they are fitted to the whole collective (latency is not per hop)."""
    fit = axis.fit(kind)
    return (axis.latency, axis.bandwidth, False) if fit is None else (*fit, True)


def _ring(kind: str, amount: Amount, axis: Axis, rounds: int) -> Amount:
    p = axis.size
    latency, bandwidth, fitted = _figures(kind, axis)
    start = latency * (math.log2(p) if fitted else rounds * (p - 1))
    return (start + rounds * (p - 1) / p * np.asarray(amount, dtype=float) / bandwidth) * axis.ratio(kind, amount)


def all_gather(amount: Amount, axis: Axis) -> Amount:
    """Every rank gets ``amount`` bytes, of which it held one p-th."""
    return np.zeros_like(amount, dtype=float) if axis.size == 1 else _ring("all_gather", amount, axis, 1)


def reduce_scatter(amount: Amount, axis: Axis) -> Amount:
    """Every rank brings ``amount`` bytes and keeps one p-th of the sum."""
    return np.zeros_like(amount, dtype=float) if axis.size == 1 else _ring("reduce_scatter", amount, axis, 1)


def all_reduce(amount: Amount, axis: Axis) -> Amount:
    """Every rank brings ``amount`` bytes and gets their sum: a ring for large messages, a tree for small ones."""
    if axis.size == 1:
        return np.zeros_like(amount, dtype=float)
    ring = _ring("all_reduce", amount, axis, 2)
    latency, bandwidth, fitted = _figures("all_reduce", axis)
    if fitted:
        return ring
    tree = 2 * math.ceil(math.log2(axis.size)) * latency + 2 * np.asarray(amount, dtype=float) / bandwidth
    return np.minimum(ring, tree)


def all_to_all(amount: Amount, axis: Axis) -> Amount:
    """Every rank holds ``amount`` bytes and sends one p-th to each."""
    if axis.size == 1:
        return np.zeros_like(amount, dtype=float)
    p = axis.size
    latency, bandwidth, fitted = _figures("all_to_all", axis)
    start = latency * (math.log2(p) if fitted else 1 + 0.25 * (p - 1))  # sends to different peers overlap
    return (start + (p - 1) / p * np.asarray(amount, dtype=float) / bandwidth) * axis.ratio("all_to_all", amount)


def broadcast(amount: Amount, axis: Axis) -> Amount:
    """One rank's ``amount`` bytes reach all."""
    if axis.size == 1:
        return np.zeros_like(amount, dtype=float)
    latency, bandwidth, _ = _figures("broadcast", axis)
    return math.ceil(math.log2(axis.size)) * latency + np.asarray(amount, dtype=float) / bandwidth


def halo(amount: Amount, axis: Axis) -> Amount:
    """Neighbours exchange ``amount`` bytes in total, both sides at once."""
    if axis.size == 1:
        return np.zeros_like(amount, dtype=float)
    latency, bandwidth, _ = _figures("send", axis)
    return 2 * latency + np.asarray(amount, dtype=float) / bandwidth


def send(amount: Amount, latency: float, bandwidth: float) -> Amount:
    """One device's ``amount`` bytes to one other, as between pipeline stages."""
    return latency + np.asarray(amount, dtype=float) / bandwidth


SECONDS = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "halo": halo,
    "halo_reduce": halo,
}
"""The price of each kind of communication step on an axis."""
