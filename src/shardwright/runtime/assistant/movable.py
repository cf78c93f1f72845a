"""What can be moved between the ranks of one mesh, between two steps: rows of the batch, or parts of cut loops.

Where parameters are used whole along an axis that cuts the batch (resting whole, or gathered from equal parts), nothing but
the rows of the next batch has to move: every rank is given the whole batch and takes another part of it. Where an axis cuts
parameters (tensor parallelism), they and their optimizer state move to the new cut (:mod:`~shardwright.runtime.recut`).
Losses and gradients stay exact because every program sums over what it has and divides by counts of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard

from shardwright.errors import RunError
from shardwright.operators.rules import chunk, divides_exactly
from shardwright.program import Program
from shardwright.program.dataflow import Compute


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
