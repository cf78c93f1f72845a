"""Rows of the batch that lie inside another dim for a while: exact in every micro-batch all the same.

A reshape that lays the rows of a batch inside another dim (``(sequence, batch, features)`` to ``(sequence * batch,
features)``, as ``torch.nn.MultiheadAttention`` does) puts them into an order that no micro-batch keeps. But what goes row by
row computes the same for each of them, and another reshape undoes it. This module follows what the tensors in between are:
only a state whose values are the same row by row becomes a part of the batch again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Shard

from shardwright.graph import Graph, Op, Ref
from shardwright.graph.orders import counts_rows, positions
from shardwright.operators import analyse, record
from shardwright.operators.rules import OWN, LoopRule, Placement


@dataclass(frozen=True)
class Inside:
    """A tensor with rows of the batch inside its dim ``dim``: ``merged`` are the extents of the dims that the reshape
    ``by`` made one, the batch last."""

    by: str
    merged: tuple[int, ...]
    dim: int = 0


State = Placement | Inside


def states_inside(
    op: Op, states: Mapping[str, State], graph: Graph, plain: Callable[[Op, LoopRule], bool]
) -> Sequence[State] | None:
    """What an operator makes of tensors with rows inside a dim, in the order of its outputs; ``None``: not to be said.

    ``plain``: whether a piece of a loop is the operator itself, wherever it lies.
    """
    given = [states[name] for name in op.inputs]
    if record(op.target).reshapes:
        return _reshaped(op, given[0], graph.tensors[op.inputs[0]].shape, graph.tensors[str(op.outputs[0])].shape)
    if own_rows(op, graph) and given[0] == Shard(0) and set(given[2:]) <= {Shard(0)}:
        return (Shard(0),)
    return _row_by_row(op, given, graph, plain)


def _reshaped(op: Op, state: State, before: tuple[int, ...], after: tuple[int, ...]) -> Sequence[State] | None:
    """Dims up to that of the batch made one, or taken apart again."""
    if isinstance(state, Shard):
        merged = before[: state.dim + 1]
        inside = after[:1] == (math.prod(merged),) and len(after) <= len(before)
        return (Inside(op.name, merged),) if inside else None
    if isinstance(state, Inside) and state.dim == 0:
        dims = len(state.merged)
        if after[:dims] == state.merged and math.prod(after[dims:]) == math.prod(before[1:]):
            return (Shard(dims - 1),)
        if after[0] == before[0]:  # what a row holds is laid out otherwise
            return (state,)
    return None


def own_rows(op: Op, graph: Graph) -> bool:
    """Whether an operator takes something out of every row: ``x[arange(rows), places]``."""
    several = positions(op) == 1 and op.args[1] == tuple(map(Ref, op.inputs[1:]))
    flat = all(len(graph.tensors[name].shape) == 1 for name in op.inputs[1:])
    return several and flat and counts_rows(graph, op.inputs[1], op.inputs[0])


def _row_by_row(
    op: Op, given: Sequence[State], graph: Graph, plain: Callable[[Op, LoopRule], bool]
) -> Sequence[State] | None:
    """An operator with a loop over the rows, one row after the other."""
    reshapes = {replace(state, dim=0) for state in given if isinstance(state, Inside)}
    if len(reshapes) != 1:
        return None
    wanted = [Shard(state.dim) if isinstance(state, Inside) else state for state in given]
    for rule in analyse(op, graph.tensors).loops:
        if rule.name == OWN or not rule.divides or rule.exchanges or rule.windowed or list(rule.inputs) != wanted:
            continue
        if not all(isinstance(out, Shard) for out in rule.outputs):
            continue
        names = [*op.inputs, *(out for out in op.outputs if out)]
        lying = [*rule.inputs, *(p for p, out in zip(rule.outputs, op.outputs, strict=True) if out)]
        cut = [(name, p.dim) for name, p in zip(names, lying, strict=True) if isinstance(p, Shard)]
        if all(graph.tensors[name].shape[dim] == rule.extent for name, dim in cut) and plain(op, rule):
            (like,) = reshapes
            return tuple(replace(like, dim=p.dim) for p in rule.outputs if isinstance(p, Shard))
    return None
