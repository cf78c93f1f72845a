"""A step of a pipeline, simulated on all kinds of ranks, and what is told of it.

The passes of a stage are simulated by themselves first: how long they take and what a micro-batch leaves in memory between
them is what schedulers and the joint search work with (:func:`stage_times`). A step is then played on all devices of the
schedule together, event by event (:mod:`~shardwright.simulator.ranks`): that is the step time, the bubble, the exposed
communication and the memory of every stage that tables and traces show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.cluster import Cluster, Mesh
from shardwright.costs.deciding import ByPrice
from shardwright.costs.host_runtime import RUNTIME, with_runtime
from shardwright.costs.pricing import Event, price
from shardwright.errors import LoweringError
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.plans import Plan, StagePrediction
from shardwright.program import Decisions, Program
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.program.passes import reduced_apart
from shardwright.program.pipeline import Pipeline
from shardwright.program.recording import random_nodes
from shardwright.schedules import FORWARD, INPUT, WEIGHT, Action, Edge, Timing, pipeline, run
from shardwright.schedules import Pipeline as Work
from shardwright.simulator.engine import run as run_events
from shardwright.simulator.held import StageBytes, gradient_bytes, stage_bytes
from shardwright.simulator.ranks import Played, StageEvents, play, way_of
from shardwright.simulator.timeline import processor_of, unlike_places
from shardwright.simulator.variants import BETWEEN, check_links, not_so_many, orders_like
from shardwright.simulator.what_if import WhatIf, scaled


@dataclass(frozen=True, eq=False)
class PassTimes:
    """Seconds of the passes of one micro-batch through a stage, simulated alone on its slowest rank, and what it holds.

    ``closing`` are the seconds of what follows the last backward pass.
    """

    forward: float
    inputs: float
    weights: float
    closing: float
    bytes: StageBytes
    events: StageEvents

    @property
    def resting(self) -> float:
        """Bytes that no order of the passes changes: gradients are there for most of the step."""
        return self.bytes.resting + self.bytes.kept

    @cached_property
    def least(self) -> PassTimes:
        """The same where nothing but computation takes time: what no order of the passes undercuts."""
        kinds = (self.events.passes[kind] for kind in (FORWARD, INPUT, WEIGHT))
        forward, inputs, weights = (self.events.computed(numbers) for numbers in kinds)
        return PassTimes(
            forward, inputs, weights, self.events.computed(self.events.closing[1]), self.bytes, self.events
        )

    @property
    def working(self) -> float:
        return self.bytes.working

    @property
    def held(self) -> float:
        return self.bytes.held

    @property
    def held_for_weights(self) -> float:
        return self.bytes.held_for_weights


@dataclass(frozen=True, eq=False)
class PipelineTimeline:
    """A simulated step of a pipeline: when every pass ran on every device (``timing``), and all the rest (``played``)."""

    pipeline: Pipeline
    timing: Timing
    times: Mapping[tuple[int, int], PassTimes]
    """By stage and size of micro-batch."""
    played: Played

    @property
    def seconds(self) -> float:
        """From the start of everything to the end of everything."""
        return self.played.seconds

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per device, the seconds of its passes and of what follows them."""
        spans = zip(self.played.starts, self.played.ends, self.played.closing, strict=True)
        return tuple(sum(e - s for s, e in zip(a, b, strict=True)) + c.busy for a, b, c in spans)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they neither compute nor communicate inside a stage."""
        return max(0.0, 1.0 - sum(self.busy) / (self.seconds * self.timing.schedule.devices))

    @cached_property
    def memory(self) -> tuple[float, ...]:
        """Per device, bytes on one of its ranks at the worst moment."""
        return tuple(max(b for _, b in self.memory_curve(d)) for d in range(self.timing.schedule.devices))

    def memory_curve(self, device: int) -> list[tuple[float, float]]:
        """Bytes on a rank of a device at the worst moment of each of its passes, and after them: (second, bytes)."""
        sizes, largest = self.pipeline.micro.sizes, max(self.pipeline.micro.sizes)
        mine = [self.times[stage, largest].bytes for stage in self.timing.pipeline.stages_of(device)]
        there = sum(one.resting for one in mine)
        held: dict[tuple[int, int], float] = {}
        kept: dict[int, float] = {}
        curve = []
        order = self.timing.schedule.orders[device]
        for number, (action, start) in enumerate(zip(order, self.played.starts[device], strict=True)):
            stage, kind, microbatch = action
            here = self.times[stage, sizes[microbatch]].bytes
            if kind != FORWARD and len(sizes) > 1:
                kept[stage] = here.kept
            others = sum(size for key, size in held.items() if key != (stage, microbatch))
            posted = self._receives(order[number + 1]) if number + 1 < len(order) else 0
            curve.append((start, there + sum(kept.values()) + others + here.peaks[kind] + posted))
            held[stage, microbatch] = {FORWARD: here.held, INPUT: here.held_for_weights}.get(kind, 0.0)
        last = sum(one.kept for one in mine) + max(one.closing for one in mine)
        return [*curve, (self.played.closing[device].start, there + last)]

    def _receives(self, action: Action) -> float:
        """Bytes of the buffers that a pass receives into; they are there a pass ahead."""
        stage, kind, microbatch = action
        if kind == WEIGHT:
            return 0.0
        total = 0.0
        for one in self.pipeline.borders[self.pipeline.micro.sizes[microbatch]]:
            if stage == (one.target if kind == FORWARD else one.source) and (kind == FORWARD or one.grad):
                parcels = one.values if kind == FORWARD else one.gradients
                mine = (p.elements for p in parcels if p.target == 0)
                total += sum(mine) * DTYPE_BYTES[one.dtype]
        return total

    @cached_property
    def stages(self) -> tuple[StagePrediction, ...]:
        """What is predicted of every stage; what its device waits for counts for each of the device's stages."""
        found = []
        for stage, device in enumerate(self.timing.schedule.device_of):
            order, played = self.timing.schedule.orders[device], self.played
            rows = zip(order, played.starts[device], played.ends[device], strict=True)
            busy = sum(e - s for action, s, e in rows if action.stage == stage) + played.closing[device].busy
            idle = max(0.0, 1.0 - self.busy[device] / self.seconds)
            exposed = played.exposed[stage] + played.waited[device]
            found.append(StagePrediction(busy, idle, exposed, self.memory[device]))
        return tuple(found)

    @property
    def communication_bytes(self) -> float:
        """Bytes that the busiest device's ranks each send to other stages in a step."""
        sent = [0] * self.timing.schedule.devices
        for trip in self.played.trips:
            sent[trip.source] += trip.bytes
        return float(max(sent))


def pass_times(
    program: Program,
    mesh: Mesh,
    microbatches: int,
    received: Sequence[str] = (),
    what_if: WhatIf | None = None,
) -> PassTimes:
    """What the passes of a stage take on one rank, and hold; ``what_if``: at other speeds. Of a backward pass in one,
    all counts as that of the inputs."""
    program = reduced_apart(program)
    sections, start = program.sections, program.backward.start
    weights_from = start + len(sections[INPUT]) if INPUT in sections else len(program.instructions)
    count, recorded = len(program.graph.parameters), not random_nodes(program)
    events = list(with_runtime(price(program, mesh).events, count, mesh.device, RUNTIME, recorded))
    added = _added_up(program, mesh, microbatches)
    events = [event._replace(seconds=added.get(n, event.seconds)) for n, event in enumerate(events)]
    if what_if is not None and what_if.changes:
        events = list(scaled(events, mesh, what_if))
    home = frozenset((*sections[REDUCE], *sections[UPDATE]))
    once = home - added.keys()
    passes = [n for n in range(len(events)) if n not in once]
    place = {number: here for here, number in enumerate(passes)}
    inside = [moved(events[number], place) for number in passes]
    processor = processor_of(mesh)
    simulated, whole = run_events(inside, processor), run_events(events, processor)

    def end(border: int) -> float:
        return max((simulated.ends[place[n]] for n in passes if n < border), default=0.0)

    forward, total = end(program.forward.stop), simulated.seconds
    inputs = end(weights_from) if INPUT in sections else total
    return PassTimes(
        forward,
        inputs - forward,
        max(total - inputs, 0.0),
        max(whole.seconds - total, 0.0),
        stage_bytes(program, weights_from, mesh.device, microbatches, received, home),
        StageEvents(program, weights_from, events, once),
    )


def _added_up(program: Program, mesh: Mesh, microbatches: int) -> dict[int, float]:
    """Seconds in which a pass adds its gradients to those of the micro-batches before it: two are read, one is written.
    The first of them adds nothing; the rest is shared by all alike."""
    if microbatches == 1:
        return {}
    share = 3 * (microbatches - 1) / microbatches / mesh.device.bandwidth
    return {n: share * gradient_bytes(program, n) for n in program.arrivals}


def moved(event: Event, place: Mapping[int, int]) -> Event:
    """An event among others than before, at whose places those that it waits for now stand."""
    after = tuple(place[number] for number in event.after if number in place)
    return event._replace(instruction=event.instruction._replace(after=after))


def work_of(
    pipe: Pipeline, times: Mapping[tuple[int, int], PassTimes], cluster: Cluster, limits: Sequence[float] | None = None
) -> Work:
    """The pipeline as the schedulers see it: seconds and bytes per stage and micro-batch."""

    def table(what: str) -> list[list[float]]:
        return [[getattr(times[stage, size], what) for size in pipe.micro.sizes] for stage in range(len(pipe.stages))]

    held, later = table("held"), table("held_for_weights")
    freed = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(held, later, strict=True)]
    hops: dict[tuple[int, int], float] = {}
    for border in pipe.borders[max(pipe.micro.sizes)]:
        key = (border.source, border.target)
        ends = [pipe.stages[stage].ranks for stage in key]
        ways = [way_of(border, back, cluster, *ends).seconds for back in ((False, True) if border.grad else (False,))]
        hops[key] = hops.get(key, 0.0) + min(ways)
    return pipeline(
        pipe.schedule.device_of,
        len(pipe.micro.sizes),
        table("forward"),
        table("inputs"),
        table("weights"),
        forward_memory=held,
        inputs_memory=freed,
        edges=[Edge(source, target, seconds) for (source, target), seconds in sorted(hops.items())],
        **({} if limits is None else {"limits": tuple(limits)}),
    )


def stage_times(
    pipe: Pipeline,
    meshes: Sequence[Mesh],
    decisions: Sequence[Decisions],
    optimizer: str,
    what_if: WhatIf | None = None,
    *,
    split: bool = False,
) -> dict[tuple[int, int], PassTimes]:
    """What the passes of all stages take, for every size of micro-batch: on the slowest of unlike devices, with the bytes of
    the one that holds most. Backward passes are in two where the schedule has them so, or everywhere (``split``), for
    whoever looks for a schedule."""
    found = {}
    for number, stage in enumerate(pipe.stages):
        for size in pipe.parts:
            mesh, every = meshes[number], []
            received = tuple(pipe.parts[size][number].received)
            asked = what_if and what_if.among({axis.name for axis in mesh.axes})
            places = unlike_places(stage.strategy, mesh) if mesh.kinds else [(0,) * len(mesh.axes)]
            halves = split or pipe.splits(number)
            for place in places:
                rank, kind = stage.ranks[int(np.ravel_multi_index(place, mesh.sizes))], mesh.device.kind
                built = pipe.program(
                    number, size, rank, decisions[number], device=kind, split=halves, optimizer=optimizer
                )
                every.append(pass_times(built, mesh.at(place), len(pipe.micro.sizes), received, asked))
            slowest = max(every, key=lambda one: one.forward + one.inputs + one.weights)
            largest = max(every, key=lambda one: one.resting + one.working + one.held)
            found[number, size] = replace(slowest, bytes=largest.bytes)
    return found


def simulated(
    pipe: Pipeline,
    times: Mapping[tuple[int, int], PassTimes],
    cluster: Cluster,
    meshes: Sequence[Mesh],
    rate: float = 1.0,
) -> PipelineTimeline:
    """One step of a pipeline whose passes are priced; ``rate``: with links between stages so many times as fast."""
    planned = run(pipe.schedule, work_of(pipe, times, cluster))
    played = play(pipe, {key: one.events for key, one in times.items()}, meshes, cluster, rate)
    starts, ends = (tuple(np.array(row) for row in rows) for rows in (played.starts, played.ends))
    return PipelineTimeline(pipe, replace(planned, starts=starts, ends=ends), times, played)


def simulate_plan_pipeline(
    plan: Plan, graph: Graph, *, what_if: WhatIf | None = None, microbatches: int | None = None
) -> PipelineTimeline:
    """Simulate one step of a plan with stages on all kinds of its ranks.

    ``what_if`` asks for other speeds; its link rates are those of the axes inside stages, and of ``stages``: the links
    between them. ``microbatches`` asks for another number of them: the order of passes is then the same recipe's for so
    many, or, where the plan's order was searched for, the fastest of the known ones at the plan's prices.

    Raises
    ------
    ShardwrightError
        When the batch, an operator or the schedule does not allow that many micro-batches.

    Example
    -------
    >>> simulate_plan_pipeline(plan, plan.graph()).bubble                                        # doctest: +SKIP
    >>> simulate_plan_pipeline(plan, plan.graph(), microbatches=32).seconds                      # doctest: +SKIP
    """
    meshes = [plan.meshes[number] for number in range(len(plan.stages))]
    decided = [replace(s.decisions, otherwise=ByPrice(m)) for s, m in zip(plan.stages, meshes, strict=True)]
    count = plan.microbatches if microbatches is None else microbatches
    orders = [plan.schedule] if count == plan.microbatches else orders_like(plan.schedule, count)
    pipe = Pipeline.of(graph, plan.stages, count, orders[0], plan.batch_norm)
    try:
        times = stage_times(pipe, meshes, decided, plan.optimizer, split=len(orders) > 1)
    except LoweringError as error:
        if count == plan.microbatches:
            raise
        raise not_so_many(count, pipe.micro.sizes, error.message) from None
    if len(orders) > 1:
        work = work_of(pipe, times, plan.cluster)
        pipe = replace(pipe, schedule=min(orders, key=lambda order: run(order, work).makespan))
        times = stage_times(pipe, meshes, decided, plan.optimizer)
    if count != plan.microbatches and pipe.micro.tail is not None:
        pipe = replace(pipe, schedule=pipe.schedule.forwards_first())
    if what_if is None or not what_if.changes:
        return simulated(pipe, times, plan.cluster, meshes)
    check_links(plan, what_if)
    times = stage_times(pipe, meshes, decided, plan.optimizer, what_if)
    return simulated(pipe, times, plan.cluster, meshes, what_if.link_rates.get(BETWEEN, 1.0))
