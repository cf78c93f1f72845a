"""A call under way on one rank: its passes in the order of the schedule, with the parcels between them.

Every pass waits for what it reads and for nothing else. A flight may perform the whole schedule, its forward passes alone,
or the backward passes after those; several calls are several flights. It owns what the passes leave behind: the results of
micro-batches, the gradients of the inputs, those of parameters that were kept back. How a pass is run, eagerly or as it was
recorded, is not this module's business (:mod:`~shardwright.runtime.recorded_passes`).
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
from shardwright.runtime.mail import Mail
from shardwright.runtime.part import Part
from shardwright.runtime.profiling import named
from shardwright.runtime.recorded_passes import Passes
from shardwright.schedules import FORWARD, INPUT, WEIGHT, Action

Key = tuple[int, int]
"""A stage and a micro-batch."""


class Pass(NamedTuple):
    """A pass of this rank, with everything about it that is looked up once. ``arriving`` are the parcels it waits for, by
    the input that they become, or by the result whose gradient they are."""

    action: Action
    key: Key
    part: Part
    name: str
    expects: tuple[Message, ...]
    arriving: tuple[tuple[str, tuple[Message, ...]], ...]
    sends: tuple[Message, ...]


def passes(tasks: Sequence[program.Task], parts: Mapping[tuple[int, int], Part]) -> tuple[Pass, ...]:
    """The tasks of this rank in their order; a receive is posted one pass ahead of its use."""
    found = []
    for number, task in enumerate(tasks):
        action = task.action
        ahead = tasks[number + 1].receives if number + 1 < len(tasks) else ()
        borders: dict[tuple[str, int], list[Message]] = {}
        for message in task.receives:
            borders.setdefault((message.border.tensor, message.border.target), []).append(message)
        part = parts[action.stage, task.size]
        names = [*borders]
        if action.kind == FORWARD:  # as the program reads them
            place = {entry.tensor: number for number, entry in enumerate(part.part.graph.inputs)}
            names.sort(key=lambda border: place[border[0]])
        arriving = tuple((border[0], tuple(borders[border])) for border in names)
        key = (action.stage, action.microbatch)
        expects = (*task.receives, *ahead)
        found.append(Pass(action, key, part, pass_name(action), expects, arriving, task.sends))
    return tuple(found)


class Flight:
    """``given`` is what the call brings, ``pieces`` this rank's parts of it by stage and micro-batch; ``keep``: passes back
    follow."""

    def __init__(
        self, given: Sequence[Tensor], pieces: Mapping[Key, Sequence[Tensor]], keep: bool, passes: Passes
    ) -> None:
        self.given, self.pieces, self.keep, self.passes = given, pieces, keep, passes
        self.stores = True
        """Whether buffers that passes change are replaced."""
        self.results: dict[Key, Tensor] = {}
        """By the place of an output and the micro-batch, this rank's part of it."""
        self.found: dict[Key, Mapping[int, Tensor | None]] = {}
        """By stage and micro-batch, the gradients of what the call brought, by their values."""
        self.arriving: Callable[[int, int], Tensor | None] = lambda place, microbatch: None
        """The gradient of this rank's part of an output for one micro-batch."""
        self.sources: dict[int, list[Tensor]] = {}
        """By program, its parameters, buffers and constants when it was last run."""

    def perform(self, order: Sequence[Pass], mail: Mail, last: bool) -> None:
        """Run these passes; ``last``: no others follow."""
        for task in order:
            if task.expects:
                mail.expect(task.expects)
            with named(task.name):
                kind = task.action.kind
                if kind == FORWARD:
                    self._forward(task, mail)
                elif kind == WEIGHT:
                    self.found[task.key] = self._owned(task.part, self.passes.weights(task.action, task.part))
                else:
                    self._backward(task, mail)
        mail.finish()
        if last:
            self.passes.finish()

    def _owned(self, part: Part, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        """The gradients of what the call brought, to be kept until it goes back."""
        found = {value: gradients.get(value) for value in part.wanted}
        return {value: None if x is None else self.passes.own(x) for value, x in found.items()}

    def _sources(self, part: Part) -> list[Tensor]:
        """Looked up once a call, unless passes replace buffers."""
        known = self.sources.get(id(part))
        if known is None or part.flow.mutations:
            known = self.sources[id(part)] = part.sources()
        return known

    def _forward(self, task: Pass, mail: Mail) -> None:
        part, action = task.part, task.action
        sources = [*self._sources(part), *self.pieces[task.key]]
        for name, messages in task.arriving:
            sources.append(mail.receive(messages, part.flow.values[part.flow.rest[name]].local.shape))
        found = self.passes.forward(action, part, sources, self.keep)
        for message in task.sends:
            mail.send(message, found[part.results[message.border.tensor]])
        for place, name in part.part.results:
            self.results[place, action.microbatch] = self.passes.own(found[part.results[name]])
        if part.flow.mutations and self.stores:
            part.store({value: self.passes.own(found[value]) for _, value in part.flow.mutations})

    def _backward(self, task: Pass, mail: Mail) -> None:
        part, action = task.part, task.action
        flow, numbers = part.flow, part.results
        gradients: dict[int, Tensor | None] = {}

        def add(value: int, gradient: Tensor) -> None:
            known = gradients.get(value)
            gradients[value] = gradient if known is None else known + gradient

        for name, messages in task.arriving:
            value, border = numbers[name], messages[0].border
            found = mail.receive(messages, flow.values[value].local.shape)
            add(value, found / border.shares if border.shares > 1 else found)
        for place, name in part.part.results:
            whole = self.arriving(place, action.microbatch)
            if whole is not None:
                add(numbers[name], whole / part.shares[name] if part.shares[name] > 1 else whole)
        back = self.passes.backward(action, part, gradients)
        if action.kind != INPUT and part.wanted:
            self.found[task.key] = self._owned(part, back)
        if task.sends:
            self._send_back(task, back, mail)

    def _send_back(self, task: Pass, back: Mapping[int, Tensor | None], mail: Mail) -> None:
        """The gradients of what other stages sent."""
        part, sent = task.part, dict[str, Tensor]()
        flow = part.flow
        for message in task.sends:
            name = message.border.tensor
            key = f"{name} {message.border.as_is}"
            if key not in sent:
                value = flow.rest[name]
                local = flow.values[value].local
                gradient = back.get(value)
                if gradient is None:  # nobody brings one: the stage that waits for it is told so
                    gradient = torch.zeros(local.shape, dtype=getattr(torch, local.dtype), device=part.rank.device)
                gradient = gradient.expand(local.shape)
                back_to = part.arguments.as_kept[name].backward
                sent[key] = gradient if message.border.as_is else run_steps(gradient, back_to)
            mail.send(message, sent[key])
