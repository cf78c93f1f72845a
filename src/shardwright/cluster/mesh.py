"""The mesh: a cluster's devices as a grid whose axes are ordered from the slowest link to the fastest.

Ranks are numbered in mesh order, so the last axis joins neighbours inside a node. An axis lies either inside nodes or
across them with the same place in every node; links that a node's devices share are divided between them, because the
groups along an axis all communicate at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwright.cluster.hardware import Cluster, Device, Link, Ratios, weakest
from shardwright.errors import ClusterError
from shardwright.operators.rules import Cut, chunk


@dataclass(frozen=True)
class Axis:
    """One direction of a mesh: ``size`` devices joined pairwise by a link of ``latency`` and ``bandwidth``."""

    name: str
    size: int
    latency: float
    bandwidth: float
    fits: tuple[tuple[str, float, float], ...] = ()
    processor_share: float = 0.0
    ratios: Ratios = ()
    processor_seconds: float = 0.0
    shares: tuple[float, ...] = ()
    """The part of the work that each device takes, adding up to one; equal parts where there are none."""

    @property
    def cut(self) -> Cut:
        """How the axis cuts: its size, or the shares of its devices."""
        return self.shares or self.size

    def longest(self, extent: int) -> int:
        """Length of the longest piece of a dim of this extent."""
        if not self.shares:
            return -(-extent // self.size)
        return max(stop - start for start, stop in (chunk(extent, self.shares, i) for i in range(self.size)))

    def fit(self, kind: str) -> tuple[float, float] | None:
        """Measured (latency, bandwidth) of one kind of collective, where there is one."""
        return next(((latency, rate) for name, latency, rate in self.fits if name == kind), None)

    def without_latency(self) -> Axis:
        """The same axis where a message costs only its bytes, at the best rate at which any was measured."""
        least = tuple((name, ((1.0, min(1.0, *(r for _, r in points))),)) for name, points in self.ratios)
        return replace(self, latency=0.0, fits=tuple((name, 0.0, rate) for name, _, rate in self.fits), ratios=least)

    def ratio(self, kind: str, amount: Any) -> Any:
        """By how much messages of so many bytes miss the fitted line (a number or an array of them)."""
        points = next((points for name, points in self.ratios if name == kind), None)
        if points is None:
            return 1.0
        sizes, ratios = np.array(points).T
        return np.interp(np.log2(np.maximum(amount, 1.0)), np.log2(sizes), ratios)


@dataclass(frozen=True)
class Mesh:
    """Axes, slowest link first, and the device at every point of the grid.

    Example
    -------
    >>> from shardwright.cluster import meshes, parse_cluster
    >>> [mesh.sizes for mesh in meshes(parse_cluster("2x4xH100"), max_axes=3)]
    [(2, 4), (2, 2, 2)]
    """

    axes: tuple[Axis, ...]
    device: Device
    kinds: tuple[Device, ...] = ()
    """The device at every place of the first axis, where nodes are unlike; ``device`` is then what all can do."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """How every axis cuts: its size, or the shares of its devices."""
        return tuple(axis.cut for axis in self.axes)

    def with_shares(self, shares: Mapping[str, tuple[float, ...]]) -> Mesh:
        """The same mesh whose axes of these names are cut in these proportions."""
        if not shares:
            return self
        return replace(self, axes=tuple(replace(axis, shares=shares.get(axis.name, ())) for axis in self.axes))

    def at(self, coordinate: Sequence[int]) -> Mesh:
        """The same as a device at this place has it: all do what all can do, but where rows are dealt out in shares of the
        axis of unlike devices, each does what it can."""
        if not self.kinds or not self.axes[0].shares:
            return self
        return replace(self, device=self.kinds[coordinate[0]], kinds=())

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[tuple[str, int], ...]:
        """``(name, size)`` pairs, as a ``Strategy`` carries them."""
        return tuple((axis.name, axis.size) for axis in self.axes)

    @property
    def calibration(self) -> str:
        return self.device.calibration

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.device, self.kinds))

    def __hash__(self) -> int:  # meshes are keys of every price cache: hash the nested dataclasses once
        return self._hash

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Place of a rank on every axis (row-major, as ``init_device_mesh`` numbers them)."""
        place = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            place.append(index)
        return tuple(reversed(place))


def _factorizations(number: int, parts: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as a product of ``parts`` factors in ascending order, each at least ``least``."""
    if parts == 0:
        if number == 1:
            yield ()
        return
    if parts == 1:
        if number >= least:
            yield (number,)
        return
    for factor in range(least, math.isqrt(number) + 1):
        if number % factor == 0:
            for rest in _factorizations(number // factor, parts - 1, factor):
                yield (factor, *rest)


def _named(base: str, sizes: tuple[int, ...]) -> list[str]:
    """Names of the axes of one kind of link. Numbers would read like those of devices: several are outer and inner ones.

    >>> _named("gpu", (8,)), _named("gpu", (2, 4)), _named("node", (2, 2, 2))
    (['gpu'], ['outer', 'inner'], ['outer_node', 'middle_node', 'inner_node'])
    """
    if len(sizes) <= 1:
        return [base] * len(sizes)
    between = [f"middle{n}" for n in range(1, len(sizes) - 1)] if len(sizes) > 3 else ["middle"] * (len(sizes) - 2)
    places = ["outer", *between, "inner"]
    return [f"{place}_{base}" for place in places] if base == "node" else places


def across_nodes(name: str) -> bool:
    """Whether an axis of this name lies between nodes, also in plans whose axes are numbered.

    >>> across_nodes("outer_node"), across_nodes("node1"), across_nodes("outer")
    (True, True, False)
    """
    return name.rstrip("0123456789").endswith("node")


def _figures(link: Link) -> tuple[Any, ...]:
    """What an axis takes over from its link, in the order of its fields."""
    return link.latency, link.bandwidth, link.fits, link.processor_share, link.ratios, link.processor_seconds


def meshes(cluster: Cluster, max_axes: int = 3) -> list[Mesh]:
    """Every way to arrange the cluster's devices in at most ``max_axes`` axes, fewest axes first.

    Axes over the same link differ in nothing but their size, so each set of sizes is listed once. A cluster of unlike
    nodes is arranged as if all its nodes had the weakest device and link (``kinds`` remembers them, for rows that are dealt
    out by speed); nodes with unlike numbers of devices cannot form one grid.
    """
    counts = {node.devices for node in cluster.nodes}
    if len(counts) > 1:
        raise ClusterError(
            f"cluster {cluster.name!r} has nodes with {sorted(counts)} devices, which form no grid.",
            "Plan over one of its groups, or give every group the same number of devices per node.",
        )
    if max_axes < 1:
        raise ClusterError(f"a mesh needs at least one axis, not {max_axes}.", "Ask for max_axes of 1 or more.")
    node_count, per_node = len(cluster.nodes), counts.pop()
    inner_name = "gpu" if cluster.device.kind == "cuda" else "cpu"
    network = cluster.network.per_device(per_node)
    inner = weakest(node.link.per_device(per_node) for node in cluster.nodes)
    device, own = cluster.device, tuple(node.device for node in cluster.nodes)
    found: list[Mesh] = []
    for total in range(1, max_axes + 1):
        for outer_axes in range(0, total + 1):
            for outer_sizes in _factorizations(node_count, outer_axes):
                for inner_sizes in _factorizations(per_node, total - outer_axes):
                    names = _named("node", outer_sizes) + _named(inner_name, inner_sizes)
                    links = [network] * len(outer_sizes) + [inner] * len(inner_sizes)
                    axes = tuple(
                        Axis(name, size, *_figures(link))
                        for name, size, link in zip(names, outer_sizes + inner_sizes, links, strict=True)
                    )
                    found.append(Mesh(axes, device, own if len(set(own)) > 1 and outer_axes == 1 else ()))
    if not found:  # one device, or several nodes forced onto a single axis
        link = network if node_count > 1 else inner
        found.append(Mesh((Axis(inner_name, cluster.size, *_figures(link)),), device))
    return found


def meshes_and_line(cluster: Cluster, max_axes: int = 2) -> list[Mesh]:
    """The same and, last, all devices of several nodes as one axis over the network: a collective over it has one latency
    where one per axis adds them up, so where messages are small it may be the faster.

    >>> from shardwright.cluster import parse_cluster
    >>> [mesh.sizes for mesh in meshes_and_line(parse_cluster("2x4xH100"))]
    [(2, 4), (8,)]
    """
    found = meshes(cluster, max_axes)
    line = [mesh for mesh in meshes(cluster, 1) if mesh not in found]
    return [*found, *line]


def mesh_of(cluster: Cluster, sizes: tuple[int, ...] | None = None) -> Mesh:
    """The mesh with these axis sizes; without sizes, the plainest one (nodes × devices of a node)."""
    if sizes is None:
        return meshes(cluster, max_axes=2)[0]
    choices = meshes(cluster, max_axes=max(len(sizes), 1))
    for mesh in choices:
        if mesh.sizes == tuple(sizes):
            return mesh
    raise ClusterError(
        f"cluster {cluster.name!r} has no mesh of sizes {tuple(sizes)}.",
        f"Choose one of {sorted({mesh.sizes for mesh in choices})}.",
    )
