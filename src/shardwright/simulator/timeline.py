"""``simulate``: a discrete-event run of one training step of one rank, and the timeline it leaves.

Compute and every mesh axis have a stream of their own; gathers ahead of use and reductions of gradients overlap with
computation as far as the order of issue and the dependencies of the walk allow. All ranks of an operator-split plan do
the same at the same time, so one rank's timeline stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.cluster import Mesh
from shardwright.costs.deciding import ByPrice
from shardwright.costs.host_runtime import RUNTIME, Runtime, with_runtime
from shardwright.costs.memory import MemoryUse, memory
from shardwright.costs.pricing import Event, Priced, price
from shardwright.errors import PlanError
from shardwright.graph import Graph
from shardwright.operators.rules import largest_place
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program import COMPUTE, Decisions, Program, build
from shardwright.program.recording import can_be_recorded
from shardwright.simulator.engine import Processor, Schedule, lower_bound, run
from shardwright.simulator.what_if import WhatIf, scaled


@dataclass(frozen=True)
class Timeline:
    """One simulated step: ``seconds``, when every event ran, and memory over time."""

    priced: Priced
    schedule: Schedule
    seconds: float

    @property
    def program(self) -> Program:
        return self.priced.program

    @property
    def events(self) -> tuple[Event, ...]:
        return self.priced.events

    @cached_property
    def memory(self) -> MemoryUse:
        return memory(self.program, self.priced.mesh.device)

    @property
    def peak_bytes(self) -> int:
        """Bytes that one device must have."""
        return self.memory.needed

    @cached_property
    def communication_bytes(self) -> int:
        """Bytes one rank's collectives are about, in one step."""
        return sum(event.bytes for event in self.events)

    @cached_property
    def lower_bound(self) -> float:
        """No schedule of these events is shorter."""
        return lower_bound(self.events)

    @cached_property
    def upper_bound(self) -> float:
        """One event after the other, each issued before it runs."""
        return sum(event.seconds + event.host for event in self.events)

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds each stream works."""
        load = {COMPUTE: 0.0} | {axis.name: 0.0 for axis in self.priced.mesh.axes if axis.size > 1}
        for event in self.events:
            load[event.stream] = load.get(event.stream, 0.0) + event.seconds
        return load

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the step each stream works."""
        return {stream: seconds / self.seconds if self.seconds else 0.0 for stream, seconds in self.busy.items()}

    @cached_property
    def exposed_seconds(self) -> float:
        """Seconds in which something communicates and nothing computes."""
        compute, talk = self._intervals(COMPUTE, True), self._intervals(COMPUTE, False)
        return _length(talk) - _common(talk, compute)

    def _intervals(self, stream: str, equal: bool) -> list[tuple[float, float]]:
        schedule = self.schedule
        spans = [
            (schedule.starts[i], schedule.ends[i])
            for i, event in enumerate(self.events)
            if (event.stream == stream) == equal and event.seconds > 0
        ]
        return _merged(spans)

    @cached_property
    def memory_curve(self) -> list[tuple[float, int]]:
        """Bytes alive over the seconds of the step, as (second, bytes) at every change."""
        changes: dict[float, int] = {}
        for storage in self.memory.storages:
            start = 0.0 if storage.born < 0 else self.schedule.starts[storage.born]
            end = self.schedule.ends[storage.dies] if self.events else 0.0
            changes[start] = changes.get(start, 0) + storage.bytes
            if storage.born >= 0:
                changes[end] = changes.get(end, 0) - storage.bytes
        total, curve = 0, []
        for second in sorted(changes):
            total += changes[second]
            curve.append((second, total))
        return curve


def simulate(
    graph: Graph,
    strategy: Strategy,
    mesh: Mesh,
    training: bool = True,
    optimizer: str = "adamw",
    runtime: Runtime = RUNTIME,
    decisions: Decisions | None = None,
    what_if: WhatIf | None = None,
    coordinate: Sequence[int] | None = None,
) -> Timeline:
    """Simulate one step of ``graph`` split by ``strategy`` on ``mesh``; ``runtime`` is what its Python costs the host.

    ``decisions`` are those of a plan; without any, prices decide. It is the rank with the largest pieces that is simulated,
    or the one at ``coordinate``; where rows are dealt out between unlike devices, the slowest of them. ``what_if`` asks for
    the same step at other speeds.

    Example
    -------
    >>> timeline = simulate(graph, strategy, mesh)                                               # doctest: +SKIP
    >>> timeline.seconds, timeline.exposed_seconds, timeline.utilisation["compute"]              # doctest: +SKIP
    """
    mesh = mesh.with_shares(strategy.shares)
    decisions = ByPrice(mesh) if decisions is None else decisions
    found = []
    for place in unlike_places(strategy, mesh) if coordinate is None else [coordinate]:
        kind = mesh.device.kind
        program = build(graph, strategy, decisions, place, device=kind, training=training, optimizer=optimizer)
        found.append(simulate_program(price(program, mesh.at(place)), runtime, what_if))
    return max(found, key=lambda timeline: timeline.seconds)


def unlike_places(strategy: Strategy, mesh: Mesh) -> list[tuple[int, ...]]:
    """Where the ranks are that have to be looked at: the one with the largest pieces, or, where rows are dealt out between
    unlike devices, that one of each kind."""
    largest = tuple(largest_place(strategy.cuts))
    if not mesh.kinds or not mesh.axes[0].shares:
        return [largest]
    alike = {pair: first for first, pair in reversed([*enumerate(zip(mesh.kinds, mesh.axes[0].shares, strict=True))])}
    return [(first, *largest[1:]) for first in sorted(alike.values())]


def simulate_plan(plan: Plan, graph: Graph, runtime: Runtime = RUNTIME, what_if: WhatIf | None = None) -> Timeline:
    """Simulate one step of a plan with what it decided about routes and sums.

    Example
    -------
    >>> simulate_plan(plan, plan.graph()).seconds                                                # doctest: +SKIP
    """
    if not plan.whole:
        raise PlanError(
            f"A plan of {len(plan.stages)} stages is not simulated as one rank.", "Use simulate_plan_pipeline()."
        )
    decisions = replace(plan.stages[0].decisions, otherwise=ByPrice(plan.meshes[0]))
    return simulate(
        graph, plan.stages[0].strategy, plan.meshes[0], graph.training, plan.optimizer, runtime, decisions, what_if
    )


def simulate_program(priced: Priced, runtime: Runtime = RUNTIME, what_if: WhatIf | None = None) -> Timeline:
    """Simulate a program. On one device the model runs as it is; on several, the runtime's Python runs beside it."""
    if priced.mesh.devices > 1:
        count = len(priced.program.flow.graph.parameters)
        recorded = can_be_recorded(priced.program)
        priced = replace(priced, events=with_runtime(priced.events, count, priced.mesh.device, runtime, recorded))
    if what_if is not None and what_if.changes:
        priced = replace(priced, events=scaled(priced.events, priced.mesh, what_if))
    schedule = run(priced.events, processor_of(priced.mesh))
    return Timeline(priced, schedule, schedule.seconds)


def processor_of(mesh: Mesh) -> Processor | None:
    """A CPU sends and receives for itself; beside an accelerator, that is the host's and the network card's work."""
    shares: dict[Hashable, float] = {axis.name: axis.processor_share for axis in mesh.axes if axis.processor_share}
    seconds: dict[Hashable, float] = {axis.name: axis.processor_seconds for axis in mesh.axes}
    return Processor(COMPUTE, shares, seconds) if mesh.device.kind == "cpu" and shares else None


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


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
