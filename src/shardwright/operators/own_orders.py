"""Operators on rows that are sorted and brought back: cut so that every piece sorts its own rows.

The loop ``own`` of such an operator (:data:`~shardwright.operators.rules.OWN`) gives each piece a share of the rows of the
batch, in the order that the piece's own sort puts them. A tensor cut so looks as if it were cut along its first dim, but its
pieces are not those of the whole tensor: all operators between the sort and the way back must be cut alike
(:func:`~shardwright.operators.rules.own_axes`), and no change of layout leads out. Counts of rows, and where the rows of a
key end, are whole and every piece has its own.

An operator that goes row by row gets the loop from the one that cuts its first dim, where the operator itself computes every
piece of that, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.tensor import Replicate, Shard

from shardwright.graph import Graph, Op, Tensor
from shardwright.graph.orders import ADDED_UP, GROUPED, HISTOGRAM, INDEX, KEYS, PUT, SORTS, Order, brings_back
from shardwright.operators.pieces import Call, build
from shardwright.operators.rules import OWN, LoopRule, Need, OpRules, Placement, Split, own_axes


def with_own_order(op: Op, tensors: Mapping[str, Tensor], rules: OpRules) -> OpRules:
    """The rules of an operator, and the loop over rows in an order of their own where it handles such rows."""
    given = [tensors[name].order for name in op.inputs]
    made = [None if name is None else tensors[name].order for name in op.outputs]
    order = next((order for order in (*given, *made) if order is not None), None)
    if order is None:
        return rules
    outputs: list[Placement] = [Shard(0) if one is None else _lies(one) for one in made]
    inputs: list[Need] = [Replicate() if one is None else _lies(one) for one in given]
    if op.target in SORTS and all(one is not None for one in made):
        inputs = [Shard(0)]
    elif op.target == INDEX and made[0] is not None:
        inputs[0] = Replicate() if given[1] is not None and given[1].what == KEYS else Shard(0)
    elif op.target == INDEX and not brings_back(given):
        return rules
    elif op.target in (HISTOGRAM, ADDED_UP, PUT, *GROUPED):
        if made[0] is None:
            return rules
    elif op.target != INDEX and not _row_by_row(op, tensors, rules, inputs, outputs, made):
        return rules
    rule = LoopRule(OWN, order.units, tuple(inputs), tuple(outputs), even=True)
    origin = "described" if rules.origin == "replicated" else rules.origin
    return replace(rules, loops=(*rules.loops, rule), origin=origin, reason="")


def cut_otherwise(op: Op, split: Split, graph: Graph, splits: Mapping[str, Split]) -> Op | None:
    """An operator whose rows this one reads, and that leaves them in orders which this one does not expect."""
    for name in op.inputs:
        maker = graph.producer.get(name) if graph.tensors[name].order is not None else None
        if maker is not None and own_axes(splits[maker.name]) != own_axes(split):
            return maker
    return None


def _lies(order: Order) -> Placement:
    return Shard(0) if order.by_row else Replicate()


def _row_by_row(
    op: Op,
    tensors: Mapping[str, Tensor],
    rules: OpRules,
    inputs: list[Need],
    outputs: list[Placement],
    made: list[Order | None],
) -> bool:
    """Whether a loop over the first dim does the same with every row, wherever it lies."""
    names = [name for name in op.outputs if name is not None]
    if any(one is None for one, name in zip(made, op.outputs, strict=True) if name is not None) or not names:
        return False
    if all(isinstance(need, Replicate) for need in inputs):  # of counts: whole, whoever has them
        return all(isinstance(lies, Replicate) for lies in outputs)
    for loop in rules.loops:
        alike = list(loop.inputs) == inputs and list(loop.outputs) == outputs
        if alike and loop.divides and loop.extent > 1 and not loop.exchanges and not loop.windowed:
            half, call = loop.extent // 2, Call(op, tensors, rules, {})
            low, high = (build(replace(call, ranges={loop.name: r})) for r in ((0, half), (half, 2 * half)))
            if low.kernel is None and high.kernel is None and low.op == high.op:
                return True
    return False
