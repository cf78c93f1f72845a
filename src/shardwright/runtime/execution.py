"""Stages that can be called: their programs with everything they need to run, as one function that autograd sees.

A module has one for the call that the plan was made for, and further ones for other calls, for those whose inputs require
gradients and for thawed parameters (:mod:`~shardwright.runtime.programs`). They share parameters and process groups, which
belong to the module. Every call is a flight of its own (:mod:`~shardwright.runtime.in_flight`), and there are two protocols,
decided from the plan alone, so that all ranks decide alike. *Deferred*: the call runs the forward passes and ``backward()``
the rest; so where every rank's order has its forward passes first (one mesh, GPipe), where the model gives no scalar loss,
or its loss is of all rows together (:mod:`~shardwright.runtime.tail`). *At once*: other orders run backward passes before
the last forward pass, so the call runs the whole order with a gradient of one, and ``backward()`` scales what was kept back
by the gradient that arrives (the backward pass is linear in it) and reduces it. Without gradients only forward passes run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import owns_storage, unflatten_tree
from shardwright.errors import RunError
from shardwright.frontend.containers import restored_tree
from shardwright.frontend.replay import values_of
from shardwright.graph import Ref
from shardwright.lowering.emit import emit
from shardwright.operators import analyse
from shardwright.operators.record import draws
from shardwright.program import Decisions, Program
from shardwright.program.dataflow import Dataflow, ResultValue
from shardwright.program.naming import closing_name
from shardwright.program.tasks import Task
from shardwright.runtime.boundary import Boundary
from shardwright.runtime.executor import Executor
from shardwright.runtime.gradient_reduction import KeptBack
from shardwright.runtime.in_flight import CallInFlight, passes
from shardwright.runtime.inputs import matched
from shardwright.runtime.performer import Eager, Performer
from shardwright.runtime.point_to_point import PointToPoint
from shardwright.runtime.profiling import named
from shardwright.runtime.rank import Rank
from shardwright.runtime.recorder import step_recorder
from shardwright.runtime.shards import constant
from shardwright.runtime.stage_program import StageProgram
from shardwright.runtime.stages import Stages, axis_groups
from shardwright.runtime.step_end import StepEnd
from shardwright.runtime.tail import Tail
from shardwright.schedules import FORWARD, Action


class Execution:
    """One kind of call, ready to be made. ``rank`` is what all of a module's programs share, ``aside`` the buffers that are
    read beside the stages, whole."""

    def __init__(self, stages: Stages, rank: Rank, aside: Mapping[str, Tensor], step_end: StepEnd) -> None:
        self.stages, self.rank, self.pipeline, self.graph = stages, rank, stages.pipeline, stages.graph
        self.training, self._aside, self._step_end = stages.training, aside, step_end
        self._micro = micro = self.pipeline.micro
        self.parts = {key: self._part(*key) for key in stages.programs}
        self.waiting: dict[int, KeptBack] = {number: {} for number in stages.own}
        """By stage, the gradients that ``no_sync`` keeps back."""
        for (number, _), part in self.parts.items():
            if not part.executor.apart:
                part.executor.reduction.kept_back = self.waiting[number]
        self.tail = None if micro.tail is None else Tail(self.pipeline, aside, rank.held, rank.device)
        self.boundary = Boundary(self.pipeline, self.parts, rank, step_end.broadcast)
        order = stages.plan.schedule
        self.deferred = self.boundary.loss is None or order.forwards_first() == order
        self.trains = stages.training and bool(self.boundary.roots)
        """Whether a backward pass may follow."""
        every, own = [self.pipeline.steps(rank) for rank in range(dist.get_world_size())], dist.get_rank()
        self._orders, self._p2p = {}, {}
        halves = {"forward": _only(every, True), "backward": _only(every, False)}
        for name, orders in (halves if self.deferred else {"whole": every, **halves}).items():
            self._orders[name] = passes(orders[own], self.parts)
            self._p2p[name] = PointToPoint(orders, own, rank.device, stages.groups.pairs)
        largest = max(micro.sizes)
        self._largest = {stage: part for (stage, size), part in self.parts.items() if size == largest}
        self.recorder = step_recorder(self.order, self._largest) if self.trains else None
        self._anchor = torch.empty(0, requires_grad=True)
        self._output_tree = restored_tree(self.graph.output_tree)
        self._whole: torch.nn.Module | None = None

    def _part(self, number: int, size: int) -> StageProgram:
        stages, program = self.stages, self.stages.programs[number, size]
        mesh, part = stages.meshes[number], self.pipeline.parts[size][number]
        constants = [constant(c, program.flow, self.rank.device) for c in part.graph.constants]
        rank = replace(self.rank, mesh=mesh, groups=axis_groups(mesh), constants=constants)
        return StageProgram(program, part, rank, stages.decisions[number])

    def like(self, stages: Stages, home: Mapping[str, tuple[dict[str, Any], str]] | None = None) -> Execution:
        """Another kind of call of the same module; ``home``: where its parameters and buffers are, where their names are
        others."""
        rank = self.rank if home is None else replace(self.rank, home=home)
        return Execution(stages, rank, self._aside, self._step_end)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """Run on inputs in the order of the graph; a backward pass may follow where gradients are wanted."""
        self._step_end.broadcast.finish()
        boundary = self.boundary
        given = self._prepared(boundary.looked_at(inputs))
        if torch.is_grad_enabled() and self.trains:
            results = _Step.apply(self, self._anchor, *boundary.pieces(given))
        else:
            flight = self._flown([x.detach() for x in boundary.pieces(given)], "forward", False)
            results = boundary.results(flight, False)
        outputs = zip(boundary.outputs.values(), results, strict=True)
        found = {output.name: boundary.handed_out(output.name, x) for output, x in outputs}
        if self.tail is not None:
            found |= self.tail.outputs({**{name: x.to(self.rank.device) for name, x in given.items()}, **found})
        return self._finished(found)

    def _prepared(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the call, and what is computed of them for the whole batch."""
        graph = self._micro.prepared
        if graph is None:
            return inputs
        with torch.no_grad():
            whole = {name: tensor.detach().to(self.rank.device) for name, tensor in inputs.items()}
            found = values_of(graph, whole | dict(self._aside), self.rank.device)
        return {**inputs, **{out.name: found[out.name] for out in graph.outputs if isinstance(out, Ref)}}

    @property
    def order(self) -> list[tuple[Action, StageProgram]]:
        """The passes of a training step as they are performed, and the program of each."""
        names = ("forward", "backward") if self.deferred else ("whole",)
        return [(one.action, one.part) for name in names for one in self._orders[name]]

    @property
    def _plain(self) -> bool:
        """Whether no gradients are held back."""
        return not self.rank.gradients.hold and not any(self.waiting.values())

    def _flown(self, pieces: Sequence[Tensor], which: str, keep: bool) -> CallInFlight:
        """A new flight and its first passes."""
        by_pass, sources = self.boundary.by_pass(pieces), {part: part.sources() for part in self.parts.values()}
        performer: Performer = Eager()
        if keep and self.recorder is not None:
            performer = self.recorder.performer(sources, by_pass, self._plain)
        flight = CallInFlight(pieces, by_pass, sources, keep, performer)
        if which == "whole":
            flight.arriving = partial(self.boundary.arriving, self.boundary.one)
        flight.perform(self._orders[which], self._p2p[which])
        return flight

    def called(self, pieces: Sequence[Tensor]) -> CallInFlight:
        """What a call runs that a backward pass may follow."""
        return self._flown(pieces, "forward" if self.deferred else "whole", True)

    def go_back(self, flight: CallInFlight, arrived: Mapping[int, Tensor]) -> list[Tensor | None]:
        """What ``backward()`` runs, from the gradients of outputs by their places; gives those of the pieces. What passes of
        other calls have held back is taken along, unless this is held back too."""
        gradients, scale = self.rank.gradients, None
        if self.deferred:
            if not gradients.hold:
                self._take_along()
            flight.performer = flight.performer.going_back(frozenset(arrived), self._plain)
            flight.arriving = partial(self.boundary.arriving, arrived)
            flight.perform(self._orders["backward"], self._p2p["backward"])
        else:
            loss = self.boundary.loss
            if others := [place for place in arrived if place != loss]:
                raise RunError(
                    f"A gradient arrives at output {others[0]} of a pipeline, which went back from its loss already.",
                    "Compute everything that the loss depends on inside the model, or return no scalar from it.",
                )
            scale = None if loss is None else arrived.get(loss)
            if scale is None:
                return [None] * len(flight.given)
            if not scale.is_cuda and bool(scale == 1):  # a device would have to be waited for
                scale = None
            if not gradients.hold:
                self._take_along()
        performer = flight.performer
        if gradients.hold:
            self._hold_back(performer, scale)
            if self not in gradients.holding:
                gradients.holding.append(self)
        elif self.pipeline.reduces_inside:
            self._step_end.finish(scaled=True)
        else:
            with self._step_end.around(scaled=self.deferred or scale is not None):
                if not (self._plain and performer.reduce(scale)):
                    self._hold_back(performer, scale)
                    self._reduce_waiting()
        performer.finish()
        return list(self.boundary.gradients(flight, scale))

    def _hold_back(self, performer: Performer, scale: Tensor | None) -> None:
        """Gradients of a flight are added to those that wait already."""
        for stage, kept in performer.kept_back().items():
            total = self.waiting[stage]
            for key, gradient in kept.items():
                if scale is not None:
                    factor = scale.to(gradient.dtype)
                    gradient = gradient.mul_(factor) if owns_storage(gradient) else gradient * factor
                total[key] = total[key] + gradient if key in total else gradient

    def _take_along(self) -> None:
        """What passes of other programs have held back is reduced too."""
        holding = self.rank.gradients.holding
        for other in [other for other in holding if other is not self]:
            other.reduce()
        holding.clear()

    def reduce(self) -> None:
        """Gradients that were kept back are summed and given to the parameters."""
        with self._step_end.around(scaled=False):
            self._reduce_waiting()

    def _reduce_waiting(self) -> None:
        for stage, part in self._largest.items():
            with named(closing_name(stage)):
                part.executor.reduce(self.waiting[stage])

    def retire(self) -> None:
        """Another program of the module runs next: buckets are let go of, unless a recorded step writes into them."""
        for part in self.parts.values() if self.recorder is None else ():
            for flat in part.executor.flats:
                flat.release()

    def settle(self) -> None:
        """From the next call on run what is traced."""
        for part in self.parts.values():
            part.executor.settle()

    def record_nothing(self) -> None:
        """Run without CUDA graphs: waits inside of a replayed one are not seen by any clock."""
        self.recorder = None

    @cached_property
    def draws(self) -> bool:
        """Whether anything in it is random."""
        return any(draws(op, analyse(op, self.graph.tensors).kind) for op in self.graph.ops)

    @property
    def only(self) -> StageProgram:
        """What this rank runs, where that is one program."""
        (part,) = self.parts.values()
        return part

    @property
    def program(self) -> Program:
        return self.only.executor.program

    @property
    def executor(self) -> Executor:
        return self.only.executor

    @property
    def flow(self) -> Dataflow:
        return self.only.flow

    @property
    def decisions(self) -> Decisions:
        return self.stages.decisions[0]

    def matched(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call by the graph's names."""
        shapes = self.only.arguments.shapes if self.rank.inputs == "local" else None
        return matched(self.graph, args, kwargs, shapes)

    def compiled(self, leaves: Sequence[Any]) -> Any:
        """Run with everything inline, as the compiler wants it: parameters read by their public, traceable way.

        ``leaves`` are the arguments of the call in order.
        """
        part, sources = self.only, []
        for entry in self.graph.parameters:
            parameter: Any = self.rank.held(entry.tensor)
            sources.append(parameter.to_local(grad_placements=parameter.placements))
        sources += [self.rank.held(b.tensor) for b in self.graph.buffers]
        sources += part.rank.constants
        for given, leaf in zip(self.graph.inputs, leaves, strict=True):
            if given.tensor is not None:
                sources.append(part.arguments.laid(given.tensor, part.arguments.part(given.tensor, leaf)))
        self._emitted()
        assert self._whole is not None
        results, changed = self._whole(*sources)
        part.store({number: value for (_, number), value in zip(part.flow.mutations, changed, strict=True)})
        flow, found = part.flow, {}
        for output, value in zip(flow.outputs, results, strict=True):
            if isinstance(output, ResultValue):
                found[flow.values[output.value].tensor] = value
        return self._finished({name: self.boundary.handed_out(name, value) for name, value in found.items()})

    @torch.compiler.assume_constant_result  # performed, not traced, when the compiler comes by
    def _emitted(self) -> bool:
        if self._whole is None:
            part = self.only
            self._whole = emit(part.flow, self.decisions, part.rank.line, self.rank.device)
        return True

    def _finished(self, found: Mapping[str, Tensor]) -> Any:
        outputs = [found[out.name] if isinstance(out, Ref) else out for out in self.graph.outputs]
        return unflatten_tree(outputs, self._output_tree)


class _Step(torch.autograd.Function):
    """A call as autograd sees it. Gradients of parameters go home inside; those of what it is given are handed back."""

    @staticmethod
    def forward(ctx: Any, execution: Execution, anchor: Tensor, *pieces: Tensor) -> Any:
        ctx.execution = execution
        ctx.flight = flight = execution.called([x.detach() for x in pieces])
        boundary = execution.boundary
        results = boundary.results(flight, True)
        ctx.mark_non_differentiable(
            *[x for place, x in zip(boundary.outputs, results, strict=True) if place not in boundary.roots]
        )
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        flight, ctx.flight = ctx.flight, None
        if flight is None:
            raise RunError(
                "A second backward pass goes through the same forward pass of a parallelized module.",
                "What it needs is freed by the first: add the losses up before backward(), or run the forward pass again.",
            )
        arrived = {p: g for p, g in zip(ctx.execution.boundary.outputs, gradients, strict=True) if g is not None}
        return None, None, *ctx.execution.go_back(flight, arrived)


def _only(every: Sequence[Sequence[Task]], forward: bool) -> tuple[tuple[Task, ...], ...]:
    """The forward passes of every rank in their order, or the others."""
    return tuple(tuple(task for task in tasks if (task.action.kind == FORWARD) == forward) for tasks in every)
