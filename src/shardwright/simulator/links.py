"""What crosses between stages, on which link, and how long it takes: values, gradients, sums of shared parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from shardwright.cluster import Axis, Cluster, Link
from shardwright.costs import collectives
from shardwright.graph.core import DTYPE_BYTES
from shardwright.program import Program
from shardwright.program.pipeline import Pipeline
from shardwright.schedules import FORWARD, Action


class Way(NamedTuple):
    """How a tensor crosses: seconds on the link (``latency`` of them whatever its rate), bytes of the busiest rank, the
    link (``None``: it stays on its rank); bytes of the buffers that the first rank receives ``into``."""

    seconds: float
    bytes: int
    link: Link | None
    latency: float = 0.0
    into: int = 0


class TiedSum(NamedTuple):
    """The sum of a shared parameter's gradients between the groups of ranks that hold it: latency, and seconds on links."""

    groups: tuple[int, ...]
    latency: float
    wire: float


@dataclass(frozen=True, eq=False)
class Links:
    """All that crosses between the stages of a pipeline; ``rate``: on links so many times as fast."""

    pipe: Pipeline
    cluster: Cluster | None = None
    """None where there is one stage: nothing crosses."""
    rate: float = 1.0

    @cache  # noqa: B019 - they live as long as the step that is simulated
    def way(self, number: int, size: int, back: bool) -> Way:
        """How a tensor crosses between the ranks of two stages: what the busiest of them sends or receives."""
        one = self.pipe.boundaries[size][number]
        given, taken = (self.pipe.stages[stage].ranks for stage in (one.source, one.target)[:: -1 if back else 1])
        out, into, first = Counter[int](), Counter[int](), 0
        for parcel in one.parcels(back):
            source, target = given[parcel.source], taken[parcel.target]
            bytes_ = math.prod(parcel.shape) * DTYPE_BYTES[one.dtype]
            first += bytes_ if parcel.target == 0 else 0
            if source != target:
                out[source] += bytes_
                into[target] += bytes_
        if not out:
            return Way(0.0, 0, None, 0.0, first)
        busiest = max(*out.values(), *into.values())
        link = link_between(self.cluster, *((taken, given) if back else (given, taken)))
        sends = ((a, b) for kind, a, b in link.fits if kind == "send")
        latency, bandwidth = next(sends, (link.latency, link.bandwidth))
        return Way(latency + busiest / bandwidth / self.rate, busiest, link, latency, first)

    def received(self, action: Action) -> float:
        """Bytes of the buffers that a pass receives into."""
        size, back = self.pipe.micro.sizes[action.microbatch], action.kind != FORWARD
        return float(sum(self.way(number, size, back).into for number, _ in self.pipe.crossing(action, leaving=False)))

    def ties(self, program: Callable[[int], Program]) -> tuple[TiedSum, ...]:
        """The sums of shared parameters' gradients; ``program`` gives that of a stage."""
        return tuple(self._tie(name, owners, program(owners[0])) for name, owners in self.pipe.ties)

    def _tie(self, name: str, owners: Sequence[int], program: Program) -> TiedSum:
        pipe, flow = self.pipe, program.flow
        ranks = [rank for owner in owners for rank in pipe.stages[owner].ranks]
        link = link_between(self.cluster, ranks, ranks)
        most = max(sum(map(len, meeting)) for meeting in pipe.meetings(owners))
        axis = Axis("stages", most, link.latency, link.bandwidth, link.fits, ratios=link.ratios)
        size = flow.values[flow.rest[name]].local.bytes
        whole = float(collectives.all_reduce(size, axis))
        wire = min(float(collectives.all_reduce(size, axis.without_latency())), whole)
        return TiedSum(tuple(sorted({pipe.schedule.device_of[owner] for owner in owners})), whole - wire, wire)


def link_between(cluster: Cluster | None, sources: Sequence[int], targets: Sequence[int]) -> Link:
    """What joins two groups of ranks: the network as soon as they lie on several nodes."""
    assert cluster is not None, "several stages are on a cluster"
    nodes, first = set(), 0
    for number, node in enumerate(cluster.nodes):
        if any(first <= rank < first + node.devices for rank in (*sources, *targets)):
            nodes.add(number)
        first += node.devices
    alone = cluster.nodes[min(nodes)]
    return alone.link if len(nodes) == 1 else cluster.network.per_device(min(len(sources), alone.devices))
