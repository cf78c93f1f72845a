"""Shares of the batch moved between ranks, between two steps, without a restart.

Where parameters are used whole along a mesh axis that cuts the batch (resting whole, or gathered from equal parts), nothing
but the rows of the next batch has to move: every rank is given the whole batch and takes another part of it. Losses and
gradients stay exact because every program sums over rows and divides by counts, whatever its own part. A program for the new
shares is built beside the one that runs, all ranks tell each other that theirs is ready, and only then do all of them change
over: there is never a mixture of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Replicate, Shard

from shardwright._torch_compat import start_gathering
from shardwright.errors import RunError, ShardwrightError
from shardwright.lowering.randomness import random_state, set_random_state
from shardwright.operators.rules import chunk
from shardwright.program import Program
from shardwright.program.dataflow import Compute
from shardwright.program.steps import Line
from shardwright.runtime.execution import Execution
from shardwright.runtime.module import ParallelModule

KEPT = 3
"""Programs that are kept for the case that their shares come back."""


@dataclass(frozen=True)
class Batch:
    """The mesh axis whose shares of the batch can move, and what they are now. ``unit`` rows move together, because further
    axes cut what each rank of this one has."""

    axis: int
    name: str
    rows: tuple[int, ...]
    unit: int

    def shares(self, rows: Sequence[int]) -> tuple[float, ...]:
        return tuple(count / sum(rows) for count in rows)


def batch_of(program: Program) -> Batch:
    """What can be moved in a program.

    Raises
    ------
    RunError
        When nothing can, with the reason.
    """
    strategy, graph = program.strategy, program.graph
    buffers = [buffer.tensor for buffer in graph.buffers]
    reasons = []
    for axis, (name, size) in enumerate(strategy.axes):
        cuts = _cuts(program, axis)
        extents, unit = {extent for extent, _ in cuts}, max((inner for _, inner in cuts), default=1)
        rests = next((t for t in buffers if isinstance(strategy.resting[t][axis], Shard)), None)
        used = next((p.paths[0] for p in graph.parameters if _used_cut(program, p.tensor, axis)), None)
        if size == 1:
            reasons.append(f"axis {name!r} has one rank")
        elif rests is not None:
            reasons.append(f"{rests} rests cut along axis {name!r}")
        elif used is not None:
            reasons.append(f"{used} is used cut along axis {name!r}")
        elif len(extents) != 1:
            reasons.append(f"axis {name!r} cuts no rows of the inputs")
        else:
            parts = [chunk(min(extents), strategy.cuts[axis], index) for index in range(size)]
            rows = tuple(stop - start for start, stop in parts)
            if all(count and count % unit == 0 for count in rows):
                return Batch(axis, name, rows, unit)
            reasons.append(f"axis {name!r} cuts {min(extents)} rows into {rows}, and each needs {unit} or a multiple")
    raise RunError(
        f"No shares of this plan can be moved while it runs: {'; '.join(reasons)}.",
        "Assist a plan that cuts the batch along an axis on which parameters are used whole (data-parallel, fsdp).",
    )


def _used_cut(program: Program, tensor: str, axis: int) -> bool:
    """Whether some operator reads a part of a parameter along an axis."""
    values = program.flow.values
    read = (values[v] for node in program.flow.nodes if isinstance(node, Compute) for v in node.inputs)
    return any(value.tensor == tensor and not isinstance(value.needs[axis], Replicate) for value in read)


def _cuts(program: Program, axis: int) -> set[tuple[int, int]]:
    """Of every input that is read cut along an axis: its rows, and into how many parts further axes cut them."""
    flow, found = program.flow, set()
    inputs = {i.tensor for i in program.graph.inputs if i.tensor is not None}
    for value in flow.values:
        here = value.needs[axis]
        if value.tensor in inputs and isinstance(here, Shard):
            again = [size for need, size in zip(value.needs, flow.place.sizes, strict=True) if need == here]
            rows = program.graph.tensors[value.tensor].shape[here.dim]
            found.add((rows, math.prod(again) // flow.place.sizes[axis]))
    return found


class Mover:
    """Moves rows of the batch of one module; ``lines`` are the ranks along every mesh axis through this one."""

    def __init__(self, module: ParallelModule, lines: Sequence[Line]) -> None:
        if module._planned.rank.inputs != "whole":
            raise RunError(
                "Every rank is given its own part of the batch (inputs='local'), so no rows can be moved between ranks.",
                "Give every rank the whole batch (parallelize(..., inputs='whole')).",
            )
        self._module, self._lines = module, lines
        module._planned.replay = None  # waits inside of a replayed CUDA graph are not seen by any clock
        self.batch = batch_of(module.program)
        self.traces = True
        """Whether operators are traced at once for the new rows, and not only after some passes."""
        self._known: dict[tuple[int, ...], Execution] = {self.batch.rows: module._planned}

    def move(self, rows: tuple[int, ...]) -> bool:
        """Deal the batch out in these rows from the next call on; false where some rank cannot, and nothing has changed."""
        module, before = self._module, self._module._planned
        execution = self._known.get(rows) or self._built(rows)
        if not _all(execution is not None, self._lines, module.device):
            return False
        assert execution is not None
        module._adopt(execution)
        for flat in before.executor.flats:
            flat.release()
        self._known[rows] = execution
        if len(self._known) > KEPT:
            del self._known[list(self._known)[1]]  # the first is the plan's own, to which the rows return
        self.batch = replace(self.batch, rows=rows)
        return True

    def _built(self, rows: tuple[int, ...]) -> Execution | None:
        module, strategy = self._module, self._module.program.strategy
        shares = {**strategy.shares, self.batch.name: self.batch.shares(rows)}
        state = random_state(module.device)
        try:
            execution = module._under(replace(strategy, shares=shares))
            execution.replay = None
            if self.traces:
                execution.executor.settle()
        except ShardwrightError:
            return None  # this rank has no program for such rows; the others are told
        finally:
            set_random_state(state, module.device)
        return execution


def _all(mine: bool, lines: Sequence[Line], device: torch.device) -> bool:
    """Whether every rank says yes."""
    answer = torch.tensor([int(mine)], device=device)
    for line in lines:
        answer = start_gathering(answer, line.size, line.group).wait()
    return bool(answer.all())
