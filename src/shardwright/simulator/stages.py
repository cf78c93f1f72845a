"""A stage priced on one of its ranks: the events of every kind of pass, what they take by themselves, what they hold.

The ranks of a stage do the same at the same time, so one of them stands for all; of unlike devices the slowest says how long
passes take and the fullest what they hold. What passes take alone is what schedulers and searches for schedules work with
(:func:`work_of`); the whole step is played event by event (:mod:`~shardwright.simulator.play`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cluster import Mesh
from shardwright.costs.host_runtime import RUNTIME, with_runtime
from shardwright.costs.memory import MemoryUse, memory
from shardwright.costs.passes import StageBytes, gradient_bytes, once_a_step, stage_bytes
from shardwright.costs.pricing import Event, Priced, price
from shardwright.operators.rules import largest_place
from shardwright.operators.strategy import Strategy
from shardwright.program import COMPUTE, Decisions, Program
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.program.pipeline import Pipeline
from shardwright.program.recording import can_be_recorded, recorded_whole
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Edge, pipeline
from shardwright.schedules import Pipeline as Work
from shardwright.simulator.engine import Processor, Row, Streams, rows_of, run
from shardwright.simulator.links import Links
from shardwright.simulator.what_if import WhatIf, scaled


class PassTimes(NamedTuple):
    """Seconds of the passes of one microbatch and of what follows the last of them."""

    forward: float
    inputs: float
    weights: float
    closing: float

    @property
    def microbatch(self) -> float:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True, eq=False)
class PricedStage:
    """The priced program of one stage for microbatches of one size. ``received``: tensors of other stages that it reads."""

    priced: Priced
    microbatches: int
    received: tuple[str, ...]
    holding: PricedStage | None = None
    """The same on the rank that holds most, where that is another."""

    @property
    def program(self) -> Program:
        return self.priced.program

    @property
    def mesh(self) -> Mesh:
        return self.priced.mesh

    @property
    def events(self) -> tuple[Event, ...]:
        return self.priced.events

    @cached_property
    def rows(self) -> list[Row]:
        """The events as they are issued."""
        return rows_of(self.events)

    @cached_property
    def passes(self) -> Mapping[str, tuple[int, ...]]:
        """The events of every kind of pass; gradients arrive in the pass that makes them."""
        performed, arrivals = self.program.performed, set(self.program.arrivals)
        found = {kind: performed.get(kind, ()) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT, UPDATE)}
        return {**found, REDUCE: tuple(n for n in performed.get(REDUCE, ()) if n not in arrivals)}

    @cached_property
    def computes(self) -> Mapping[str, np.ndarray]:
        """Of every event of a kind of pass, whether it computes."""
        return {kind: np.array([self.rows[n][0] == COMPUTE for n in own], bool) for kind, own in self.passes.items()}

    @property
    def once(self) -> frozenset[int]:
        """The events that run once a step, after the last pass."""
        return frozenset((*self.passes[REDUCE], *self.passes[UPDATE]))

    @cached_property
    def alone(self) -> PassTimes:
        """What passes take where nothing has to be waited for; a backward pass in one counts as that of the inputs."""
        processor, ends = processor_of(self.mesh), [0.0] * len(self.rows)
        streams = Streams(processor)
        halves = (INPUT, WEIGHT) if INPUT in self.program.sections else (BACKWARD,)
        until, found = 0.0, []
        for kind in (FORWARD, *halves):
            streams.run(self.rows, self.passes[kind], ends)
            until = max([until, *(ends[n] for n in self.passes[kind])])
            found.append(until)
        total = max(until, streams.clock)
        forward, inputs = found[0], total if BACKWARD in halves else found[1]
        whole = run(self.events, processor).seconds
        return PassTimes(forward, inputs - forward, max(total - inputs, 0.0), max(whole - total, 0.0))

    @cached_property
    def least(self) -> PassTimes:
        """The same where nothing but computation takes time: what no order of the passes undercuts."""
        kinds = (FORWARD, INPUT if INPUT in self.program.sections else BACKWARD, WEIGHT, UPDATE)
        computes = ((event for n in self.passes[kind] if (event := self.events[n]).stream == COMPUTE) for kind in kinds)
        return PassTimes(*(sum(event.seconds for event in own) for own in computes))

    @cached_property
    def memory(self) -> MemoryUse:
        """The account of one microbatch, storage by storage."""
        return self.holding.memory if self.holding is not None else memory(self.program, self.mesh.device)

    @cached_property
    def bytes(self) -> StageBytes:
        """What its passes hold."""
        if self.holding is not None:
            return self.holding.bytes
        return stage_bytes(self.program, self.memory, self.mesh.device, self.microbatches, self.received)

    @property
    def resting(self) -> float:
        """Bytes that no order of the passes changes: gradients are there for most of the step."""
        return self.bytes.resting + self.bytes.kept

    @property
    def planned(self) -> int | None:
        """Bytes that a step keeps for good whose memory is planned: one pass forward and one back, recorded together."""
        return None if once_a_step(self.program) else self.memory.planned


def load_of(done: Iterable[tuple[PricedStage, Iterable[int]]]) -> dict[str, float]:
    """Seconds that each stream works on some events of stages."""
    parts = [*done]
    load = {COMPUTE: 0.0} | {axis.name: 0.0 for stage, _ in parts for axis in stage.mesh.axes if axis.size > 1}
    for stage, numbers in parts:
        for number in numbers:
            event = stage.events[number]
            load[event.stream] = load.get(event.stream, 0.0) + event.seconds
    return load


def price_stage(
    program: Program, mesh: Mesh, pipe: Pipeline, received: Sequence[str] = (), what_if: WhatIf | None = None
) -> PricedStage:
    """Price the program of a stage; ``what_if``: at other speeds."""
    priced, count = price(program, mesh), len(pipe.micro.sizes)
    if (
        len(pipe.workers) > 1 or count > 1
    ):  # alone, the model runs as it is; otherwise the runtime's Python runs beside it
        recorded = recorded_whole(program) if once_a_step(program) else can_be_recorded(program)
        events = with_runtime(priced.events, len(program.graph.parameters), mesh.device, RUNTIME, recorded)
        priced = replace(priced, events=events)
    if count > 1:
        priced = replace(priced, events=_adding_up(priced, count))
    if what_if is not None and what_if.changes:
        asked = what_if.among({axis.name for axis in mesh.axes})
        priced = replace(priced, events=scaled(priced.events, mesh, asked))
    return PricedStage(priced, count, tuple(received))


def _adding_up(priced: Priced, microbatches: int) -> tuple[Event, ...]:
    """The events, where a pass adds its gradients to those of the microbatches before it: two are read, one is written.
    The first of them adds nothing; the rest is shared by all alike."""
    program, events = priced.program, list(priced.events)
    share = 3 * (microbatches - 1) / microbatches / priced.mesh.device.bandwidth
    for number in program.arrivals:
        events[number] = events[number]._replace(seconds=share * gradient_bytes(program, number))
    return tuple(events)


def price_stages(
    pipe: Pipeline,
    meshes: Sequence[Mesh],
    decisions: Sequence[Decisions],
    optimizer: str,
    what_if: WhatIf | None = None,
    *,
    split: bool = False,
    coordinate: Sequence[int] | None = None,
    kinds: Sequence[Hashable] = (),
) -> dict[tuple[int, int], PricedStage]:
    """All stages, for every size of microbatch. Backward passes are in two where the schedule has them so, or everywhere
    (``split``), for whoever looks for a schedule. ``coordinate``: on the rank that is there on its mesh. ``kinds``: stages
    of one kind do the same up to names, and the first of them is priced for all (its program has its own names)."""
    found: dict[tuple[int, int], PricedStage] = {}
    for number, stage in enumerate(pipe.stages):
        mesh = meshes[number]
        if kinds and (first := kinds.index(kinds[number])) < number:
            found |= {(number, size): found[first, size] for size in pipe.parts}
            continue
        places = unlike_places(stage.strategy, mesh) if coordinate is None else [tuple(coordinate)]
        for size in pipe.parts:
            every = []
            for place in places:
                program = pipe.program(
                    number,
                    size,
                    stage.ranks[int(np.ravel_multi_index(place, mesh.sizes))],
                    decisions[number],
                    device=mesh.device.kind,
                    split=split or None,
                    optimizer=optimizer,
                )
                every.append(
                    price_stage(program, mesh.at(place), pipe, tuple(pipe.parts[size][number].received), what_if)
                )
            found[number, size] = _standing_for_all(every)
    return found


def _standing_for_all(every: Sequence[PricedStage]) -> PricedStage:
    """Of unlike ranks the slowest, with the memory of the one that holds most."""
    if len(every) == 1:
        return every[0]
    slowest = max(every, key=lambda one: one.microbatches * one.alone.microbatch + one.alone.closing)
    fullest = max(every, key=lambda one: one.resting + one.bytes.working + one.bytes.held)
    return slowest if fullest is slowest else replace(slowest, holding=fullest)


def unlike_places(strategy: Strategy, mesh: Mesh) -> list[tuple[int, ...]]:
    """Where the ranks are that have to be looked at: the one with the largest pieces, or, where rows are dealt out between
    unlike devices, that one of each kind."""
    largest = tuple(largest_place(strategy.cuts))
    if not mesh.kinds or not mesh.axes[0].shares:
        return [largest]
    alike = {pair: first for first, pair in reversed([*enumerate(zip(mesh.kinds, mesh.axes[0].shares, strict=True))])}
    return [(first, *largest[1:]) for first in sorted(alike.values())]


def processor_of(mesh: Mesh) -> Processor | None:
    """A CPU sends and receives for itself; beside an accelerator, that is the host's and the network card's work."""
    if mesh.device.kind != "cpu":
        return None
    taken = [axis for axis in mesh.axes if axis.processor_share]
    shares: dict[Hashable, float] = {axis.name: axis.processor_share for axis in taken}
    return Processor(COMPUTE, shares, {axis.name: axis.processor_seconds for axis in taken})


def work_of(
    links: Links,
    stages: Mapping[tuple[int, int], PricedStage],
    limits: Sequence[float] | None = None,
    *,
    least: bool = False,
) -> Work:
    """A step as schedulers see it: seconds and bytes per stage and microbatch; ``least``: of computation alone."""
    pipe = links.pipe
    rows = [[stages[stage, size] for size in pipe.micro.sizes] for stage in range(len(pipe.stages))]
    seconds = [[one.least if least else one.alone for one in row] for row in rows]
    later = [[one.bytes.held_for_weights for one in row] for row in rows]
    # Schedulers know no pass back that adds bytes: what it computes again for its second half counts from the start.
    held = [[max(one.bytes.held, one.bytes.held_for_weights) for one in row] for row in rows]
    freed = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(later, held, strict=True)]
    hops: defaultdict[tuple[int, int], float] = defaultdict(float)
    for number, one in enumerate(pipe.boundaries[max(pipe.micro.sizes)]):
        ways = (links.way(number, max(pipe.micro.sizes), back) for back in ((False, True) if one.grad else (False,)))
        hops[one.source, one.target] += min(way.seconds for way in ways)
    return pipeline(
        pipe.schedule.device_of,
        len(pipe.micro.sizes),
        [[one.forward for one in row] for row in seconds],
        [[one.inputs for one in row] for row in seconds],
        [[one.weights for one in row] for row in seconds],
        forward_memory=held,
        inputs_memory=freed,
        edges=[Edge(source, target, seconds) for (source, target), seconds in sorted(hops.items())],
        **({} if limits is None else {"limits": tuple(limits)}),
    )
