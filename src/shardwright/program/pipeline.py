"""A plan as programs: a graph cut into micro-batches and stages, and what every rank does with them in which order.

The stages of a rank are built like any program, each from its own graph (:mod:`~shardwright.program.stages`), mesh and
strategy, once for every size of micro-batch. The schedule says in which order their passes run; around every pass stand the
parcels that it waits for and those that it sends (:class:`~shardwright.program.tasks.StepProgram`). One mesh is the cut
into one micro-batch and one stage, which changes nothing. Sends wait for nobody, and a rank waits for parcels only where a
pass reads them, so ranks can wait for each other for ever only if the order of passes itself goes round in a circle:
:func:`check` plays the orders of all ranks together before anything runs, and proves that every parcel that is sent is
received, between the same two ranks, in the order in which it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from shardwright.errors import LoweringError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.program.build import build
from shardwright.program.decisions import Decisions, FixedDecisions
from shardwright.program.instructions import REDUCE, UPDATE, Program
from shardwright.program.microbatches import WHOLE, Microbatches, microbatches
from shardwright.program.passes import reduced_apart, split_backward
from shardwright.program.stages import StageGraph, stage_graphs
from shardwright.program.tasks import Message, StepProgram, Task
from shardwright.program.transfers import BoundaryTensor, boundary_tensor
from shardwright.schedules import FORWARD, INPUT, WEIGHT, Action, Schedule


class Stage(Protocol):
    """What is decided about one stage (:class:`shardwright.plans.Stage`)."""

    @property
    def operators(self) -> tuple[str, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def decisions(self) -> FixedDecisions: ...


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Everything that all ranks have in common."""

    micro: Microbatches
    stages: tuple[Stage, ...]
    schedule: Schedule
    parts: Mapping[int, tuple[StageGraph, ...]]
    """By the size of a micro-batch, the graphs of its stages."""

    @staticmethod
    def of(graph: Graph, stages: Sequence[Stage], count: int, schedule: Schedule, batch_norm: str = WHOLE) -> Pipeline:
        """Cut a graph into micro-batches and stages.

        Raises
        ------
        LoweringError
            When an operator cannot be cut into micro-batches; the message names it.
        """
        try:
            micro = microbatches(graph, count, batch_norm)
        except ValueError as error:  # an operator of a damaged graph with other inputs than its rule has
            raise LoweringError(f"The graph is damaged: {error}.", "Plan again.") from None
        names = [stage.operators for stage in stages]
        parts = {size: stage_graphs(one, names) for size, one in micro.graphs.items()}
        return Pipeline(micro, tuple(stages), schedule, parts)

    @cached_property
    def read_by_the_tail(self) -> frozenset[str]:
        """Results from which the loss of the whole batch is computed when all micro-batches are through."""
        tail = self.micro.tail
        return (
            frozenset()
            if tail is None
            else frozenset(entry.tensor for entry in tail.inputs if entry.tensor is not None)
        )

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have stages; other ranks of the job only look on."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @cached_property
    def boundaries(self) -> Mapping[int, tuple[BoundaryTensor, ...]]:
        """By the size of a micro-batch, every tensor that crosses from one stage to another."""
        found: dict[int, tuple[BoundaryTensor, ...]] = {}
        for size, parts in self.parts.items():
            found[size] = tuple(
                boundary_tensor(
                    name, source, target, part.graph, self.stages[source].strategy, self.stages[target].strategy
                )
                for source, part in enumerate(parts)
                for name, targets in part.sent.items()
                for target in targets
            )
        return found

    def crossing(self, action: Action, leaving: bool) -> Sequence[tuple[int, BoundaryTensor]]:
        """What a pass sends, or what it waits for, each with its place in :attr:`boundaries`."""
        if action.kind == WEIGHT:
            return ()
        back = action.kind != FORWARD
        key = (self.micro.sizes[action.microbatch], action.stage, leaving != back, back)
        return self._crossing.get(key, ())

    @cached_property
    def _crossing(self) -> dict[tuple[int, int, bool, bool], list[tuple[int, BoundaryTensor]]]:
        """By size of micro-batch and stage: what it makes or reads, and of that what gradients come back for."""
        found: dict[tuple[int, int, bool, bool], list[tuple[int, BoundaryTensor]]] = {}
        for size, boundaries in self.boundaries.items():
            for number, one in enumerate(boundaries):
                for stage, source in ((one.source, True), (one.target, False)):
                    for back in (False, True) if one.grad else (False,):
                        found.setdefault((size, stage, source, back), []).append((number, one))
        return found

    @cached_property
    def ties(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that stages on different ranks hold, with the first stage on each of these groups of ranks."""
        found: dict[str, dict[tuple[int, ...], int]] = {}
        for number, part in enumerate(next(iter(self.parts.values()))):
            for parameter in part.graph.parameters:
                found.setdefault(parameter.tensor, {}).setdefault(self.stages[number].ranks, number)
        return tuple((name, tuple(owners.values())) for name, owners in found.items() if len(owners) > 1)

    def meetings(self, owners: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Groups of ranks between which gradients of a parameter that these stages hold are summed; of each, the ranks of
        every owner. Where a stage has more ranks than another, several of them meet one of it: the first of an owner's
        ranks brings the gradient, the others nothing, and all take the sum."""
        ranks = [self.stages[owner].ranks for owner in owners]
        count = min(map(len, ranks))
        return tuple(tuple(own[first::count] for own in ranks) for first in range(count))

    def coordinate(self, stage: int, rank: int) -> tuple[int, ...]:
        """The place of a rank on the mesh of a stage, whose axes its ranks fill row by row."""
        row, place = self.stages[stage].ranks.index(rank), list[int]()
        for size in reversed(self.stages[stage].strategy.sizes):
            row, here = divmod(row, size)
            place.insert(0, here)
        return tuple(place)

    def program(
        self,
        stage: int,
        size: int,
        rank: int,
        decisions: Decisions,
        *,
        device: str = "cpu",
        split: bool | None = None,
        optimizer: str = "adamw",
    ) -> Program:
        """What a rank does for one micro-batch of a stage; ``split``: its backward pass in two (by default where the
        schedule has it so)."""
        part, strategy = self.parts[size][stage], self.stages[stage].strategy
        program = build(
            part.graph,
            strategy,
            decisions,
            self.coordinate(stage, rank),
            device=device,
            training=self.trains,
            optimizer=optimizer,
            sent=(*part.sent, *self.read_by_the_tail),
        )
        if self.splits(stage) if split is None else split:
            return split_backward(program, [program.flow.rest[name] for name in part.wanted])
        return program if self.reduces_inside else reduced_apart(program)

    @cached_property
    def trains(self) -> bool:
        """Whether anything goes back."""
        return any(action.kind != FORWARD for action in self.schedule.actions())

    @property
    def reduces_inside(self) -> bool:
        """Whether the backward pass reduces gradients as it goes, behind its computation: one micro-batch through one
        stage. With several, gradients are added up first. With several stages, backward passes run inside the call, and the
        reduction waits for ``backward()``, where the caller may scale the loss or ask for no reduction."""
        return len(self.stages) == len(self.micro.sizes) == 1 and not self.splits(0)

    def splits(self, stage: int) -> bool:
        """Whether the schedule has the backward passes of a stage in two anywhere."""
        return any(action.stage == stage and action.kind == INPUT for action in self.schedule.actions())

    def step(
        self,
        rank: int,
        decisions: Sequence[Decisions],
        *,
        device: str = "cpu",
        optimizer: str = "adamw",
    ) -> StepProgram:
        """What one rank does in a step, from what is decided about every stage.

        Raises
        ------
        LoweringError
            When a strategy cannot be run; the message names the operator.
        """
        own = [number for number, stage in enumerate(self.stages) if rank in stage.ranks]
        programs = {
            (number, size): self.program(number, size, rank, decisions[number], device=device, optimizer=optimizer)
            for number in own
            for size in self.parts
        }
        return StepProgram(programs, (*self.steps(rank), *(self._closing(own) if self.trains else ())))

    def _closing(self, own: Sequence[int]) -> tuple[Task, ...]:
        """What follows the last pass of these stages."""
        sizes = self.micro.sizes
        number, kinds = (0, (UPDATE,)) if self.reduces_inside else (len(sizes), (REDUCE, UPDATE))
        return tuple(Task(Action(stage, kind, number), max(sizes)) for stage in own for kind in kinds)

    def steps(self, rank: int) -> tuple[Task, ...]:
        """The passes of one rank in the order of the schedule; nothing where it has no stage."""
        return self._every.get(rank, ())

    @cached_property
    def _every(self) -> Mapping[int, tuple[Task, ...]]:
        return {rank: tuple(self._passes(rank)) for rank in self.workers}

    def _passes(self, rank: int) -> Iterator[Task]:
        device = next(d for s, d in zip(self.stages, self.schedule.device_of, strict=True) if rank in s.ranks)
        for action in self.schedule.orders[device]:
            back, number = action.kind != FORWARD, action.microbatch
            receives, sends = (
                tuple(
                    message
                    for _, one in self.crossing(action, leaving)
                    for message in self._messages(one, back, number)
                    if rank == (message.source if leaving else message.target)
                )
                for leaving in (False, True)
            )
            yield Task(action, self.micro.sizes[number], receives, sends)

    @cache  # noqa: B019 - one pipeline lives as long as the module that runs it
    def _messages(self, one: BoundaryTensor, gradient: bool, microbatch: int) -> tuple[Message, ...]:
        """The parcels of one tensor; whoever sends and whoever receives one has the same object."""
        first, second = (one.target, one.source) if gradient else (one.source, one.target)
        sources, targets = self.stages[first].ranks, self.stages[second].ranks
        parcels = one.parcels(gradient)
        return tuple(Message(one, gradient, microbatch, p, sources[p.source], targets[p.target]) for p in parcels)


def check(pipeline: Pipeline) -> None:
    """Refuse a pipeline whose ranks would wait for each other, or whose parcels do not meet.

    Raises
    ------
    LoweringError
    """
    every = {rank: pipeline.steps(rank) for rank in pipeline.workers}
    sent: set[Message] = set()
    received: set[Message] = set()
    heads = dict.fromkeys(every, 0)
    moved = True
    while moved:
        moved = False
        for rank, steps in every.items():
            while heads[rank] < len(steps) and sent.issuperset(steps[heads[rank]].receives):
                step = steps[heads[rank]]
                for message in step.receives:
                    if message in received:
                        raise LoweringError(f"{message} would be received twice.", "Make the plan again.")
                    received.add(message)
                sent.update(step.sends)
                heads[rank] += 1
                moved = True
    for rank, steps in every.items():
        if heads[rank] < len(steps):
            step = steps[heads[rank]]
            missing = next(message for message in step.receives if message not in sent)
            raise LoweringError(
                f"Rank {rank} would wait for ever before {step.action}: {missing} is never sent before.",
                "Change the order of the schedule so that every pass follows those it reads from.",
            )
    if pipeline.micro.whole.mutations:
        _check_order(pipeline.schedule)
    if lost := sent - received:
        raise LoweringError(f"{min(map(str, lost))} would never be received.", "Make the plan again.")


def _check_order(schedule: Schedule) -> None:
    """Buffers change from one micro-batch to the next, so every stage has to take them in their order."""
    for order in schedule.orders:
        last: dict[int, int] = {}
        for action in (action for action in order if action.kind == FORWARD):
            if action.microbatch < last.get(action.stage, -1):
                raise LoweringError(
                    f"{action} comes after the forward pass of micro-batch {last[action.stage]}, and the model's buffers "
                    "change from one micro-batch to the next.",
                    "Choose a schedule that takes the micro-batches of every stage in their order.",
                )
            last[action.stage] = action.microbatch
