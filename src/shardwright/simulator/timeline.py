"""A simulated step of a plan: ``simulate`` and ``simulate_plan``, and the timeline that they leave.

Compute and every mesh axis have a stream of their own; gathers ahead of use and reductions of gradients overlap with
computation as far as the order of issue and the dependencies allow. All ranks of a stage do the same at the same time, so
one of them stands for all. A plan on one mesh is one stage that takes the batch in one go, and is played by the same loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.cluster import Mesh
from shardwright.costs.passes import beside_passes, once_a_step
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.costs.pricing import Event
from shardwright.errors import LoweringError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan, Stage, StagePrediction
from shardwright.plans.stages import one_pass
from shardwright.program import Decisions
from shardwright.program.pipeline import Pipeline
from shardwright.schedules import Timing, run
from shardwright.simulator.engine import lower_bound
from shardwright.simulator.links import Links
from shardwright.simulator.play import Played, PlayedPass, play
from shardwright.simulator.stages import PricedStage, load_of, price_stages, work_of
from shardwright.simulator.what_if import BETWEEN, WhatIf, link_names, not_so_many, orders_like, pipeline_like


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """Everything that one rank of a group does in a step of so many ``seconds``, in the order of issue, and when."""

    passes: Sequence[PlayedPass]
    seconds: float
    waits: Sequence[tuple[float, float]] = ()
    """Spans in which what it needed was on its way."""

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events; each waits for earlier ones of these only."""
        (first, *others) = self.passes
        numbers = [number for one in self.passes for number in one.numbers]
        if all(one.stage is first.stage for one in others) and numbers == [*range(len(first.stage.events))]:
            return first.stage.events
        place: dict[tuple[int, int, int], int] = {}
        latest: dict[tuple[int, int], int] = {}
        found: list[Event] = []
        for one in self.passes:
            stage, _, microbatch = one.action
            for number in one.numbers:
                event = one.stage.events[number]
                there = [place.get((stage, microbatch, n), latest.get((stage, n), -1)) for n in event.after]
                after = tuple(n for n in there if n >= 0)
                place[stage, microbatch, number] = latest[stage, number] = len(found)
                found.append(event._replace(instruction=event.instruction._replace(after=after)))
        return tuple(found)

    @cached_property
    def starts(self) -> tuple[float, ...]:
        return tuple(second for one in self.passes for second in one.starts)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        return tuple(second for one in self.passes for second in one.ends)

    @cached_property
    def issued(self) -> tuple[float, ...]:
        """When the host had issued each."""
        return tuple(second for one in self.passes for second in one.issued)

    @cached_property
    def lower_bound(self) -> float:
        """No schedule of these events is shorter."""
        return lower_bound(self.events)

    @cached_property
    def load(self) -> dict[str, float]:
        """Seconds each stream works."""
        return load_of((one.stage, one.numbers) for one in self.passes)

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the step each stream works."""
        return {stream: seconds / self.seconds if self.seconds else 0.0 for stream, seconds in self.load.items()}

    def exposed(self, stage: int | None = None) -> float:
        """Seconds in which something communicates, or is waited for, and nothing computes; of one stage's passes alone, if
        it is given, and of what all of the group wait for."""
        starts, ends, computes, stages = self._spans
        talk = ~computes if stage is None else ~computes & (stages == stage)
        waits = np.array(self.waits).reshape(-1, 2)
        spans = _merged(np.concatenate([starts[talk], waits[:, 0]]), np.concatenate([ends[talk], waits[:, 1]]))
        return sum(end - start for start, end in spans) - _common(spans, self._computing)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, ...]:
        """Of every event that takes any time: its start, its end, whether it computes, its stage."""
        starts = np.concatenate([np.frombuffer(one.starts) for one in self.passes])
        ends = np.concatenate([np.frombuffer(one.ends) for one in self.passes])
        computes = np.concatenate([one.stage.computes[one.action.kind] for one in self.passes])
        stages = np.concatenate([np.full(len(one.starts), one.action.stage) for one in self.passes])
        there = ends > starts
        return starts[there], ends[there], computes[there], stages[there]

    @cached_property
    def _computing(self) -> list[tuple[float, float]]:
        starts, ends, computes, _ = self._spans
        return _merged(starts[computes], ends[computes])


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step: when every pass ran on every group of ranks, and what each of them holds.

    Groups are those of the schedule: the ranks of one mesh. A plan on one mesh has one.
    """

    pipeline: Pipeline
    times: Mapping[tuple[int, int], PricedStage]
    """By stage and size of microbatch."""
    links: Links
    played: Played

    @property
    def seconds(self) -> float:
        """From the start of everything to the end of everything."""
        return self.played.seconds

    @property
    def groups(self) -> int:
        return self.pipeline.schedule.devices

    @cached_property
    def largest(self) -> int:
        """Rows of the largest microbatch."""
        return max(self.pipeline.micro.sizes)

    def stage(self, number: int = 0) -> PricedStage:
        """A stage for the largest microbatch."""
        return self.times[number, self.largest]

    @cached_property
    def ranks(self) -> tuple[RankTimeline, ...]:
        """One rank of every group."""
        rows = zip(self.played.passes, self.played.waits, strict=True)
        return tuple(RankTimeline(passes, self.seconds, waits) for passes, waits in rows)

    @cached_property
    def timing(self) -> Timing:
        """The passes of every group in time, without what follows them."""
        planned = run(self.pipeline.schedule, work_of(self.links, self.times))
        passes = [[one for one in row if not one.once] for row in self.played.passes]
        starts = tuple(np.array([one.start for one in row]) for row in passes)
        return replace(planned, starts=starts, ends=tuple(np.array([one.end for one in row]) for row in passes))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per group, the seconds of its passes and of what follows them."""
        return tuple(
            sum(one.end - one.start for one in row if not one.once) + closing.busy
            for row, closing in zip(self.played.passes, self.played.closing, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The share of all groups' time in which they neither compute nor communicate inside a stage."""
        return max(0.0, 1.0 - sum(self.busy) / (self.seconds * self.groups))

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Per group, bytes that one of its ranks must have."""
        return tuple(self._needed(group) for group in range(self.groups))

    def _needed(self, group: int) -> float:
        schedule, sizes = self.pipeline.schedule, self.pipeline.micro.sizes
        planned = self.stage(schedule.device_of.index(group)).planned
        if planned is not None:
            return float(planned)
        beside, last = self.beside(group)
        rows = zip(schedule.orders[group], beside, strict=True)
        return max(last, *(b + self.times[a.stage, sizes[a.microbatch]].bytes.peaks[a.kind] for a, b in rows))

    def beside(self, group: int) -> tuple[list[float], float]:
        """Bytes on a rank beside what is inside each of its passes, and the most after the last of them."""
        sizes = self.pipeline.micro.sizes
        return beside_passes(
            self.pipeline.schedule.orders[group],
            lambda stage, microbatch: self.times[stage, sizes[microbatch]].bytes,
            len(sizes),
            self.links.received,
        )

    @property
    def peak_bytes(self) -> float:
        """Bytes that the device of any rank must have."""
        return max(self.memory)

    def memory_curve(self, group: int = 0) -> list[tuple[float, float]]:
        """Bytes on a rank of a group, event by event as they are issued, and in the end what rests: (second, bytes)."""
        beside, last = self.beside(group)
        curve: list[tuple[float, float]] = []
        now, rests = 0.0, 0.0
        for number, one in enumerate(self.played.passes[group]):
            held = one.stage.bytes
            apart = one.once and bool(once_a_step(one.stage.program))
            there = beside[min(number, len(beside) - 1)]
            for event, start in zip(one.numbers, one.starts, strict=True):
                now = max(now, start)
                curve.append((now, last if apart else there + float(held.inside[event])))
        for stage in dict.fromkeys(action.stage for action in self.pipeline.schedule.orders[group]):
            rests += self.stage(stage).bytes.resting
        return [*curve, (self.played.closing[group].end, rests)]

    @cached_property
    def stages(self) -> tuple[StagePrediction, ...]:
        """What is predicted of every stage; what its group waits for counts for each of the group's stages."""
        found = []
        for stage, group in enumerate(self.pipeline.schedule.device_of):
            passes = (one for one in self.played.passes[group] if not one.once)
            own = sum(one.end - one.start for one in passes if one.action.stage == stage)
            busy = own + self.played.closing[group].busy
            idle = max(0.0, 1.0 - self.busy[group] / self.seconds)
            found.append(StagePrediction(busy, idle, self.ranks[group].exposed(stage), self.memory[group]))
        return tuple(found)

    @cached_property
    def exposed_seconds(self) -> float:
        """Seconds in which a rank communicates and does not compute, where that is most."""
        return max(rank.exposed() for rank in self.ranks)

    @cached_property
    def sum_seconds(self) -> float:
        """The plain sum of all that a rank does, where that is most: no event hidden behind another."""
        return max(sum(one.stage.rows[n][1] for one in row for n in one.numbers) for row in self.played.passes)

    @cached_property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends to other stages, where that is most."""
        return float(max(self._sent))

    @cached_property
    def communication_bytes(self) -> float:
        """Bytes that one rank's collectives are about and that it sends to other stages, where that is most."""
        inside = [sum(one.stage.events[n].bytes for one in row for n in one.numbers) for row in self.played.passes]
        return float(max(a + b for a, b in zip(inside, self._sent, strict=True)))

    @cached_property
    def _sent(self) -> list[int]:
        sent = [0] * self.groups
        for trip in self.played.trips:
            sent[trip.source] += trip.bytes
        return sent


def simulate(
    graph: Graph,
    strategy: Strategy,
    mesh: Mesh,
    training: bool = True,
    optimizer: str = "adamw",
    decisions: Decisions | None = None,
    what_if: WhatIf | None = None,
    coordinate: Sequence[int] | None = None,
) -> Timeline:
    """Simulate one step of ``graph`` split by ``strategy`` on ``mesh``: one stage that takes the batch in one go.

    ``decisions`` are those of a plan; without any, prices decide. It is the rank with the largest pieces that is simulated,
    or the one at ``coordinate``; where rows are dealt out between unlike devices, the slowest of them. ``what_if`` asks for
    the same step at other speeds.

    Example
    -------
    >>> timeline = simulate(graph, strategy, mesh)                                               # doctest: +SKIP
    >>> timeline.seconds, timeline.exposed_seconds, timeline.ranks[0].utilisation["compute"]     # doctest: +SKIP
    """
    mesh = mesh.with_shares(strategy.shares)
    if what_if is not None:
        what_if.check([axis.name for axis in mesh.axes])
    pipe = Pipeline.of(graph, (Stage.of(graph, strategy),), 1, one_pass(training))
    decided = [PricedDecisions(mesh) if decisions is None else decisions]
    times = price_stages(pipe, [mesh], decided, optimizer, what_if, coordinate=coordinate)
    return simulated(times, Links(pipe))


def simulated(times: Mapping[tuple[int, int], PricedStage], links: Links) -> Timeline:
    """One step whose stages are priced."""
    return Timeline(links.pipe, times, links, play(times, links))


def simulate_plan(
    plan: Plan, graph: Graph, *, what_if: WhatIf | None = None, microbatches: int | None = None
) -> Timeline:
    """Simulate one step of a plan on all kinds of its ranks, with what it decided about routes and sums.

    ``what_if`` asks for other speeds; its link rates are those of the axes inside stages, and of ``stages``: the links
    between them. ``microbatches`` asks for another number of them: the order of passes is then the same recipe's for so
    many, or, where the plan's order was searched for, the fastest of the known ones at the plan's prices.

    Raises
    ------
    ShardwrightError
        When the batch, an operator or the schedule does not allow that many microbatches.

    Example
    -------
    >>> simulate_plan(plan, plan.graph()).seconds                                                # doctest: +SKIP
    >>> simulate_plan(plan, plan.graph(), microbatches=32).bubble                                # doctest: +SKIP
    """
    if what_if is not None:
        what_if.check(link_names(plan))
    meshes, count = plan.meshes, plan.microbatches if microbatches is None else microbatches
    decided = [replace(s.decisions, otherwise=PricedDecisions(m)) for s, m in zip(plan.stages, meshes, strict=True)]
    orders = [plan.schedule] if count == plan.microbatches else orders_like(plan.schedule, count)
    pipe = pipeline_like(plan, graph, count, orders[0])
    try:
        if len(orders) > 1:
            work = work_of(Links(pipe, plan.cluster), price_stages(pipe, meshes, decided, plan.optimizer, split=True))
            pipe = replace(pipe, schedule=min(orders, key=lambda order: run(order, work).makespan))
        if count != plan.microbatches and pipe.micro.tail is not None:
            pipe = replace(pipe, schedule=pipe.schedule.forwards_first())
        times = price_stages(pipe, meshes, decided, plan.optimizer, what_if)
    except LoweringError as error:
        if count == plan.microbatches:
            raise
        raise not_so_many(count, pipe.micro.sizes, error.message) from None
    rate = 1.0 if what_if is None else what_if.link_rates.get(BETWEEN, 1.0)
    return simulated(times, Links(pipe, plan.cluster, rate))


def _merged(starts: np.ndarray, ends: np.ndarray) -> list[tuple[float, float]]:
    """Spans that touch as one, in order."""
    order = np.lexsort((ends, starts))
    begun, until = starts[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(begun[1:] > until[:-1])  # a gap follows these
    firsts, lasts = np.concatenate([[0], apart + 1]), np.concatenate([apart, [len(order) - 1]])
    return [*zip(begun[firsts].tolist(), until[lasts].tolist(), strict=True)] if len(order) else []


def _common(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Length of the intersection of two sorted lists of disjoint spans."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
