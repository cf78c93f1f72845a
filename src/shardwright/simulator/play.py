"""One step on all kinds of ranks, event by event: the one loop behind every prediction of seconds.

The ranks of a stage do the same at the same time, so one of them stands for all, and nothing grows with their number. Each
runs the passes of its group in the order of the schedule, every pass the priced instructions of its stage's program, on
streams that stay taken from pass to pass. A pass begins when what it receives has arrived. What it sends leaves along the
rank's link, one value after the other; a processor that communicates for itself computes more slowly meanwhile, at both
ends. Gradients that are reduced apart are so when all passes of a rank are through and the loss is known, then summed
between the stages that share a parameter; then the optimizer runs. Ranks go on in the order of their clocks, which is exact
but for one thing: a value on its way slows down only those passes of the receiver that begin after it was sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from shardwright.program import COMPUTE
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.schedules import BACKWARD, FORWARD, WEIGHT, Action
from shardwright.simulator.engine import Streams
from shardwright.simulator.links import Links
from shardwright.simulator.stages import PricedStage, processor_of

OUT = "to other stages"
"""The stream along which values leave a rank for other stages."""


class Trip(NamedTuple):
    """A value or a gradient between two groups of ranks: when it leaves and arrives."""

    what: str
    microbatch: int
    source: int
    target: int
    bytes: int
    start: float
    end: float


class PlayedPass(NamedTuple):
    """A pass of a rank, or what follows the last (``R``, ``U``): from its first event to its last, and when each of its
    events started, ended and was issued."""

    action: Action
    start: float
    end: float
    stage: PricedStage
    starts: array[float]
    ends: array[float]
    issued: array[float]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its events."""
        return self.stage.passes[self.action.kind]

    @property
    def once(self) -> bool:
        """Whether it follows the passes of the schedule."""
        return self.action.kind in (REDUCE, UPDATE)


class Closing(NamedTuple):
    """What a group does after its last pass: gradients reduced, then the optimizer; ``busy`` seconds of it at work."""

    start: float
    end: float
    busy: float


@dataclass(eq=False)
class Played:
    """When everything ran, per group of ranks; ``waits``: spans in which a group idled while what it needed was on its way,
    with the stage that needed it."""

    passes: list[list[PlayedPass]]
    closing: list[Closing]
    trips: list[Trip]
    waits: list[list[tuple[float, float]]]

    @property
    def seconds(self) -> float:
        return max(one.end for one in self.closing)


def play(stages: Mapping[tuple[int, int], PricedStage], links: Links) -> Played:
    """Run one step. ``stages``: by number and size of microbatch.

    Example
    -------
    >>> play(price_stages(pipe, meshes, decisions, "adamw"), Links(pipe, cluster)).seconds       # doctest: +SKIP
    """
    return _Play(stages, links).run()


def alone(stages: Mapping[tuple[int, int], PricedStage], links: Links, group: int) -> float:
    """Seconds of one group's passes and of the reductions that follow, where nothing has to be waited for; no update."""
    pipe = links.pipe
    sizes, device_of = pipe.micro.sizes, pipe.schedule.device_of
    streams = Streams(processor_of(stages[device_of.index(group), max(sizes)].mesh))
    end, done = 0.0, dict[tuple[int, int], list[float]]()
    mine = [(stage, REDUCE, len(sizes)) for stage, where in enumerate(device_of) if where == group]
    for number, kind, microbatch in (*pipe.schedule.orders[group], *mine):
        stage = stages[number, sizes[microbatch] if microbatch < len(sizes) else max(sizes)]
        ends = done.setdefault((number, microbatch), [0.0] * len(stage.rows))
        streams.run(stage.rows, stage.passes[kind], ends)
        end = max([end, *(ends[n] for n in stage.passes[kind])])
    return max(end, streams.clock)


@dataclass(eq=False)
class _Play:
    stages: Mapping[tuple[int, int], PricedStage]
    links: Links
    arrived: dict[tuple[int, int, bool], tuple[float, float]] = field(default_factory=dict)
    """By boundary, microbatch and direction, when it left and when it arrived."""
    done: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """By stage and microbatch, when the events of its passes ended."""

    def run(self) -> Played:
        self.pipe = self.links.pipe
        self.sizes, self.device_of = self.pipe.micro.sizes, self.pipe.schedule.device_of
        orders = self.pipe.schedule.orders
        first = [self.stages[self.device_of.index(group), max(self.sizes)] for group in range(len(orders))]
        self.streams = [Streams(processor_of(stage.mesh)) for stage in first]
        self.played = Played([[] for _ in orders], [], [], [[] for _ in orders])
        self.now = [0.0] * len(orders)
        heads, blocked = [0] * len(orders), set(range(len(orders)))
        ready: list[tuple[float, int, list[tuple[float, float]]]] = []
        while True:
            for group in sorted(blocked):
                order = orders[group]
                if heads[group] < len(order) and (needs := self._needs(order[heads[group]])) is not None:
                    begins = max([self.now[group], *(arrival for _, arrival in needs)])
                    heappush(ready, (begins, group, needs))
                    blocked.discard(group)
            if not ready:
                break
            begins, group, needs = heappop(ready)
            self._pass(group, orders[group][heads[group]], begins, needs)
            heads[group] += 1
            blocked.add(group)
        assert all(head == len(order) for head, order in zip(heads, orders, strict=True))  # check() has proved it
        self._close()
        return self.played

    def _needs(self, action: Action) -> list[tuple[float, float]] | None:
        """When what a pass reads left and arrived; nothing where it has not been sent yet."""
        found = []
        for number, _ in self.links.pipe.crossing(action, leaving=False):
            key = (number, action.microbatch, action.kind != FORWARD)
            if key not in self.arrived:
                return None
            found.append(self.arrived[key])
        return found

    def _pass(self, group: int, action: Action, begins: float, needs: list[tuple[float, float]]) -> None:
        waited = max((begins - max(self.now[group], left) for left, at in needs if at >= begins), default=0.0)
        if waited > 0:
            self.played.waits[group].append((begins - waited, begins))
        if needs:
            self.streams[group].wait(COMPUTE, begins)
        stage = self.stages[action.stage, self.sizes[action.microbatch]]
        key = (action.stage, action.microbatch)
        ends = self.done.setdefault(key, [0.0] * len(stage.rows))
        end = self._run(group, action, stage, ends, begins)
        if action.kind in (BACKWARD, WEIGHT) and not self.pipe.reduces_inside:
            del self.done[key]
        self.now[group] = end
        self._send(group, action, end)

    def _run(self, group: int, action: Action, stage: PricedStage, ends: list[float], begins: float) -> float:
        """Run the events of a pass; when the last of them ends."""
        numbers = stage.passes[action.kind]
        starts, issued = self.streams[group].run(stage.rows, numbers, ends)
        own = [ends[n] for n in numbers]
        spans = [(start, end) for start, end in zip(starts, own, strict=True) if end > start]
        start, end = (min(s for s, _ in spans), max(e for _, e in spans)) if spans else (begins, begins)
        packed = (array("d", row) for row in (starts, own, issued))  # there may be millions
        self.played.passes[group].append(PlayedPass(action, start, end, stage, *packed))
        return end

    def _send(self, group: int, action: Action, at: float) -> None:
        back = action.kind != FORWARD
        for number, one in self.links.pipe.crossing(action, leaving=True):
            target = self.device_of[one.source if back else one.target]
            way = self.links.way(number, self.sizes[action.microbatch], back)
            start, end = at, at
            if way.link is not None:
                start, end = self.streams[group].place(OUT, way.seconds, 0.0, at)
                what = f"gradient of {one.tensor}" if back else one.tensor
                self.played.trips.append(Trip(what, action.microbatch, group, target, way.bytes, start, end))
                for streams in (self.streams[group], self.streams[target]):
                    if streams.processor is not None:
                        streams.disturb(start, end, way.link.processor_share, way.link.processor_seconds)
            self.arrived[number, action.microbatch, back] = (at, end)

    # -- what happens once a step ---------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Gradients that are reduced apart, sums between stages, the optimizer."""
        largest, known = max(self.sizes), self.now[self.device_of[-1]]
        mine: list[list[int]] = [[] for _ in self.streams]
        for stage, group in enumerate(self.device_of):
            mine[group].append(stage)
        begins, summed = [], []
        for group, streams in enumerate(self.streams):
            start = self.now[group]
            if any(self.stages[stage, largest].passes[REDUCE] for stage in mine[group]):
                start = max(start, known)  # the loss is told when the passes of its stage are through
                streams.wait(COMPUTE, start)
            begins.append(start)
            summed.append(max([start, *(self._once(group, REDUCE, stage, start) for stage in mine[group])]))
        busy = [end - start for start, end in zip(begins, summed, strict=True)]
        for groups, latency, wire in self.links.ties(lambda stage: self.stages[stage, largest].program):
            seconds = latency + wire / self.links.rate
            end = max(summed[group] for group in groups) + seconds
            for group in groups:
                summed[group], busy[group] = end, busy[group] + seconds
                self.streams[group].wait(COMPUTE, end)
        for group, end in enumerate(summed):
            last = max([end, *(self._once(group, UPDATE, stage, end) for stage in mine[group])])
            last = max(last, self.streams[group].clock)
            self.played.closing.append(Closing(begins[group], last, busy[group] + last - end))

    def _once(self, group: int, kind: str, stage: int, begins: float) -> float:
        """Run what follows the passes of a stage; when it ends."""
        priced = self.stages[stage, max(self.sizes)]
        if not priced.passes[kind]:
            return begins
        key = (stage, 0 if self.pipe.reduces_inside else len(self.sizes))
        ends = self.done.setdefault(key, [0.0] * len(priced.rows))
        return self._run(group, Action(stage, kind, key[1]), priced, ends, begins)
