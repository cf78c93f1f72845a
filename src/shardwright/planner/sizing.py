"""Questions about a whole job: how many devices are worth it, how large a batch fits, which cluster is cheaper per token.

Each asks for a plan per size, cluster or batch, all by the same prices, and answers with a row for every one of them, also
for those on which nothing fits. What a plan of fewer devices can do, more devices can do too (the others stand idle), so a
row is never slower than one with fewer devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.cluster import Cluster, Device, Node, Profile
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph import Graph
from shardwright.planner.options import Options, Progress
from shardwright.planner.planning import plan_graph
from shardwright.plans import Plan

HALF = 0.5
"""Devices are worth it while each does at least this share of the work per second that one of the best row does."""

MOST_TRIALS = 24
"""How many batches are tried at most."""


@dataclass(frozen=True)
class Row:
    """One size: the plan there, or why there is none. ``devices`` are those of the cluster, ``used`` those of the plan."""

    cluster: str
    devices: int
    batch: int
    tokens: int
    plan: Plan | None
    refusal: str = ""

    @property
    def used(self) -> int:
        return 0 if self.plan is None else self.plan.devices

    @property
    def seconds(self) -> float:
        return float("inf") if self.plan is None else self.plan.prediction.step_seconds

    @property
    def device_seconds_per_token(self) -> float:
        """Of all devices of the cluster, idle ones too: they are paid for."""
        return self.seconds * self.devices / self.tokens


def batch_and_tokens(graph: Graph) -> tuple[int, int]:
    """Rows of a batch, and its tokens: the numbers of its largest integer input of two dims, or the rows where it has none.

    >>> batch_and_tokens(graph)  # doctest: +SKIP
    (16, 32768)
    """
    shapes = [graph.tensors[i.tensor] for i in graph.inputs if i.tensor is not None and graph.tensors[i.tensor].shape]
    if not shapes:
        return 1, 1
    ids = [t.shape for t in shapes if len(t.shape) == 2 and t.dtype.startswith("int")]
    rows = shapes[0].shape[0]
    return rows, max((a * b for a, b in ids), default=rows)


def resized(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of so many devices of the same kind: part of a node, or whole ones, more of them where needed.

    >>> from shardwright.cluster import parse_cluster
    >>> resized(parse_cluster("8xH100"), 32).name
    '4x8xH100'
    """
    node = cluster.nodes[0]
    if any(other != node for other in cluster.nodes):
        raise ShardwrightError(
            f"{cluster.name} has nodes of several kinds, so there is no cluster like it with {devices} devices.",
            "Ask about a cluster of one kind of node.",
        )
    if devices < node.devices:
        part: tuple[Node, ...] = (replace(node, devices=devices),)
        return replace(cluster, name=f"{devices}x{node.device.name}", nodes=part)
    if devices % node.devices:
        raise ShardwrightError(
            f"{devices} devices do not fill nodes of {node.devices} {node.device.name}.",
            f"Ask for fewer than {node.devices}, or for a multiple of them.",
        )
    count = devices // node.devices
    name = f"{node.devices}x{node.device.name}" if count == 1 else f"{count}x{node.devices}x{node.device.name}"
    return replace(cluster, name=name, nodes=(node,) * count)


def sizes_between(text: str) -> list[int]:
    """``8..512``: 8, 16, 32, … 512; ``8,12,24``: just these.

    >>> sizes_between("8..64"), sizes_between("4,6")
    ([8, 16, 32, 64], [4, 6])
    """
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            sizes = [first << k for k in range(32) if first << k <= last] if first > 0 else []
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ShardwrightError(
            f"{text!r} names no numbers of devices.", "Write 8..512 (doubling each time) or 8,16,24."
        )
    return sizes


def by_devices(
    graph: Graph, cluster: Cluster, sizes: Sequence[int], options: Options, progress: Progress | None = None
) -> list[Row]:
    """One row for every number of devices, with the best plan for that many or fewer of these numbers.

    >>> [(row.devices, row.seconds) for row in by_devices(graph, cluster, [8, 16], Options())]  # doctest: +SKIP
    """
    rows: list[Row] = []
    best: Plan | None = None
    for devices in sorted(set(sizes)):
        row = _row(graph, resized(cluster, devices), replace(options, fewer_devices=False), progress)
        if row.plan is None or (best is not None and best.prediction.step_seconds < row.seconds):
            row = replace(row, plan=best)
        best = row.plan or best
        rows.append(row)
    return rows


def worth_it(rows: Sequence[Row]) -> Row | None:
    """The row with most devices that are used and each do at least half of what a device does in the best row.

    >>> worth_it([]) is None
    True
    """
    rates = {row.devices: 1.0 / (row.seconds * row.devices) for row in rows if row.plan is not None}
    worth = [row for row in rows if row.devices in rates and row.used == row.devices]
    worth = [row for row in worth if rates[row.devices] >= HALF * max(rates.values())]
    return max(worth, key=lambda row: row.devices, default=None)


def by_cluster(
    graph: Graph, clusters: Sequence[Cluster], options: Options, progress: Progress | None = None
) -> list[Row]:
    """One row for every cluster, all priced alike (`like_with_like`).

    >>> min(by_cluster(graph, [h100, a100], Options()), key=lambda r: r.device_seconds_per_token)  # doctest: +SKIP
    """
    return [_row(graph, cluster, options, progress) for cluster in like_with_like(clusters)]


def like_with_like(clusters: Sequence[Cluster]) -> tuple[Cluster, ...]:
    """The clusters as they are if the host's time was measured beside all their devices, or beside none; otherwise
    without it everywhere.

    A device that was never measured borrows how efficient kernels are, but nobody knows what its host takes; beside one
    whose host was timed it would look better than it is.

    >>> from shardwright.cluster import parse_cluster
    >>> [cluster.device.launch_overhead for cluster in like_with_like([parse_cluster("1xH200"), parse_cluster("1xH100")])]
    [5e-06, 5e-06]
    """
    devices = [node.device for cluster in clusters for node in cluster.nodes]
    listed = [device.launch_overhead for device in devices if not _host_timed(device)]
    if len(listed) in (0, len(devices)):
        return tuple(clusters)

    def without_host(node: Node) -> Node:
        profile = node.device.profile
        if profile is None or not _host_timed(node.device):
            return node
        kernels = Profile(profile.label, profile.curves, preset=profile.preset)
        return replace(node, device=replace(node.device, profile=kernels, launch_overhead=min(listed)))

    return tuple(replace(one, nodes=tuple(map(without_host, one.nodes))) for one in clusters)


def _host_timed(device: Device) -> bool:
    return device.profile is not None and bool(device.profile.dispatch)


def by_batch(
    capture_at: Callable[[int], Graph],
    cluster: Cluster,
    options: Options,
    *,
    start: int = 1,
    progress: Progress | None = None,
) -> list[Row]:
    """The batches that were tried, by size: doubled from ``start`` until nothing fits, then halved in between.

    The largest that fits is found to within an eighth.

    >>> max(row.batch for row in by_batch(capture_at, cluster, Options()) if row.plan)  # doctest: +SKIP
    """
    tried: dict[int, Row] = {}
    for _ in range(MOST_TRIALS):
        batch = next(_next_batches(tried, start), None)
        if batch is None:
            break
        if progress is not None:
            progress(f"a batch of {batch}")
        row = _row(capture_at(batch), cluster, replace(options, baselines=()), None)
        tried[batch] = replace(row, batch=batch)
    return [tried[batch] for batch in sorted(tried)]


def _next_batches(tried: dict[int, Row], start: int) -> Iterator[int]:
    """What to try next: nothing once the largest that fits is known well enough."""
    if not tried:
        yield start
        return
    fits = max((batch for batch, row in tried.items() if row.plan is not None), default=0)
    fails = min((batch for batch, row in tried.items() if row.plan is None), default=0)
    if not fails:
        yield 2 * fits
    elif not fits and fails > 1:
        yield fails // 2
    elif fits and fails - fits > max(1, fits // 8):
        yield (fits + fails) // 2


def _row(graph: Graph, cluster: Cluster, options: Options, progress: Progress | None) -> Row:
    batch, tokens = batch_and_tokens(graph)
    if progress is not None:
        progress(f"planning for {cluster.name}")
    try:
        return Row(cluster.name, cluster.size, batch, tokens, plan_graph(graph, cluster, options, progress=progress))
    except Infeasible as error:
        return Row(cluster.name, cluster.size, batch, tokens, None, error.message)
