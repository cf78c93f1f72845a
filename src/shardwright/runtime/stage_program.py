"""A stage on this rank, for micro-batches of one size: its program, ready to run, and how tensors enter and leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwright._torch_compat import locals_of
from shardwright.program import Decisions, Program
from shardwright.program.dataflow import ResultValue
from shardwright.program.stages import StageGraph
from shardwright.runtime.actions import PassState
from shardwright.runtime.boundary_steps import output_steps
from shardwright.runtime.executor import Executor
from shardwright.runtime.inputs import Arguments
from shardwright.runtime.rank import Rank
from shardwright.runtime.shards import distributed


class StageProgram:
    """What one rank runs of one stage."""

    def __init__(self, program: Program, part: StageGraph, rank: Rank, decisions: Decisions) -> None:
        self.part, self.rank, self.flow = part, rank, program.flow
        self.executor = executor = Executor(program, rank)
        flow, graph = program.flow, part.graph
        self.arguments = Arguments(flow, decisions, rank.device, rank.bound, rank.inputs, part.received)
        self.given = [e.tensor for e in graph.inputs if e.tensor is not None and e.tensor not in part.received]
        """The inputs that the call brings."""
        self.shares = {flow.values[o.value].tensor: o.shares for o in flow.outputs if isinstance(o, ResultValue)}
        """Between how many ranks the gradient of a result is shared out."""
        self.results = flow.result_of
        self.exits = {
            name: output_steps(flow, decisions, self.results[name], rank.bound)
            for name in dict.fromkeys(name for _, name in part.results)
        }
        """Of results of the model: the steps from this rank's part to the whole, and those of its gradient."""
        leaving = [*self.results.values(), *(value for _, value in flow.mutations)]
        self._leaving = [(value, program.slot_of(value)) for value in leaving]
        self._kept = [rank.home[p.tensor] for p in graph.parameters] + [rank.home[b.tensor] for b in graph.buffers]
        self._lays = not part.received and not executor.apart
        self.wanted = [flow.rest[name] for name in self.given if flow.rest[name] in program.gradients]
        """The values of inputs that the call brings and that a gradient goes back to."""

    def sources(self) -> list[Tensor]:
        """This rank's part of parameters, buffers and constants, as they are now."""
        return [*locals_of([place[key] for place, key in self._kept]), *self.rank.constants]

    def laid(self, sources: Sequence[Tensor]) -> Sequence[Tensor]:
        """All sources in the order in which they are computed with."""
        arguments = self.arguments
        if not arguments.lays or not self._lays:
            return sources
        return [arguments.laid(name, x) for name, x in zip(self.flow.graph.sources, sources, strict=True)]

    def handed_out(self, run: PassState) -> dict[int, Tensor]:
        """The values of a forward pass that leave it: what others read, and what becomes a buffer."""
        slots = run.slots
        return {value: slots[slot] for value, slot in self._leaving}

    def store(self, values: Mapping[int, Tensor]) -> None:
        """Replace the buffers that a pass has changed: writing into them would spoil what is kept of the old values."""
        for tensor, number in self.flow.mutations:
            held, key = self.rank.home[tensor]
            before: Any = held[key]
            value = values[number].detach()
            if hasattr(before, "device_mesh"):
                value = distributed(value, before.device_mesh, tuple(before.placements), before.shape)
            held[key] = value
