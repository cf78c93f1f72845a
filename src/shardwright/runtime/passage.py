"""One step of a pipeline on one rank: the passes of its schedule in order, with the parcels between them.

Every pass waits for what it reads and for nothing else. A passage may run the whole schedule, its forward passes alone, or
the backward passes after those; what the passes leave behind (results of micro-batches, gradients that were kept back) is
handed to the module. How a pass is run, eagerly or as it was recorded, is not this module's business
(:mod:`~shardwright.runtime.recorded_passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import local_of
from shardwright.lowering.collectives import run_steps
from shardwright.program.border import whole_layout
from shardwright.program.dataflow import Result
from shardwright.program.naming import pass_name
from shardwright.program.pipeline import Pipeline
from shardwright.program.stages import StageGraph
from shardwright.program.tasks import Message, Task
from shardwright.runtime.border import Crossing, entrance
from shardwright.runtime.execution import Rank
from shardwright.runtime.mail import Mail
from shardwright.runtime.profiling import named
from shardwright.runtime.recorded_passes import Passes
from shardwright.runtime.stage_executor import StageExecutor
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT


@dataclass(eq=False)
class StagePart:
    """A stage on this rank, for micro-batches of one size."""

    executor: StageExecutor
    part: StageGraph
    rank: Rank
    entrances: Mapping[str, Crossing]
    """Of tensors that the call brings: from the whole tensor to the part that this rank keeps."""
    summing: Mapping[str, Crossing]
    """Of tensors of other stages: their gradients are summed between the ranks that hold the tensor alike."""
    shares: Mapping[str, int]
    """Between how many ranks the gradient of a result is shared out."""

    @staticmethod
    def of(executor: StageExecutor, part: StageGraph, rank: Rank, decisions: Any) -> StagePart:
        flow = executor.flow
        names = [entry.tensor for entry in flow.graph.inputs if entry.tensor is not None]
        resting = flow.strategy.resting
        entrances = {
            name: entrance(flow, decisions, name, whole_layout(resting[name]), rank.bound)
            for name in names
            if name not in part.received
        }
        summing = {name: entrance(flow, decisions, name, resting[name], rank.bound) for name in part.wanted}
        shares = {
            flow.values[output.value].tensor: output.shares for output in flow.outputs if isinstance(output, Result)
        }
        return StagePart(executor, part, rank, entrances, summing, shares)

    @cached_property
    def results(self) -> Mapping[str, int]:
        """The numbers of the values that are handed out."""
        flow = self.executor.flow
        return {flow.values[o.value].tensor: o.value for o in flow.outputs if isinstance(o, Result)}


@dataclass(eq=False)
class Passage:
    """A step under way. ``parts`` are this rank's stages by number and size of micro-batch; ``given`` the tensors of the
    call, whole."""

    pipeline: Pipeline
    parts: Mapping[tuple[int, int], StagePart]
    given: Mapping[str, Tensor]
    keep: bool
    passes: Passes = field(default_factory=Passes)
    results: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By the place of an output and the micro-batch, this rank's part of it."""
    arriving: Callable[[int, int], Tensor | None] = lambda place, microbatch: None
    """The gradient of this rank's part of an output, where the model hands one out that a gradient comes back to."""

    def perform(self, steps: Sequence[Task], mail: Mail) -> None:
        """Run these passes in order."""
        for number, step in enumerate(steps):
            mail.expect(step.receives)
            if number + 1 < len(steps):
                mail.expect(steps[number + 1].receives)
            with named(pass_name(step.action)):
                if step.action.kind == FORWARD:
                    self._forward(step, mail)
                elif step.action.kind == WEIGHT:
                    self.passes.weights(step.action, self._part(step))
                else:
                    self._backward(step, mail)
        mail.finish()
        self.passes.finish()

    def _part(self, step: Task) -> StagePart:
        size = self.pipeline.micro.sizes[step.action.microbatch]
        return self.parts[step.action.stage, size]

    def _forward(self, step: Task, mail: Mail) -> None:
        microbatch, part = step.action.microbatch, self._part(step)
        executor, graph = part.executor, part.part.graph
        received = {name: parts for (name, _), parts in _by_border(step.receives).items()}
        sources: list[Tensor] = [local_of(part.rank.held(p.tensor)).detach() for p in graph.parameters]
        sources += [local_of(part.rank.held(b.tensor)) for b in graph.buffers]
        sources += part.rank.constants
        for name in (entry.tensor for entry in graph.inputs if entry.tensor is not None):
            if name in part.part.received:
                shape = executor.flow.values[executor.flow.rest[name]].local.shape
                sources.append(mail.receive(received[name], shape))
            else:
                sources.append(self._input(part, name, microbatch))
        found, numbers = self.passes.forward(step.action, part, sources, self.keep), part.results
        for message in step.sends:
            mail.send(message, found[numbers[message.border.tensor]])
        for place, name in part.part.results:
            self.results[place, microbatch] = self.passes.own(found[numbers[name]])
        for buffer, value in executor.flow.mutations:
            held, key = part.rank.home[buffer]
            held[key] = self.passes.own(found[value]).detach()

    def _input(self, part: StagePart, name: str, microbatch: int) -> Tensor:
        source, dim = self.pipeline.micro.given[name]
        tensor = self.given[source]
        if dim is not None:
            start, stop = self.pipeline.micro.region(tensor.shape[dim], microbatch)
            tensor = tensor.narrow(dim, start, stop - start)
        return part.entrances[name](tensor).to(part.rank.device)

    def _backward(self, step: Task, mail: Mail) -> None:
        microbatch, part = step.action.microbatch, self._part(step)
        executor, numbers = part.executor, part.results
        gradients: dict[int, Tensor | None] = {}

        def add(value: int, gradient: Tensor) -> None:
            known = gradients.get(value)
            gradients[value] = gradient if known is None else known + gradient

        for (name, _), messages in _by_border(step.receives).items():
            value, border = numbers[name], messages[0].border
            found = mail.receive(messages, executor.flow.values[value].local.shape)
            add(value, found / border.shares if border.shares > 1 else found)
        for place, name in part.part.results:
            whole = self.arriving(place, microbatch)
            if whole is not None:
                add(numbers[name], whole / part.shares[name] if part.shares[name] > 1 else whole)
        back = self.passes.backward(step.action, part, gradients)
        sent: dict[str, Tensor] = {}
        for message in step.sends:
            name = message.border.tensor
            key = f"{name} {message.border.as_is}"
            if key not in sent:
                value = executor.flow.rest[name]
                local = executor.flow.values[value].local
                gradient = back.get(value)
                if gradient is None:  # nobody brings one: the stage that waits for it is told so
                    gradient = torch.zeros(local.shape, dtype=getattr(torch, local.dtype), device=part.rank.device)
                gradient = gradient.expand(local.shape)
                sent[key] = gradient if message.border.as_is else run_steps(gradient, part.summing[name].backward)
            mail.send(message, sent[key])


def _by_border(messages: Sequence[Message]) -> dict[tuple[str, int], list[Message]]:
    """Messages by the tensor they are about and the stage that reads it."""
    found: dict[tuple[str, int], list[Message]] = {}
    for message in messages:
        found.setdefault((message.border.tensor, message.border.target), []).append(message)
    return found


def only(every: Sequence[Sequence[Task]], forward: bool) -> tuple[tuple[Task, ...], ...]:
    """The forward passes of every rank in their order, or the others."""
    kinds = (FORWARD,) if forward else (BACKWARD, INPUT, WEIGHT)
    return tuple(tuple(step for step in steps if step.action.kind in kinds) for steps in every)
