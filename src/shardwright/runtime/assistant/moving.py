"""Shares of a mesh axis moved between ranks, between two steps, without a restart.

Where parameters are used whole along an axis that cuts the batch (resting whole, or gathered from equal parts), nothing but
the rows of the next batch has to move: every rank is given the whole batch and takes another part of it. Where an axis cuts
parameters (tensor parallelism), they and their optimizer state move to the new cut (:mod:`~shardwright.runtime.recut`).
Losses and gradients stay exact because every program sums over what it has and divides by counts of the whole. A program
for the new shares is built beside the one that runs, all ranks tell each other that theirs is ready, and only then do all of
them change over: there is never a mixture of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.distributed.tensor import Replicate, Shard

from shardwright._torch_compat import start_gathering
from shardwright.errors import RunError, ShardwrightError
from shardwright.lowering.randomness import random_state, set_random_state
from shardwright.operators.rules import chunk, divides_exactly
from shardwright.plans import Plan
from shardwright.program import Program
from shardwright.program.dataflow import Compute
from shardwright.program.steps import Line
from shardwright.runtime.assistant.fewer import Plans, on_fewer
from shardwright.runtime.assistant.prices import uncut_part
from shardwright.runtime.execution import Execution
from shardwright.runtime.module import ParallelModule

KEPT = 3
"""Programs that are kept for the case that their shares come back."""


@dataclass(frozen=True)
class Shares:
    """The mesh axis whose shares can move, and what they are now: rows of the batch, or (``weights``) as many parts as the
    loops that cut parameters have in common (heads, say). ``unit`` rows move together, because further axes cut what each
    rank of this one has."""

    axis: int
    name: str
    rows: tuple[int, ...]
    unit: int = 1
    weights: bool = False

    @property
    def what(self) -> str:
        return "parts" if self.weights else "rows"

    def of(self, rows: Sequence[int]) -> tuple[float, ...]:
        return tuple(count / sum(rows) for count in rows)


def movable(program: Program) -> Shares:
    """What can be moved in a program: rows of the batch if any can, otherwise cut loops with their parameters.

    Raises
    ------
    RunError
        When nothing can, with the reason.
    """
    axes, reasons = range(len(program.strategy.axes)), list[str]()
    for found in (_rows, _parts):
        for axis in axes:
            answer = found(program, axis)
            if isinstance(answer, Shares):
                return answer
            reasons.append(answer)
    raise RunError(
        f"No shares of this plan can be moved while it runs: {'; '.join(dict.fromkeys(reasons))}.",
        "Assist a plan that cuts the batch, or loops of parameters into parts that divide (heads, say), along an axis.",
    )


def _rows(program: Program, axis: int) -> Shares | str:
    """Rows of the batch, where parameters are used whole along the axis; or why not."""
    name, _ = program.strategy.axes[axis]
    cuts = _cuts(program, axis)
    extents, unit = {extent for extent, _ in cuts}, max((inner for _, inner in cuts), default=1)
    used = next((p.paths[0] for p in program.graph.parameters if _used_cut(program, p.tensor, axis)), None)
    if (reason := _fixed(program, axis)) is not None:
        return reason
    if used is not None:
        return f"{used} is used cut along axis {name!r}"
    if len(extents) != 1:
        return f"axis {name!r} cuts no rows of the inputs"
    rows = _dealt(program, axis, min(extents))
    if any(count % unit for count in rows) or not all(rows):
        return f"axis {name!r} cuts {min(extents)} rows into {rows}, and each needs {unit} or a multiple"
    return Shares(axis, name, rows, unit)


def _parts(program: Program, axis: int) -> Shares | str:
    """Parts of every loop that an axis cuts: as many as those have in common that must be cut between whole units."""
    name, size = program.strategy.axes[axis]
    if (reason := _fixed(program, axis)) is not None:
        return reason
    loops = [
        node.rules.by_name[loop]
        for node in program.flow.nodes
        if isinstance(node, Compute) and (loop := node.split[axis]) is not None and node.rules.by_name[loop].divides
    ]
    whole = [rule.extent for rule in loops if rule.even]
    count = math.gcd(*whole) if whole else min((rule.extent for rule in loops), default=0)
    if count <= size or not divides_exactly(count, program.strategy.cuts[axis]):
        return f"the loops that axis {name!r} cuts have {count} parts in common, for {size} ranks"
    return Shares(axis, name, _dealt(program, axis, count), weights=True)


def _dealt(program: Program, axis: int, count: int) -> tuple[int, ...]:
    """So many points as the axis cuts them now."""
    size = program.strategy.sizes[axis]
    parts = (chunk(count, program.strategy.cuts[axis], index) for index in range(size))
    return tuple(stop - start for start, stop in parts)


def _fixed(program: Program, axis: int) -> str | None:
    """Why nothing along an axis can move, if so."""
    (name, size), resting = program.strategy.axes[axis], program.strategy.resting
    if size == 1:
        return f"axis {name!r} has one rank"
    buffers = (buffer.tensor for buffer in program.graph.buffers)
    rests = next((t for t in buffers if isinstance(resting[t][axis], Shard)), None)
    return None if rests is None else f"{rests} rests cut along axis {name!r}"


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
    """Moves shares of one module along an axis of its mesh."""

    def __init__(self, module: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> None:
        if module._planned.rank.inputs != "whole":
            raise RunError(
                "Every rank is given its own part of the batch (inputs='local'), so no rows can be moved between ranks.",
                "Give every rank the whole batch (parallelize(..., inputs='whole')).",
            )
        self._module, self._optimizer = module, optimizer
        place = module.program.flow.place
        lines = [place.line(axis) for axis in range(len(place.axes))]
        self.lines = [line._replace(group=module.groups[line.group]) for line in lines]
        module._planned.record_nothing()  # waits inside of a replayed CUDA graph are not seen by any clock
        self.shares = movable(module.program)
        if self.shares.weights and optimizer is None:
            raise RunError(
                f"Along axis {self.shares.name!r} parameters move, and nobody said which optimizer has state of them.",
                "Call shardwright.assist(model, optimizer).",
            )
        self.traces = True
        """Whether operators are traced at once for the new rows, and not only after some passes."""
        self._known: dict[tuple[int, ...], Execution] = {self.shares.rows: module._planned}

    @property
    def device(self) -> torch.device:
        return self._module.device

    @property
    def held_back(self) -> bool:
        """By no_sync(): the sums belong to the shares as they are."""
        return bool(self._module._gradients.holding)

    @property
    def ranks(self) -> list[list[int]]:
        """Whose every share is."""
        table, axis = self._module.mesh.mesh, self.shares.axis
        return [table.select(axis, index).flatten().tolist() for index in range(len(self.shares.rows))]

    @property
    def droppable(self) -> bool:
        """Whether ranks can be left out: whatever they hold moves, and results are whole on every rank."""
        return self._optimizer is not None and self._module._options.outputs == "whole"

    @cached_property
    def fixed(self) -> float:
        """By prices, what this rank does whatever its share."""
        mesh = self._plan.meshes[0]
        return uncut_part(self._module.program, mesh, self.shares.axis, self.shares.rows) / self.shares.unit

    @property
    def _plan(self) -> Plan:
        """The plan as it runs now."""
        module = self._module
        return replace(module.plan, stages=(replace(module.plan.stages[0], strategy=module.program.strategy),))

    def plans(self) -> Plans:
        """The plan with other shares; where one has nothing, without its ranks."""
        plan, shares = self._plan, self.shares

        def plan_for(rows: tuple[int, ...]) -> Plan:
            return replace(plan, stages=(on_fewer(plan.stages[0], shares, rows),))

        return plan_for

    @property
    def places(self) -> list[list[int]]:
        """For every share, whose it is: positions in what is gathered along the lines, one after the other."""
        sizes, axis = self._module.program.strategy.sizes, self.shares.axis
        table = torch.arange(math.prod(sizes)).view(*reversed(sizes))  # the last axis to be gathered varies slowest
        return [table.select(len(sizes) - 1 - axis, index).flatten().tolist() for index in range(sizes[axis])]

    def move(self, rows: tuple[int, ...]) -> bool:
        """Deal the work out in these rows from the next call on; false where some rank cannot, and nothing has changed."""
        module, before = self._module, self._module._planned
        execution = self._known.get(rows) or self._built(rows)
        if not _all(execution is not None, self.lines, module.device):
            return False
        assert execution is not None
        module._adopt(execution, self._optimizer)
        for flat in before.executor.flats:
            flat.release()
        self._known[rows] = execution
        if len(self._known) > KEPT:
            del self._known[list(self._known)[1]]  # the first is the plan's own, to which the rows return
        self.shares = replace(self.shares, rows=rows)
        return True

    def _built(self, rows: tuple[int, ...]) -> Execution | None:
        module, strategy = self._module, self._module.program.strategy
        shares = {**strategy.shares, self.shares.name: self.shares.of(rows)}
        state = random_state(module.device)
        try:
            execution = module._under(replace(strategy, shares=shares))
            execution.record_nothing()
            if self.traces:
                execution.settle()
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
