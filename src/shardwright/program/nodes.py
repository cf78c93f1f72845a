"""What the nodes of a forward pass read, make, keep and exchange, and to which values their backward sends gradients."""

from __future__ import annotations

from shardwright.graph.core import DTYPE_BYTES
from shardwright.program.dataflow import Compute, Dataflow, LayoutChange, Node

SPLIT = ("matmul", "convolution")
"""Operators whose gradients of inputs and of weights are kernels of their own."""


def read(node: Node) -> tuple[int, ...]:
    """The values a node reads."""
    return (node.source,) if isinstance(node, LayoutChange) else node.inputs


def made(node: Node) -> tuple[int, ...]:
    """The values a node makes."""
    return (node.result,) if isinstance(node, LayoutChange) else tuple(o for o in node.outputs if o is not None)


def saves(node: Node) -> bool:
    """Whether autograd saves tensors for the backward of a node; changes of layout save none."""
    return not isinstance(node, LayoutChange) and bool(node.footprint.saved_inputs or node.footprint.saved_fresh)


def wanted(flow: Dataflow, node: Compute) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values whose gradients the backward of an operator computes, and those of them that are weights where these are
    an instruction of their own."""
    values = tuple(v for v in dict.fromkeys(node.inputs) if flow.values[v].local.grad)
    if node.kernel is not None or node.rules.kind not in SPLIT:
        return values, ()
    weights = tuple(v for v in values if flow.values[v].tensor in flow.graph.parameter_of)
    others = tuple(v for v in values if v not in weights)
    return (others, weights) if others and weights else (values, ())


def kept_outputs(node: Compute) -> tuple[int, ...]:
    """The results of an operator that its own backward reads again."""
    found: dict[int, int] = {}
    for value, result in zip(node.outputs, node.footprint.results, strict=False):
        if value is not None and result is not None and result.owner in node.footprint.saved_fresh:
            found.setdefault(result.owner, value)
    return tuple(found.values())


def followed(node: Node) -> tuple[int, ...]:
    """The values to which the backward of a node sends gradients."""
    if isinstance(node, LayoutChange):
        return (node.source,)
    return node.inputs if node.op.grad else ()


def read_directly(node: Node) -> tuple[int, ...]:
    """The values a node reads whose gradient comes from operators that use them as they are."""
    if isinstance(node, LayoutChange):
        return () if node.reads else (node.source,)
    return node.inputs


def exchanges(flow: Dataflow, node: Compute) -> list[tuple[int, int, int]]:
    """What the pieces of an operator exchange: mesh axis, bytes, and how often in the backward pass."""
    found = []
    for axis, loop in enumerate(node.split):
        for exchange in () if loop is None else node.rules.by_name[loop].exchanges:
            points = exchange.points
            for name in exchange.loops:
                points *= _longest(flow, node, name)
            found.append((axis, points * DTYPE_BYTES[exchange.dtype], exchange.backward))
    return found


def _longest(flow: Dataflow, node: Compute, name: str) -> int:
    extent = node.rules.by_name[name].extent
    for axis in node.lines.get(name, ()):
        extent = flow.place.line(axis).longest(extent)
    return extent
