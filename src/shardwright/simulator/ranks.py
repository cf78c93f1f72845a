"""One step of a pipeline on all kinds of ranks, event by event.

The ranks of a stage do the same at the same time, so one of them stands for all, and nothing grows with their number. Each
runs the passes of its device in the order of the schedule, every pass the priced instructions of its stage's program, on
streams that stay taken from pass to pass. A pass begins when what it receives has arrived. What it sends leaves along the
rank's link, one value after the other; a processor that communicates for itself computes more slowly meanwhile, at both
ends. When all passes of a rank are through and the loss is known, gradients are summed between replicas and between the
stages that share a parameter, and the optimizer runs. Ranks go on in the order of their clocks, which is exact but for one
thing: a value on its way slows down only those passes of the receiver that begin after it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from shardwright.cluster import Axis, Cluster, Link, Mesh
from shardwright.costs import collectives
from shardwright.costs.pricing import Event
from shardwright.graph.core import DTYPE_BYTES
from shardwright.program import COMPUTE, Kind, Program
from shardwright.program.pipeline import Pipeline
from shardwright.program.transfers import Border
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from shardwright.simulator.engine import Processor, Streams
from shardwright.simulator.timeline import processor_of

OUT = "to other stages"
"""The stream along which values leave a rank for other stages."""


class Trip(NamedTuple):
    """A value or a gradient between two devices of the schedule: when it leaves and arrives."""

    what: str
    microbatch: int
    source: int
    target: int
    bytes: int
    start: float
    end: float


class Closing(NamedTuple):
    """What a device does after its last pass: gradients home, then the optimizer; ``busy`` seconds of it at work."""

    start: float
    end: float
    busy: float


class _Way(NamedTuple):
    """How a border is crossed: seconds on the link (``latency`` of them whatever its rate), bytes of the busiest rank, the
    link (``None``: it stays on its rank)."""

    seconds: float
    bytes: int
    link: Link | None
    latency: float = 0.0


@dataclass(frozen=True, eq=False)
class StageEvents:
    """The priced events of one stage for micro-batches of one size, and which of them run once a step."""

    program: Program
    weights: int
    events: Sequence[Event]
    home: frozenset[int]

    @cached_property
    def passes(self) -> Mapping[str, tuple[int, ...]]:
        """The events of every kind of pass."""
        start, stop = self.program.forward.stop, len(self.events)
        ranges = {
            FORWARD: range(start),
            BACKWARD: range(start, stop),
            INPUT: range(start, self.weights),
            WEIGHT: range(self.weights, stop),
        }
        return {kind: tuple(n for n in numbers if n not in self.home) for kind, numbers in ranges.items()}

    def computed(self, numbers: Sequence[int]) -> float:
        """Seconds of computation in some of the events: none of their orders takes less."""
        return sum(self.events[n].seconds for n in numbers if self.events[n].stream == COMPUTE)

    @cached_property
    def closing(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What runs once a step: gradients on their way home; the update."""
        last = sorted(self.home)
        update = tuple(n for n in last if self.events[n].kind is Kind.UPDATE)
        return tuple(n for n in last if n not in update), update


@dataclass(eq=False)
class Played:
    """When everything ran, per device of the schedule; ``waited``: seconds a device idled while what it needed was on its
    way; ``exposed``: per stage, seconds inside its passes in which nothing was computed."""

    starts: list[list[float]]
    ends: list[list[float]]
    closing: list[Closing]
    trips: list[Trip]
    waited: list[float]
    exposed: list[float]

    @property
    def seconds(self) -> float:
        return max(one.end for one in self.closing)


def play(
    pipe: Pipeline,
    stages: Mapping[tuple[int, int], StageEvents],
    meshes: Sequence[Mesh],
    cluster: Cluster,
    rate: float = 1.0,
) -> Played:
    """Run one step. ``stages``: by number and size of micro-batch; ``rate``: links between stages so many times as fast.

    Example
    -------
    >>> play(pipe, stages, meshes, cluster).seconds                                              # doctest: +SKIP
    """
    return _Play(pipe, stages, meshes, cluster, rate).run()


def alone(pipe: Pipeline, stages: Mapping[tuple[int, int], StageEvents], mesh: Mesh, device: int) -> float:
    """Seconds of one device's passes and of the sums that follow, where nothing has to be waited for; no update."""
    streams, end = Streams(rank_processor(mesh)), 0.0
    sizes, done = pipe.micro.sizes, dict[tuple[int, int], list[float]]()
    for action in pipe.schedule.orders[device]:
        stage = stages[action.stage, sizes[action.microbatch]]
        ends = done.setdefault((action.stage, action.microbatch), [0.0] * len(stage.events))
        end = max(end, _run(streams, stage, stage.passes[action.kind], ends)[1])
    for number, where in enumerate(pipe.schedule.device_of):
        if where == device:
            stage = stages[number, max(sizes)]
            end = max(end, _run(streams, stage, stage.closing[0], [0.0] * len(stage.events))[1])
    return max(end, streams.clock)


def _run(streams: Streams, stage: StageEvents, numbers: Sequence[int], ends: list[float]) -> tuple[float, float, float]:
    """Run events; when the first starts, the last ends, and the seconds of those that compute."""
    first, last, computed = float("inf"), 0.0, 0.0
    for number in numbers:
        instruction, seconds, host = stage.events[number]
        ready = max([ends[n] for n in instruction.after], default=0.0)
        start, end = streams.place(instruction.stream, seconds, host, ready)
        ends[number] = end
        if end > start:
            first, last = min(first, start), max(last, end)
            computed += end - start if instruction.stream == COMPUTE else 0.0
    return first, last, computed


@dataclass(eq=False)
class _Play:
    pipe: Pipeline
    stages: Mapping[tuple[int, int], StageEvents]
    meshes: Sequence[Mesh]
    cluster: Cluster
    rate: float = 1.0
    arrived: dict[tuple[int, int, bool], tuple[float, float]] = field(default_factory=dict)
    """By border, micro-batch and direction, when it left and when it arrived."""
    done: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """By stage and micro-batch, when the events of its passes ended."""

    def run(self) -> Played:
        orders, device_of = self.pipe.schedule.orders, self.pipe.schedule.device_of
        count = len(orders)
        first = [device_of.index(device) for device in range(count)]
        self.streams = [Streams(rank_processor(self.meshes[stage])) for stage in first]
        self.played = Played([[] for _ in orders], [[] for _ in orders], [], [], [0.0] * count, [0.0] * len(device_of))
        self.now = [0.0] * count
        heads, blocked = [0] * count, set(range(count))
        ready: list[tuple[float, int, list[tuple[float, float]]]] = []
        while True:
            for device in sorted(blocked):
                order = orders[device]
                if heads[device] < len(order) and (needs := self._needs(order[heads[device]])) is not None:
                    begins = max([self.now[device], *(arrival for _, arrival in needs)])
                    heappush(ready, (begins, device, needs))
                    blocked.discard(device)
            if not ready:
                break
            begins, device, needs = heappop(ready)
            self._pass(device, orders[device][heads[device]], begins, needs)
            heads[device] += 1
            blocked.add(device)
        assert all(head == len(order) for head, order in zip(heads, orders, strict=True))  # check() has proved it
        self._close()
        return self.played

    # -- passes -------------------------------------------------------------------------------------------------------

    def _borders(self, action: Action, leaving: bool) -> Sequence[tuple[int, Border]]:
        """What a pass sends, or what it waits for."""
        if action.kind == WEIGHT:
            return ()
        back = action.kind != FORWARD
        source = leaving != back
        return self._crossed.get((self.pipe.micro.sizes[action.microbatch], action.stage, source, back), ())

    @cached_property
    def _crossed(self) -> Mapping[tuple[int, int, bool, bool], list[tuple[int, Border]]]:
        """By size of micro-batch and stage: what it makes or reads, and of that what gradients come back for."""
        found: dict[tuple[int, int, bool, bool], list[tuple[int, Border]]] = {}
        for size, borders in self.pipe.borders.items():
            for number, one in enumerate(borders):
                for stage, source in ((one.source, True), (one.target, False)):
                    for back in (False, True) if one.grad else (False,):
                        found.setdefault((size, stage, source, back), []).append((number, one))
        return found

    def _needs(self, action: Action) -> list[tuple[float, float]] | None:
        """When what a pass reads left and arrived; nothing where it has not been sent yet."""
        found = []
        for number, _ in self._borders(action, leaving=False):
            key = (number, action.microbatch, action.kind != FORWARD)
            if key not in self.arrived:
                return None
            found.append(self.arrived[key])
        return found

    def _pass(self, device: int, action: Action, begins: float, needs: list[tuple[float, float]]) -> None:
        streams, played = self.streams[device], self.played
        played.waited[device] += max(
            (begins - max(self.now[device], left) for left, arrival in needs if arrival >= begins), default=0.0
        )
        streams.free[COMPUTE] = max(streams.free.get(COMPUTE, 0.0), begins)
        if streams.processor is not None:  # who computes also waits
            streams.clock = max(streams.clock, begins)
        stage = self.stages[action.stage, self.pipe.micro.sizes[action.microbatch]]
        key = (action.stage, action.microbatch)
        ends = self.done.setdefault(key, [0.0] * len(stage.events))
        start, end, computed = _run(streams, stage, stage.passes[action.kind], ends)
        start, end = (begins, begins) if start > end else (start, end)
        if action.kind in (BACKWARD, WEIGHT):
            del self.done[key]
        played.starts[device].append(start)
        played.ends[device].append(end)
        if self.meshes[action.stage].devices > 1:
            played.exposed[action.stage] += max(end - start - computed, 0.0)
        self.now[device] = end
        self._send(device, action, end)

    def _send(self, device: int, action: Action, at: float) -> None:
        back = action.kind != FORWARD
        for number, one in self._borders(action, leaving=True):
            target = self.pipe.schedule.device_of[one.source if back else one.target]
            way = self._way(number, self.pipe.micro.sizes[action.microbatch], back)
            start, end = at, at
            if way.link is not None:
                start, end = self.streams[device].place(OUT, way.seconds, 0.0, at)
                what = f"gradient of {one.tensor}" if back else one.tensor
                self.played.trips.append(Trip(what, action.microbatch, device, target, way.bytes, start, end))
                for streams in (self.streams[device], self.streams[target]):
                    if streams.processor is not None:
                        streams.disturb(start, end, way.link.processor_share, way.link.processor_seconds)
            self.arrived[number, action.microbatch, back] = (at, end)

    def _way(self, number: int, size: int, back: bool) -> _Way:
        key = (number, size, back)
        if key not in self._ways:
            one = self.pipe.borders[size][number]
            ends = [self.pipe.stages[stage].ranks for stage in (one.source, one.target)]
            self._ways[key] = way_of(one, back, self.cluster, *ends, rate=self.rate)
        return self._ways[key]

    @cached_property
    def _ways(self) -> dict[tuple[int, int, bool], _Way]:
        return {}

    # -- what happens once a step ---------------------------------------------------------------------------------------

    def _close(self) -> None:
        device_of, largest = self.pipe.schedule.device_of, max(self.pipe.micro.sizes)
        loss = device_of[-1]
        known = self.now[loss]
        begins, summed = [], []
        for device, streams in enumerate(self.streams):
            start = max(self.now[device], known)  # the loss is told when the passes of its stage are through
            begins.append(start)
            streams.free[COMPUTE] = max(streams.free.get(COMPUTE, 0.0), start)
            streams.clock = max(streams.clock, start) if streams.processor is not None else streams.clock
            end = start
            for stage in (s for s, where in enumerate(device_of) if where == device):
                events = self.stages[stage, largest]
                end = max(end, _run(streams, events, events.closing[0], [0.0] * len(events.events))[1])
            summed.append(end)
        busy = [end - start for start, end in zip(begins, summed, strict=True)]
        for name, owners in self.pipe.ties:
            devices = sorted({device_of[owner] for owner in owners})
            latency, wire = tie_parts(self.pipe, self.stages, self.cluster, name, owners)
            seconds = latency + wire / self.rate
            end = max(summed[device] for device in devices) + seconds
            for device in devices:
                summed[device], busy[device] = end, busy[device] + seconds
        for device, streams in enumerate(self.streams):
            streams.free[COMPUTE] = max(streams.free.get(COMPUTE, 0.0), summed[device])
            end = summed[device]
            for stage in (s for s, where in enumerate(device_of) if where == device):
                events = self.stages[stage, largest]
                end = max(end, _run(streams, events, events.closing[1], [0.0] * len(events.events))[1])
            self.played.closing.append(Closing(begins[device], end, busy[device] + end - summed[device]))


def tie_parts(
    pipe: Pipeline,
    stages: Mapping[tuple[int, int], StageEvents],
    cluster: Cluster,
    name: str,
    owners: Sequence[int],
) -> tuple[float, float]:
    """Seconds of the sum of a shared parameter's gradients between the stages that hold it: latency, and bytes on links."""
    ranks = [rank for owner in owners for rank in pipe.stages[owner].ranks]
    flow = stages[owners[0], max(pipe.micro.sizes)].program.flow
    link = link_between(cluster, ranks, ranks)
    most = max(sum(map(len, meeting)) for meeting in pipe.meetings(owners))
    axis = Axis("stages", most, link.latency, link.bandwidth, link.fits, ratios=link.ratios)
    size = flow.values[flow.rest[name]].local.bytes
    whole = float(collectives.all_reduce(size, axis))
    wire = min(float(collectives.all_reduce(size, axis.without_latency())), whole)
    return whole - wire, wire


def way_of(
    one: Border, back: bool, cluster: Cluster, sources: Sequence[int], targets: Sequence[int], *, rate: float = 1.0
) -> _Way:
    """How a border is crossed between the ranks of two stages: what the busiest of them sends or receives."""
    parcels = one.gradients if back else one.values
    given, taken = (targets, sources) if back else (sources, targets)
    out: dict[int, int] = {}
    into: dict[int, int] = {}
    for parcel in parcels:
        source, target = given[parcel.source], taken[parcel.target]
        if source != target:
            size = parcel.elements * DTYPE_BYTES[one.dtype]
            out[source] = out.get(source, 0) + size
            into[target] = into.get(target, 0) + size
    if not out:
        return _Way(0.0, 0, None)
    busiest = max(*out.values(), *into.values())
    link = link_between(cluster, sources, targets)
    latency, bandwidth = next(((a, b) for kind, a, b in link.fits if kind == "send"), (link.latency, link.bandwidth))
    return _Way(latency + busiest / bandwidth / rate, busiest, link, latency)


def link_between(cluster: Cluster, sources: Sequence[int], targets: Sequence[int]) -> Link:
    """What joins two groups of ranks: the network as soon as they lie on several nodes."""
    nodes, first = set(), 0
    for number, node in enumerate(cluster.nodes):
        if any(first <= rank < first + node.devices for rank in (*sources, *targets)):
            nodes.add(number)
        first += node.devices
    alone = cluster.nodes[min(nodes)]
    return alone.link if len(nodes) == 1 else cluster.network.per_device(min(len(sources), alone.devices))


def rank_processor(mesh: Mesh) -> Processor | None:
    """A CPU sends and receives for itself, also where its stage has it alone."""
    if mesh.device.kind != "cpu":
        return None
    return processor_of(mesh) or Processor(COMPUTE, {})
