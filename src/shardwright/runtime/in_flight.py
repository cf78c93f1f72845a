"""A call under way on one rank: its passes in the order of the schedule, with the parcels between them.

Every pass waits for what it reads and for nothing else. A flight may perform the whole schedule, its forward passes alone,
or the backward passes after those; several calls are several flights. It owns what the passes leave behind: the results of
micro-batches, the gradients of the inputs. How a pass is run, eagerly or as it was recorded, is its performer's business
(:mod:`~shardwright.runtime.performer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.lowering.collectives import run_steps
from shardwright.program import tasks as program
from shardwright.program.naming import pass_name
from shardwright.program.tasks import Message
from shardwright.runtime.performer import Performer
from shardwright.runtime.point_to_point import PointToPoint
from shardwright.runtime.profiling import named
from shardwright.runtime.stage_program import StageProgram
from shardwright.schedules import FORWARD, INPUT, WEIGHT, Action

Key = tuple[int, int]
"""A stage and a micro-batch."""


class Pass(NamedTuple):
    """A pass of this rank, with everything about it that is looked up once. ``arriving`` are the parcels it waits for, by
    the input that they become, or by the result whose gradient they are."""

    action: Action
    key: Key
    part: StageProgram
    name: str
    expects: tuple[Message, ...]
    arriving: tuple[tuple[str, tuple[Message, ...]], ...]
    sends: tuple[Message, ...]


def passes(tasks: Sequence[program.Task], parts: Mapping[tuple[int, int], StageProgram]) -> tuple[Pass, ...]:
    """The tasks of this rank in their order; a receive is posted one pass ahead of its use."""
    found = []
    for number, task in enumerate(tasks):
        action = task.action
        ahead = tasks[number + 1].receives if number + 1 < len(tasks) else ()
        boundaries: dict[tuple[str, int], list[Message]] = {}
        for message in task.receives:
            boundaries.setdefault((message.boundary.tensor, message.boundary.target), []).append(message)
        part = parts[action.stage, task.size]
        names = [*boundaries]
        if action.kind == FORWARD:  # as the program reads them
            place = {entry.tensor: number for number, entry in enumerate(part.part.graph.inputs)}
            names.sort(key=lambda boundary: place[boundary[0]])
        arriving = tuple((boundary[0], tuple(boundaries[boundary])) for boundary in names)
        key = (action.stage, action.microbatch)
        expects = (*task.receives, *ahead)
        found.append(Pass(action, key, part, pass_name(action), expects, arriving, task.sends))
    return tuple(found)


class CallInFlight:
    """``given`` is what the call brings, ``pieces`` this rank's parts of it by stage and micro-batch, ``sources`` the
    parameters, buffers and constants of every program; ``keep``: passes back follow."""

    def __init__(
        self,
        given: Sequence[Tensor],
        pieces: Mapping[Key, Sequence[Tensor]],
        sources: dict[StageProgram, list[Tensor]],
        keep: bool,
        performer: Performer,
    ) -> None:
        self.given, self.pieces, self.sources, self.keep = given, pieces, sources, keep
        self.performer = performer
        self.results: dict[Key, Tensor] = {}
        """By the place of an output and the micro-batch, this rank's part of it."""
        self.found: dict[Key, Mapping[int, Tensor | None]] = {}
        """By stage and micro-batch, the gradients of what the call brought, by their values."""
        self.arriving: Callable[[int, int], Tensor | None] = lambda place, microbatch: None
        """The gradient of this rank's part of an output for one micro-batch."""
        self._changed = False
        """Whether a pass has replaced buffers since the sources were looked up."""

    def perform(self, order: Sequence[Pass], p2p: PointToPoint) -> None:
        """Run these passes."""
        for task in order:
            p2p.expect(task.expects)
            with named(task.name):
                if task.action.kind == FORWARD:
                    self._forward(task, p2p)
                else:
                    self._backward(task, p2p)
        p2p.finish()

    def _sources(self, part: StageProgram) -> list[Tensor]:
        if self._changed and part.flow.mutations:
            self.sources[part] = part.sources()
        return self.sources[part]

    def _forward(self, task: Pass, p2p: PointToPoint) -> None:
        part, action = task.part, task.action
        sources = [*self._sources(part), *self.pieces[task.key]]
        for name, messages in task.arriving:
            sources.append(p2p.receive(messages, part.flow.values[part.flow.rest[name]].local.shape))
        found = self.performer.forward(action, part, sources, self.keep)
        for message in task.sends:
            p2p.send(message, found[part.results[message.boundary.tensor]])
        for place, name in part.part.results:
            self.results[place, action.microbatch] = found[part.results[name]]
        if part.flow.mutations:
            part.store(found)
            self._changed = True

    def _backward(self, task: Pass, p2p: PointToPoint) -> None:
        part, action = task.part, task.action
        flow, numbers = part.flow, part.results
        gradients: dict[int, Tensor | None] = {}

        def add(value: int, gradient: Tensor) -> None:
            known = gradients.get(value)
            gradients[value] = gradient if known is None else known + gradient

        for name, messages in task.arriving:
            value, boundary = numbers[name], messages[0].boundary
            found = p2p.receive(messages, flow.values[value].local.shape)
            add(value, found / boundary.shares if boundary.shares > 1 else found)
        for place, name in part.part.results if action.kind != WEIGHT else ():
            whole = self.arriving(place, action.microbatch)
            if whole is not None:
                add(numbers[name], whole / part.shares[name] if part.shares[name] > 1 else whole)
        back = self.performer.backward(action, part, gradients)
        if action.kind != INPUT and part.wanted:
            self.found[task.key] = {value: back.get(value) for value in part.wanted}
        sent: dict[str, Tensor] = {}
        for message in task.sends:
            name = message.boundary.tensor
            key = f"{name} {message.boundary.as_is}"
            if key not in sent:
                local, gradient = flow.values[flow.rest[name]].local, back.get(flow.rest[name])
                if gradient is None:  # nobody brings one: the stage that waits for it is told so
                    gradient = torch.zeros(local.shape, dtype=getattr(torch, local.dtype), device=part.rank.device)
                gradient = gradient.expand(local.shape)
                back_to = part.arguments.as_kept[name].backward
                sent[key] = gradient if message.boundary.as_is else run_steps(gradient, back_to)
            p2p.send(message, sent[key])
