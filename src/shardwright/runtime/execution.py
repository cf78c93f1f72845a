"""One program of one rank, ready to be called: its readers of parameters, its borders, its code.

A module has one for the call that the plan was made for, and a further one, under the same strategy, for calls whose inputs
require gradients. They share parameters, gradient buckets and process groups, which belong to the module (:class:`Rank`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from shardwright._torch_compat import local_of, unflatten_tree
from shardwright.costs.bundles import bundles
from shardwright.frontend.containers import restored_tree
from shardwright.lowering.collectives import BoundStep, Line
from shardwright.lowering.emit import direct, emit
from shardwright.lowering.program import Change, Compute, Program, Read, Result, parameter_reads
from shardwright.lowering.recompute import with_recomputation
from shardwright.runtime.border import Inputs, Outputs, departure, handed_out
from shardwright.runtime.gradients import Gradients, Slot
from shardwright.runtime.inputs import Arguments
from shardwright.runtime.leaves import Leaf
from shardwright.runtime.reading import Reader, ReadingQueue
from shardwright.runtime.shards import distributed


@dataclass(frozen=True, eq=False)
class Rank:
    """What the programs of one module share."""

    mesh: DeviceMesh
    device: torch.device
    groups: Mapping[str, str]
    gradients: Gradients
    home: Mapping[str, tuple[dict[str, Any], str]]
    """Where each parameter and buffer is looked up: the place in its module, and its key there."""
    slots: Mapping[str, Slot]
    constants: Sequence[Tensor]
    compute_dtype: torch.dtype | None
    recompute: Sequence[str]
    inputs: Inputs
    outputs: Outputs

    def held(self, tensor: str) -> Tensor:
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

    def __init__(self, program: Program, rank: Rank) -> None:
        self.program, self.rank, self.graph = program, rank, program.graph
        self.queue = ReadingQueue()
        self._read: list[str] = []
        readers = self._readers(rank.compute_dtype)
        self._bundle(readers)
        eager, whole = emit(program, rank.groups, rank.device, readers), emit(program, rank.groups, rank.device)
        self._eager: Callable[..., Any] = direct(with_recomputation(eager, rank.recompute))
        self._whole = with_recomputation(whole, rank.recompute)
        self._output_tree = restored_tree(self.graph.output_tree)
        self.arguments = Arguments(program, rank.device, rank.bound, rank.inputs)
        tensors = self.graph.tensors
        found = [result for result in program.results if isinstance(result, Result)]
        self._has_loss = any(tensors[r.tensor].grad and tensors[r.tensor].elements == 1 for r in found)
        self._exits = {r.value: departure(program, r.tensor, r.layout, rank.bound) for r in found}

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """Run eagerly, parameters gathered ahead of use and gradients reduced during backward."""
        with self.queue.hooks():
            results, changed = self._eager(*self._sources(inputs))
        return self._finished(results, changed)

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
                sources.append(self.arguments.part(given.tensor, leaf))
        return self._finished(*self._whole(*sources))

    @property
    def holds_back(self) -> bool:
        """Whether gradients of passes under ``no_sync`` wait here for the next pass."""
        return any(reader.kept_back is not None for reader in self.queue.readers) or any(
            leaf.holds_back for leaf in self._leaves.values()
        )

    def _sources(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's part of every source, in the order of the program's placeholders; readers are told theirs."""
        leaves = {tensor: leaf.tensor() for tensor, leaf in self._leaves.items()}
        self.queue.begin([leaves[tensor] for tensor in self._read])
        sources = list(leaves.values())
        sources += [local_of(self.rank.held(b.tensor)) for b in self.graph.buffers]
        sources += self.rank.constants
        sources += [self.arguments.part(name, leaf) for name, leaf in inputs.items()]
        return sources

    def _finished(self, results: Any, changed: Any) -> Any:
        for (name, _), value in zip(self.program.mutations, changed, strict=True):
            self._store(name, value)
        leaves = [
            self._handed_out(value, result) if isinstance(result, Result) else value
            for value, result in zip(results, self.program.results, strict=True)
        ]
        return unflatten_tree(leaves, self._output_tree)

    def _store(self, tensor: str, value: Tensor) -> None:
        """Replace a buffer: writing into it would spoil what autograd saved of the old value."""
        held, key = self.rank.home[tensor]
        before, value = held[key], value.detach()
        if hasattr(before, "device_mesh"):
            value = distributed(value, before.device_mesh, tuple(before.placements), before.shape)
        held[key] = value

    def _handed_out(self, value: Tensor, result: Result) -> Tensor:
        """Whole results as they are, cut ones as the caller wants them."""
        if self.rank.outputs == "local" or all(isinstance(placement, Replicate) for placement in result.layout):
            return value
        shape, crossing = self.graph.tensors[result.tensor].shape, self._exits[result.value]
        compiling = torch.compiler.is_compiling()
        if self.rank.outputs == "whole" and not (compiling and self._has_loss):
            return crossing(value) if compiling else handed_out(value, crossing, shape)
        if compiling and self._has_loss:
            # The compiler wants a gradient for every DTensor that it hands out, and a loss alone brings none.
            value = value.detach()
        return distributed(value, self.rank.mesh, result.layout, shape)

    def _readers(self, dtype: torch.dtype | None) -> dict[str, Reader]:
        """A reader for every change of layout that starts from a parameter; others are used as the leaves that they are."""
        program, parameters = self.program, self.graph.parameter_of
        used = {name for i in program.instructions if isinstance(i, Compute) for name in i.inputs}
        handed_out = {result.value for result in program.results if isinstance(result, Result)}
        reads: list[tuple[str, str, tuple[BoundStep, ...], tuple[BoundStep, ...]]] = []
        for step in program.instructions:
            if isinstance(step, Read) and step.tensor in parameters and step.result in used | handed_out:
                reads.append((step.result, step.tensor, (), ()))
            elif isinstance(step, Change) and step.source in parameters:
                reads.append((step.result, step.tensor, step.forward, step.backward))
        shares = Counter(tensor for _, tensor, _, _ in reads)
        slots, gradients, bound = self.rank.slots, self.rank.gradients, self.rank.bound
        self._leaves = {p.tensor: Leaf(*self.rank.home[p.tensor]) for p in self.graph.parameters}
        readers: dict[str, Reader] = {}
        for value, tensor, forward, backward in reads:
            alone = shares[tensor] == 1
            if not forward and not backward and dtype is None and value not in handed_out:
                self._leaves[tensor].give(slots[tensor], gradients, alone)
                continue
            readers[value] = Reader(
                slots[tensor],
                bound(forward),
                bound(backward),
                self.queue,
                gradients,
                again=tensor in program.strategy.regathered,
                alone=alone,
                dtype=dtype,
            )
            self._read.append(tensor)
        return readers

    def _bundle(self, readers: Mapping[str, Reader]) -> None:
        """Tell the readers which of them gather together, and whose gradients are scattered together."""
        reads, whole = parameter_reads(self.program), self.program.strategy.whole_gradients
        found = bundles(self.graph, [read for _, read in reads], whole, self.rank.recompute)
        order = [readers[change.result] for change, _ in reads]
        for together in (tuple(order[number] for number in numbers) for numbers in found.gathers):
            for reader in together:
                reader.bundle = together
        for together in (tuple(order[number] for number in numbers) for numbers in found.scatters):
            slots = tuple(reader.slot for reader in together)
            for reader in together:
                reader.scatters = slots
