"""Losses that are means, written as sums divided by a count.

The mean over a batch is not the mean of the means over its micro-batches, where labels are ignored unevenly; the sum is the
sum of their sums. A loss whose count depends on its labels divides by a small computation on the labels alone, which can be
done for the whole batch before the first micro-batch. Operators that stand for parts of one of the model are named after it,
with a ``~`` (:func:`origin`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shardwright.graph import Graph, Op, Ref, Tensor
from shardwright.operators import Call, analyse, record
from shardwright.operators.binding import bind
from shardwright.operators.families.losses import MEAN, SUM, broadcast


def origin(name: str) -> str:
    """The operator of the model that an operator is, or is a part of.

    >>> origin("loss~count"), origin("linear_3")
    ('loss', 'linear_3')
    """
    return name.partition("~")[0]


def is_sum(op: Op) -> bool:
    """Whether an operator is a loss that adds up its terms: over some of the rows it gives their share of it."""
    return record(op.target).loss != "" and bind(op).values.get("reduction", MEAN) == SUM


def losses_as_sums(graph: Graph) -> Graph:
    """The same graph with every mean loss as a sum divided by a count."""
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        mean = record(op.target).loss != "" and bind(op).values.get("reduction", MEAN) == MEAN
        ops += _divided(op, tensors) if mean else [op]
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _divided(op: Op, tensors: dict[str, Tensor]) -> list[Op]:
    """A mean loss in two: its sum, and the sum divided."""
    summed = Call(op, tensors, analyse(op, tensors), {}).rewritten(reduction=SUM).op
    assert summed is not None
    values = bind(op).values
    x, target = (tensors[name] for name in op.inputs[:2])
    if record(op.target).loss == "classes" and x.shape != target.shape:
        counting = _count(op, x, target, values.get("weight"), int(str(values.get("ignore_index", -100))), tensors)
        return as_sum(op, summed, tensors, counting)
    count = math.prod(broadcast(x.shape, target.shape))
    if record(op.target).loss == "classes":  # the mean of probability targets is over the batch only
        count = x.shape[0] if len(x.shape) > 1 else 1
    return as_sum(op, summed, tensors, count)


def as_sum(op: Op, summed: Op, tensors: dict[str, Tensor], count: int | list[Op]) -> list[Op]:
    """``summed`` in place of ``op``, and its result divided by a number or by what the last of these operators counts."""
    (result,) = (name for name in op.outputs if name is not None)
    total = f"{result}~sum"
    tensors[total] = replace(tensors[result], name=total)
    divisor = count if isinstance(count, int) else Ref(str(count[-1].outputs[0]))
    target = "aten.div.Scalar" if isinstance(count, int) else "aten.div.Tensor"
    divide = replace(
        op, name=f"{op.name}~mean", target=target, args=(Ref(total), divisor), kwargs=(), outputs=(result,)
    )
    return [replace(summed, outputs=(total,)), *([] if isinstance(count, int) else count), divide]


def _count(op: Op, x: Tensor, target: Tensor, weight: object, ignore: int, tensors: dict[str, Tensor]) -> list[Op]:
    """How many labels count, or how much they weigh together."""
    found: list[Op] = []

    def step(what: str, aten: str, args: tuple, shape: tuple[int, ...], dtype: str) -> Ref:
        name = f"{op.name}~{what}"
        tensors[name] = Tensor(name, shape, dtype)
        found.append(replace(op, name=name, target=aten, args=args, kwargs=(), outputs=(name,), grad=False))
        return Ref(name)

    labels = Ref(target.name)
    kept = step("labelled", "aten.ne.Scalar", (labels, ignore), target.shape, "bool")
    if isinstance(weight, Ref):
        there = step("label", "aten.mul.Tensor", (labels, kept), target.shape, target.dtype)
        weights = step("weight", "aten.take.default", (weight, there), target.shape, x.dtype)
        kept = step("weighed", "aten.mul.Tensor", (weights, kept), target.shape, x.dtype)
    step("count", "aten.sum.default", (kept,), (), x.dtype if isinstance(weight, Ref) else "int64")
    return found


def mean_as_sum(op: Op, tensors: Mapping[str, Tensor]) -> tuple[Op, int]:
    """A mean over some dims as the sum over them, and how many elements that adds up."""
    x, values = tensors[op.inputs[0]], bind(op).values
    dims = values.get("dim")
    chosen = (dims,) if isinstance(dims, int) else dims if isinstance(dims, tuple) and dims else range(len(x.shape))
    count = math.prod(x.shape[int(str(dim)) % max(len(x.shape), 1)] for dim in chosen) if x.shape else 1
    return replace(op, target=record(op.target).as_sum), count
