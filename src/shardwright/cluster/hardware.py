"""Devices, links, nodes and clusters: what a machine room is made of, in seconds, bytes and flops per second.

Everything here is a plain number from a datasheet or a measurement; the curves of a calibrated device live in its
:class:`~shardwright.cluster.profile.Profile`. Bandwidths are bytes per second that one device can send in one direction
while it receives as much. Construction checks itself, so a cluster that exists has positive figures everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.cluster.engine import Engine
from shardwright.cluster.profile import Profile
from shardwright.errors import ClusterError

Ratios = tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
MOST_DEVICES = 1_000_000
"""In one cluster; more is a slip of the pen."""
NEVER_CALIBRATED = "datasheet, never calibrated"
RESERVES = {
    "driver": "what the driver and ECC keep of the memory on the datasheet: CUDA reports the rest as the device's total",
    "context": "a process's CUDA context with the kernels of PyTorch, cuBLAS and cuDNN: PyTorch's allocator says that "
    "0.5 to 0.6 GiB of `non-PyTorch memory` are in use (TianheWu/CoSeR issue 10 on an A100, Wan-Video/Wan2.1 issue 465)",
    "communication": "NCCL's buffers: 544 to 688 MB a communicator on A100s with NVLink (NVIDIA/nccl issue 964), and a mesh "
    "of two axes has two; 1.06 GB on eight H100s, context included, before the first all-to-all (issue 1685: that took "
    "3.3 GB more); proportional to the channels, few of which PCIe has",
    "fragmentation": "2 % of the memory: what a step reserves was within 1.8 % of what is predicted on our own H200 "
    "(docs/benchmarks/device.md)",
}
"""What presets keep free of a device's memory, and why so much."""


def _require_positive(owner: str, **figures: float) -> None:
    for key, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ClusterError(f"{owner}: {key} must be a positive number, not {value!r}.", f"Correct the key {key!r}.")


@dataclass(frozen=True)
class Device:
    """One accelerator or processor: the memory of one, its peak rates, and how it was calibrated.

    ``peak_flops`` are pairs (dtype, flops per second); ``"tf32"`` stands for float32 convolutions on tensor cores.
    ``launch_overhead`` is the host's time to issue one operator. ``reserves`` are pairs (who, bytes) of memory that no plan
    may count on: what the driver keeps, the process's context, NCCL's buffers, the allocator's fragmentation. ``engine`` is
    whose kernels are priced, where not ours.
    """

    name: str
    kind: str
    memory: int
    bandwidth: float
    launch_overhead: float
    peak_flops: tuple[tuple[str, float], ...]
    reserves: tuple[tuple[str, int], ...] = ()
    source: str = ""
    profile: Profile | None = None
    engine: Engine | None = None

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        if self.kind not in ("cuda", "cpu"):
            raise ClusterError(f"{owner}: kind must be 'cuda' or 'cpu', not {self.kind!r}.", "Correct the key 'kind'.")
        _require_positive(
            owner, memory=self.memory, bandwidth=self.bandwidth, launch_overhead=self.launch_overhead, **self.rates
        )
        for who, taken in self.reserves:
            if not 0 <= taken < float("inf"):
                raise ClusterError(f"{owner}: {who} reserves {taken!r} bytes.", "Correct the key 'reserved'.")
        if self.usable_memory <= 0:
            raise ClusterError(
                f"{owner}: of {self.memory} bytes {self.reserved} are reserved, and none is left.",
                "Correct the key 'reserved'.",
            )
        if "float32" not in self.rates:
            raise ClusterError(f"{owner}: peak_flops has no 'float32'.", "Add peak_flops.float32, in flops per second.")

    @property
    def rates(self) -> dict[str, float]:
        return dict(self.peak_flops)

    def peak(self, dtype: str) -> float:
        """Peak flops per second for a dtype; one the datasheet leaves out runs at the rate of float32."""
        return self.rates.get(dtype, self.rates["float32"])

    @property
    def reserved(self) -> int:
        """Bytes that no plan may count on, whoever takes them."""
        return sum(taken for _, taken in self.reserves)

    @property
    def usable_memory(self) -> int:
        """What is left for a plan: parameters, optimizer state, activations and all other tensors."""
        return self.memory - self.reserved

    @property
    def calibration(self) -> str:
        """Where the prices of this device come from; every table that shows a price shows this."""
        return NEVER_CALIBRATED if self.profile is None else self.profile.label


@dataclass(frozen=True)
class Link:
    """A connection: seconds before the first byte, bytes per second and direction. ``shared``: by a node's devices.

    ``fits`` are measured collectives as triples (kind, latency, bandwidth) that replace the plain two numbers; ``ratios``
    say by how much long messages missed that line, as (kind, ((bytes, measured over fitted seconds), ...)).
    ``processor_share`` is how much of a processor a collective under way takes from what it computes meanwhile,
    ``processor_seconds`` what it takes at least, however short the message.
    """

    name: str
    latency: float
    bandwidth: float
    shared: bool = False
    fits: tuple[tuple[str, float, float], ...] = ()
    source: str = ""
    processor_share: float = 0.0
    ratios: Ratios = ()
    processor_seconds: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(f"link {self.name!r}", latency=self.latency, bandwidth=self.bandwidth)
        if not 0.0 <= self.processor_share < 1.0:
            raise ClusterError(
                f"link {self.name!r}: processor_share must be at least 0 and below 1, not {self.processor_share!r}.",
                "Correct the key 'processor_share'.",
            )

    def per_device(self, users: int) -> Link:
        """What one of ``users`` devices gets when all of them send at once."""
        if not self.shared or users == 1:
            return self
        fits = tuple((kind, latency, bandwidth / users) for kind, latency, bandwidth in self.fits)
        return replace(self, bandwidth=self.bandwidth / users, shared=False, fits=fits)


@dataclass(frozen=True)
class Node:
    """One machine: ``devices`` alike, joined by ``link``; ``host`` is its CPU where that is to take part."""

    device: Device
    devices: int
    link: Link
    host: Device | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise ClusterError(f"a node with {self.devices} devices cannot exist.", "Correct the key 'devices'.")


@dataclass(frozen=True)
class Cluster:
    """Nodes joined by ``network``; unlike nodes may stand side by side (``nodes`` is in rank order).

    Example
    -------
    >>> from shardwright import parse_cluster
    >>> cluster = parse_cluster("4x8xA100-80GB")
    >>> cluster.size, cluster.device.name
    (32, 'A100-80GB')
    """

    name: str
    nodes: tuple[Node, ...]
    network: Link

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError(f"cluster {self.name!r} has no nodes.", "Add a [[group]] with nodes and devices.")
        if self.size > MOST_DEVICES:
            raise ClusterError(f"cluster {self.name!r} has {self.size} devices.", f"Plan for at most {MOST_DEVICES}.")

    @property
    def size(self) -> int:
        """How many devices there are (hosts not counted)."""
        return sum(node.devices for node in self.nodes)

    @property
    def uniform(self) -> bool:
        """Whether all nodes are alike, which is what a mesh over the whole cluster wants."""
        return all(node == self.nodes[0] for node in self.nodes)

    @property
    def device(self) -> Device:
        """What a plan over the whole cluster may count on of every device: the slowest one, with the least memory of all."""
        devices = [node.device for node in self.nodes]
        slowest = min(devices, key=lambda d: (d.peak("bfloat16"), d.peak("float32"), d.bandwidth))
        least = min(device.usable_memory for device in devices)
        same = slowest.usable_memory == least
        return slowest if same else replace(slowest, memory=least + slowest.reserved)

    @property
    def calibration(self) -> str:
        return "; ".join(dict.fromkeys(f"{n.device.name}: {n.device.calibration}" for n in self.nodes))

    def groups(self) -> tuple[Cluster, ...]:
        """The cluster cut into runs of like nodes, each a cluster of its own."""
        runs: list[list[Node]] = []
        for node in self.nodes:
            if runs and runs[-1][0] == node:
                runs[-1].append(node)
            else:
                runs.append([node])
        return tuple(Cluster(self.name, tuple(run), self.network) for run in runs)


def part_of(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """The devices of these ranks as a cluster of their own: what one stage of a pipeline runs on.

    >>> from shardwright.cluster import parse_cluster
    >>> part_of(parse_cluster("2x4xH100"), [2, 3, 4, 5]).nodes[0].devices
    2
    """
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= cluster.size:
        raise ClusterError(
            f"cluster {cluster.name!r} of {cluster.size} devices has no ranks {list(ranks)}.",
            "Name each once, from 0 on.",
        )
    nodes, first, ordered = [], 0, sorted(ranks)
    for node in cluster.nodes:
        count = bisect_left(ordered, first + node.devices) - bisect_left(ordered, first)
        if count:
            nodes.append(node if count == node.devices else replace(node, devices=count))
        first += node.devices
    return replace(cluster, name=f"{len(ranks)} of {cluster.name}", nodes=tuple(nodes))


def weakest(links: Iterable[Link]) -> Link:
    """The link that a collective over several of them waits for."""
    return min(links, key=lambda link: (link.bandwidth, -link.latency))
