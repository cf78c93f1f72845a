"""One program of one rank, ready to be called: its executor, its borders, its code for the compiler.

A module has one for the call that the plan was made for, and further ones, under the same strategy, for other calls, for
those whose inputs require gradients and for thawed parameters (:mod:`~shardwright.runtime.programs`). They share parameters
and process groups, which belong to the module (:class:`Rank`). Autograd sees a program as one function: ``loss.backward()``
runs its backward instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from shardwright._torch_compat import locals_of, unflatten_tree
from shardwright.errors import RunError
from shardwright.frontend.containers import restored_tree
from shardwright.lowering.emit import emit
from shardwright.program import Decisions, Program
from shardwright.program.dataflow import Compute, Result
from shardwright.program.recording import draws
from shardwright.program.steps import BoundStep, Line
from shardwright.runtime.actions import Run
from shardwright.runtime.border import Inputs, Outputs, departure, handed_out
from shardwright.runtime.executor import Executor
from shardwright.runtime.inputs import Arguments
from shardwright.runtime.replay import Replay, recorder_for
from shardwright.runtime.shards import distributed


@dataclass
class Gradients:
    """``hold`` keeps the gradients of a module back, as the first passes of an accumulation want it; ``holding`` are the
    programs that have kept some. ``compiled``: they are computed by compiled regions, and so are the results."""

    compiled: bool = False
    hold: bool = False
    holding: list[Executor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Rank:
    """What the programs of one module share."""

    mesh: DeviceMesh
    device: torch.device
    groups: Mapping[str, str]
    gradients: Gradients
    home: Mapping[str, tuple[dict[str, Any], str]]
    """Where each parameter and buffer is looked up: the place in its module, and its key there."""
    constants: Sequence[Tensor]
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    inputs: Inputs
    outputs: Outputs

    @property
    def hold(self) -> bool:
        return self.gradients.hold

    @property
    def compiled(self) -> bool:
        return self.gradients.compiled

    def held(self, tensor: str) -> Any:
        """The parameter or buffer behind a name of the graph, as it is now."""
        place, key = self.home[tensor]
        return place[key]

    def bound(self, steps: tuple[BoundStep, ...]) -> tuple[BoundStep, ...]:
        """Steps with the process groups in place of the axes' names."""
        return tuple(step._replace(line=self.line(step.line)) for step in steps)

    def line(self, line: Line) -> Line:
        return line._replace(group=self.groups[line.group])


class Execution:
    """A program that can be called."""

    def __init__(self, program: Program, decisions: Decisions, rank: Rank) -> None:
        self.program, self.decisions, self.rank, self.graph = program, decisions, rank, program.graph
        self.flow = program.flow
        self.executor = Executor(program, rank)
        recorder = recorder_for(program, rank.device)
        self.replay = None if recorder is None else Replay(self.executor, recorder, self._laid)
        self._anchor = torch.empty(0, requires_grad=True)
        self._kept = [rank.home[p.tensor] for p in self.graph.parameters]
        self._kept += [rank.home[b.tensor] for b in self.graph.buffers]
        self._output_tree = restored_tree(self.graph.output_tree)
        self.arguments = Arguments(self.flow, decisions, rank.device, rank.bound, rank.inputs)
        self._results = [output for output in self.flow.outputs if isinstance(output, Result)]
        values, tensors = self.flow.values, self.graph.tensors
        found = [tensors[values[r.value].tensor] for r in self._results]
        self._has_loss = any(tensor.grad and tensor.elements == 1 for tensor in found)
        self._whole: torch.nn.Module | None = None
        self._exits = {r.value: departure(self.flow, decisions, r.value, rank.bound) for r in self._results}

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """Run the program on inputs in the order of the graph; a backward pass may follow where gradients are wanted."""
        parts = [self.arguments.part(name, leaf) for name, leaf in inputs.items()]
        sources = locals_of([place[key] for place, key in self._kept])
        sources += self.rank.constants
        if torch.is_grad_enabled() and self.program.roots:
            results = _Step.apply(self, self._anchor, sources, *parts)
            return self._finished(dict(zip((r.value for r in self._results), results, strict=True)))
        run = self.executor.forward(self._laid([*sources, *(x.detach() for x in parts)]), False)
        self._store(run)
        return self._finished({r.value: self.executor.result(run, r.value) for r in self._results})

    def compiled(self, leaves: Sequence[Any]) -> Any:
        """Run with everything inline, as the compiler wants it: parameters read by their public, traceable way.

        ``leaves`` are the arguments of the call in order.
        """
        sources: list[Any] = []
        for entry in self.graph.parameters:
            parameter: Any = self.rank.held(entry.tensor)
            sources.append(parameter.to_local(grad_placements=parameter.placements))
        sources += [self.rank.held(b.tensor) for b in self.graph.buffers]
        sources += self.rank.constants
        for given, leaf in zip(self.graph.inputs, leaves, strict=True):
            if given.tensor is not None:
                part = self.arguments.part(given.tensor, leaf)
                sources.append(self.arguments.laid(given.tensor, part))
        self._emitted()
        assert self._whole is not None
        results, changed = self._whole(*sources)
        for (name, _), value in zip(self.flow.mutations, changed, strict=True):
            self._replace(name, value)
        return self._finished(
            {
                output.value: value
                for output, value in zip(self.flow.outputs, results, strict=True)
                if isinstance(output, Result)
            }
        )

    @torch.compiler.assume_constant_result  # performed, not traced, when the compiler comes by
    def _emitted(self) -> bool:
        if self._whole is None:
            self._whole = emit(self.flow, self.decisions, self.rank.line, self.rank.device)
        return True

    def forward(self, sources: Sequence[Tensor]) -> Run:
        """A forward pass that a backward pass may follow."""
        if self.replay is None:
            return self.executor.forward(self._laid(sources), True)
        return self.replay.forward(sources)

    def _laid(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """All sources in the order in which they are computed with."""
        return [self.arguments.laid(name, x) for name, x in zip(self.graph.sources, sources, strict=True)]

    def backward(self, run: Run, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        """A backward pass; one that holds nothing back takes along what passes of other programs have held back."""
        holding = self.rank.gradients.holding
        if not self.rank.hold:
            for other in [other for other in holding if other is not self.executor]:
                other.send_home()
            holding.clear()
        found = (self.executor if self.replay is None else self.replay).backward(run, gradients)
        if self.executor.home.kept_back and self.executor not in holding:
            holding.append(self.executor)
        return found

    def retire(self) -> None:
        """Another program of the module runs next: buckets are let go of, unless a recorded step writes into them."""
        for flat in self.executor.flats if self.replay is None else ():
            flat.release()

    @property
    def draws(self) -> bool:
        """Whether anything in it is random."""
        return any(isinstance(n, Compute) and draws(n.op, n.rules.kind) for n in self.flow.nodes)

    def _store(self, run: Run) -> None:
        for name, value in self.flow.mutations:
            self._replace(name, self.executor.result(run, value))

    def _replace(self, tensor: str, value: Tensor) -> None:
        """Replace a buffer: writing into it would spoil what is kept of the old value for backward."""
        held, key = self.rank.home[tensor]
        before, value = held[key], value.detach()
        if hasattr(before, "device_mesh"):
            value = distributed(value, before.device_mesh, tuple(before.placements), before.shape)
        held[key] = value

    def _finished(self, results: Mapping[int, Tensor]) -> Any:
        leaves = [
            self._handed_out(results[output.value], output.value) if isinstance(output, Result) else output
            for output in self.flow.outputs
        ]
        return unflatten_tree(leaves, self._output_tree)

    def _handed_out(self, value: Tensor, number: int) -> Tensor:
        """Whole results as they are, cut ones as the caller wants them."""
        layout, tensor = self.flow.values[number].needs, self.flow.values[number].tensor
        if self.rank.outputs == "local" or all(isinstance(placement, Replicate) for placement in layout):
            return value
        shape, crossing = self.graph.tensors[tensor].shape, self._exits[number]
        compiling = torch.compiler.is_compiling()
        if self.rank.outputs == "whole" and not (compiling and self._has_loss):
            return crossing(value) if compiling else handed_out(value, crossing, shape)
        if compiling and self._has_loss:
            # The compiler wants a gradient for every DTensor that it hands out, and a loss alone brings none.
            value = value.detach()
        return distributed(value, self.rank.mesh, layout, shape)


class _Step(torch.autograd.Function):
    """A program as autograd sees it. Gradients of parameters go home inside; those of inputs are handed back."""

    @staticmethod
    def forward(ctx: Any, execution: Execution, anchor: Tensor, sources: list[Tensor], *parts: Tensor) -> Any:
        executor, flow = execution.executor, execution.flow
        ctx.execution, ctx.run = execution, execution.forward([*sources, *(x.detach() for x in parts)])
        execution._store(ctx.run)
        results, seen = [], {id(x) for x in (*sources, *parts)}
        for output in execution._results:
            value = executor.result(ctx.run, output.value)
            if id(value) in seen or value.untyped_storage().data_ptr() in {
                s.untyped_storage().data_ptr() for s in parts
            }:
                value = value.clone()  # autograd wants results of its functions to be nobody else's
            seen.add(id(value))
            results.append(value)
        plain = [x for o, x in zip(execution._results, results, strict=True) if o.value not in execution.program.roots]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        ctx.inputs = [flow.rest[i.tensor] for i in flow.graph.inputs if i.tensor is not None]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        execution, run = ctx.execution, ctx.run
        if run.spent:
            raise RunError(
                "A second backward pass goes through the same forward pass of a parallelized module.",
                "What it needs is freed by the first: add the losses up before backward(), or run the forward pass again.",
            )
        arrived: dict[int, Tensor] = {}
        for output, gradient in zip(execution._results, gradients, strict=True):
            if gradient is not None:
                mine = gradient / output.shares if output.shares > 1 else gradient
                known = arrived.get(output.value)
                arrived[output.value] = mine if known is None else known + mine
        found = execution.backward(run, arrived)
        return None, None, None, *(found.get(value) for value in ctx.inputs)
