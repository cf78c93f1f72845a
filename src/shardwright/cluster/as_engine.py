"""A cluster as another engine would use it: its kernels, its host, its gradient reductions, measured collectives.

What a plan decides stays: splits, layouts, order and overlap of its instructions. What changes is how long each takes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardwright.cluster.engine import engine
from shardwright.cluster.hardware import Cluster, Device, Link, Node
from shardwright.cluster.primitives import Primitives, primitives
from shardwright.cluster.profile import Profile
from shardwright.errors import ClusterError


def as_engine(cluster: Cluster, name: str) -> Cluster:
    """The cluster as the engine of this name uses it.

    >>> from shardwright.cluster import parse_cluster
    >>> as_engine(parse_cluster("8xA100-80GB"), "megatron-2021").device.calibration[:13]
    'megatron-2021'
    """
    nodes = tuple(
        replace(node, device=_device(node.device, name), link=_measured(node.link, node, _tables(node.device)))
        for node in cluster.nodes
    )
    rate = cluster.network.bandwidth * engine(name).network
    return replace(cluster, nodes=nodes, network=replace(cluster.network, bandwidth=rate))


def _tables(device: Device) -> Primitives:
    found = primitives(device.name)
    if found is None or found.products is None:
        raise ClusterError(
            f"nobody published collectives and products of the {device.name}, so no engine has a price there.",
            "Simulate without --engine.",
        )
    return found


def _device(device: Device, name: str) -> Device:
    profile = engine(name)
    profile.pace(device.name)  # refuses a device that no run of the engine was published on
    issue = ("mul", profile.forward_issue, profile.backward_issue)
    label = f"{name} ({profile.fitted or 'nothing fitted'})"
    curves = () if device.profile is None else device.profile.curves
    timed = Profile(label, curves, (issue, ("view", 0.0, 0.0)))
    return replace(device, engine=profile, profile=timed, launch_overhead=profile.forward_issue)


def _measured(link: Link, node: Node, table: Primitives) -> Link:
    """The link whose collectives take what was measured over the node's devices (the nearest number that was)."""
    fits, ratios = [], []
    for kind in dict.fromkeys(kind for kind, _ in sorted(table.collectives)):
        known = [size for name, size in table.collectives if name == kind]
        size = min(known, key=lambda size: abs(math.log(size / max(node.devices, 2))))
        rows = table.collectives[kind, size]
        rounds = (2 if kind == "all_reduce" else 1) * (size - 1) / size
        latency, rate = float(rows[0, 1]) / math.log2(size), float(rounds * rows[-1, 0] / rows[-1, 1])
        lines = rows[0, 1] + rounds * rows[:, 0] / rate
        fits.append((kind, latency, rate))
        ratios.append((kind, tuple((float(b), float(s / line)) for (b, s), line in zip(rows, lines, strict=True))))
    return replace(link, fits=tuple(fits), ratios=tuple(ratios), source=table.source)
