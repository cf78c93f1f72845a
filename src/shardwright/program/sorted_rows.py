"""Rows sorted over the whole batch and brought back: exact in every micro-batch, though a sort is not.

Mixtures of experts sort the rows of a batch by expert, multiply each group of rows by its expert's weights, and bring the
rows back into their order (grouped products; Hugging Face's experts). Sorting mixes the rows of micro-batches. But what
happens to a sorted row depends on that row and on its key alone, so a micro-batch that sorts its own rows computes the same
for each of them, and bringing them back undoes both sorts. This module follows what the tensors in between are: every state
names the sort that they hang on, and only a state whose values are the same row by row becomes a part of the batch again.

A reshape that lays the rows of a batch inside another dim (``(sequence, batch, features)`` to ``(sequence * batch,
features)``, as ``torch.nn.MultiheadAttention`` does) is such an order too, until another one undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Replicate, Shard

from shardwright.graph import Graph, Op, Ref
from shardwright.graph.orders import CASTS, COUNTS, ENDS, GROUPED, INVERSE, KEYS, PLACES, POSITIONS, ROWS, SORTS
from shardwright.operators import analyse
from shardwright.operators.registry import bind
from shardwright.operators.rules import OWN, LoopRule, Placement

BLANKS = ("aten.empty_like.default", "aten.zeros_like.default")
RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")


@dataclass(frozen=True)
class Sorted:
    """A tensor that hangs on a sort over the batch.

    ``what`` it holds: the sorted ``keys``; ``rows`` in their order; the ``places`` in the batch that sorted rows come from
    (divided by ``each``, where several rows belong to one of the batch); the ``inverse``, where each row went; how many rows
    every key has (``counts``), and where its rows end (``ends``). ``dim`` is the one that the rows lie along, if any;
    ``merged`` the extents of dims that a reshape made one, the batch last.
    """

    sort: str
    what: str
    dim: int | None = 0
    each: int = 1
    merged: tuple[int, ...] = ()


State = Placement | Sorted


def sorted_states(
    op: Op, states: Mapping[str, State], graph: Graph, batch: int, plain: Callable[[Op, LoopRule], bool]
) -> Sequence[State] | None:
    """What an operator makes of tensors that hang on a sort, in the order of its outputs; ``None``: not to be said.

    ``plain``: whether a piece of a loop is the operator itself, wherever it lies.
    """
    given = [states[name] for name in op.inputs]
    metas = [graph.tensors[name] for name in op.inputs]
    values, first = bind(op).values, given[0] if given else None
    if op.target in SORTS and not values.get("descending"):
        if first == Shard(0) and len(metas[0].shape) == 1:
            pair = (Sorted(op.name, KEYS), Sorted(op.name, PLACES))
            return pair if len(op.outputs) == 2 else pair[1:]
        if isinstance(first, Sorted) and first.what == PLACES and first.each == 1:
            pair = (Sorted(first.sort, POSITIONS), Sorted(first.sort, INVERSE))
            return pair if len(op.outputs) == 2 else pair[1:]
        return None
    if op.target in RESHAPES:
        shapes = metas[0].shape, graph.tensors[str(op.outputs[0])].shape
        return _reshaped(op, given[0], *shapes)
    if own_rows(op, graph) and first == Shard(0) and set(given[2:]) <= {Shard(0)}:
        return (Shard(0),)
    if not any(isinstance(state, Sorted) for state in given):
        return None
    if op.target == "aten.index.Tensor":
        return _indexed(op, given, graph, batch)
    if op.target == "aten.index_put.default" and len(given) == 3:
        return _inverted(op, given, graph)
    assert first is not None
    if isinstance(first, Sorted):
        if op.target in BLANKS and first.dim == 0:
            return (Sorted(first.sort, ROWS),)
        if op.target in CASTS and first.what in (KEYS, ROWS):
            return (first,)
        if op.target == "aten.floor_divide.default" and first.what == PLACES and isinstance(values.get("other"), int):
            return (Sorted(first.sort, PLACES, 0, first.each * int(str(values["other"]))),)
        if op.target == "aten.histc.default" and first.what == KEYS and _one_bin_each(values):
            return (Sorted(first.sort, COUNTS, None),)
        if op.target == "aten.cumsum.default" and first.what == COUNTS:
            return (Sorted(first.sort, ENDS, None),)
        if op.target in GROUPED:
            return _multiplied(first, given)
    return _row_by_row(op, given, graph, plain)


def _reshaped(op: Op, state: State, before: tuple[int, ...], after: tuple[int, ...]) -> Sequence[State] | None:
    """Dims up to that of the batch made one, or taken apart again."""
    if isinstance(state, Shard):
        merged = before[: state.dim + 1]
        inside = after[:1] == (math.prod(merged),) and len(after) <= len(before)
        return (Sorted(op.name, ROWS, merged=merged),) if inside else None
    if isinstance(state, Sorted) and state.merged and state.what == ROWS and state.dim == 0:
        dims = len(state.merged)
        if after[:dims] == state.merged and math.prod(after[dims:]) == math.prod(before[1:]):
            return (Shard(dims - 1),)
        if after[0] == before[0]:  # what a row holds is laid out otherwise
            return (state,)
    return None


def _indexed(op: Op, given: Sequence[State], graph: Graph, batch: int) -> Sequence[State] | None:
    source, index = given[:2]
    if len(given) != 2 or not isinstance(index, Sorted) or index.dim != 0 or op.args[1] != (Ref(op.inputs[1]),):
        return None
    rows, taken = (graph.tensors[name].shape[0] for name in op.inputs)
    if index.what == PLACES and source == Shard(0) and rows * index.each == taken and rows % batch == 0:
        return (Sorted(index.sort, ROWS),)
    if index.what == KEYS and source == Replicate():
        return (Sorted(index.sort, ROWS),)
    if index.what == INVERSE and isinstance(source, Sorted) and (source.what, source.sort) == (ROWS, index.sort):
        return (Shard(0),) if source.dim == 0 else None
    return None


def _inverted(op: Op, given: Sequence[State], graph: Graph) -> Sequence[State] | None:
    """Positions put where their rows came from: every place is written once."""
    blank, index, positions = given
    counted = _counts_rows(op.inputs[2], op.inputs[0], graph)
    same = isinstance(blank, Sorted) and isinstance(index, Sorted) and blank.sort == index.sort and blank.dim == 0
    if not (counted and same and positions == Replicate()) or len(op.args) > 3:
        return None
    assert isinstance(index, Sorted)
    return (Sorted(index.sort, INVERSE),) if index.what == PLACES and index.each == 1 else None


def _counts_rows(name: str, of: str, graph: Graph) -> bool:
    """Whether a tensor holds the positions of all rows of another."""
    maker = graph.producer.get(name)
    return maker is not None and maker.target == "aten.arange.default" and maker.args == graph.tensors[of].shape[:1]


def own_rows(op: Op, graph: Graph) -> bool:
    """Whether an operator takes something out of every row: ``x[arange(rows), places]``."""
    several = op.target == "aten.index.Tensor" and len(op.inputs) > 2 and op.args[1] == tuple(map(Ref, op.inputs[1:]))
    flat = all(len(graph.tensors[name].shape) == 1 for name in op.inputs[1:])
    return several and flat and _counts_rows(op.inputs[1], op.inputs[0], graph)


def _one_bin_each(values: Mapping[str, object]) -> bool:
    """Whether a histogram counts every key from zero on by itself."""
    bins = values.get("bins", 100)
    return isinstance(bins, int) and (values.get("min", 0), values.get("max", 0)) == (0, bins - 1)


def _multiplied(rows: Sorted, given: Sequence[State]) -> Sequence[State] | None:
    """A product of every row with the weights of its key."""
    weights, ends = given[1:3]
    grouped = isinstance(ends, Sorted) and (ends.what, ends.sort) == (ENDS, rows.sort)
    if len(given) == 3 and grouped and weights == Replicate() and (rows.what, rows.dim) == (ROWS, 0):
        return (rows,)
    return None


def _row_by_row(
    op: Op, given: Sequence[State], graph: Graph, plain: Callable[[Op, LoopRule], bool]
) -> Sequence[State] | None:
    """An operator with a loop over the rows, one row after the other."""
    sorts = {replace(state, what=ROWS, dim=0) for state in given if isinstance(state, Sorted)}
    if len(sorts) != 1 or any(isinstance(state, Sorted) and state.what not in (KEYS, ROWS) for state in given):
        return None
    wanted = [Shard(state.dim) if isinstance(state, Sorted) and state.dim is not None else state for state in given]
    for rule in analyse(op, graph.tensors).loops:
        if rule.name == OWN or not rule.divides or rule.exchanges or rule.windowed or list(rule.inputs) != wanted:
            continue
        if not all(isinstance(out, Shard) for out in rule.outputs):
            continue
        names = [*op.inputs, *(out for out in op.outputs if out)]
        lying = [*rule.inputs, *(p for p, out in zip(rule.outputs, op.outputs, strict=True) if out)]
        cut = [(name, p.dim) for name, p in zip(names, lying, strict=True) if isinstance(p, Shard)]
        if all(graph.tensors[name].shape[dim] == rule.extent for name, dim in cut) and plain(op, rule):
            (like,) = sorts
            return tuple(replace(like, what=ROWS, dim=p.dim) for p in rule.outputs if isinstance(p, Shard))
    return None
