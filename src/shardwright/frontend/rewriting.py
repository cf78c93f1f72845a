"""Nodes of an exported program in forms that can be split and have gradients; what computes nothing goes.

``as_strided`` reads wherever its strides lead in the memory of its argument, which is laid out otherwise in a program than
in the eager model: a tensor that was a transposed view there may have been gathered from several ranks here. Where the
elements of the argument lie is known from the trace, so the same elements are read by their numbers: the argument in the
order of its memory, flat, indexed by the sums of positions times strides. What lies beyond the argument itself is refused.

``spectrum[..., :m] = weighted`` becomes ``slice_scatter`` when in-place operators go, and that has no derivative for complex
numbers in PyTorch (nor has ``select_scatter``), while the assignment has one. Of pairs of real numbers it has.

``torch.export`` records checks of values (``_assert_scalar``), shapes and dtypes (``_assert_tensor_metadata``) and bounds of
scalars (``sym_constrain_range``). They compute nothing; a scalar that some operator does use is refused later.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardwright.errors import CaptureError
from shardwright.frontend.views import performed

aten = torch.ops.aten


def without_strides(graph: Graph) -> None:
    """Replace every ``as_strided``."""
    for node in [n for n in graph.nodes if n.target is aten.as_strided.default]:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_by_number(graph, node))
        graph.erase_node(node)


def _by_number(graph: Graph, node: Node) -> Node:
    source: Any = node.args[0]
    base: Tensor = source.meta["val"]
    sizes, strides = list(node.args[1]), list(node.args[2])  # type: ignore[arg-type] # lists of numbers
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    first: Any = 0 if given is None else given - base.storage_offset()  # type: ignore[operator] # a number
    order = sorted(range(base.dim()), key=lambda dim: (base.stride(dim), base.shape[dim]), reverse=True)
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not base.permute(order).is_contiguous() or first < 0 or last >= base.numel():
        raise CaptureError(
            f"as_strided({sizes}, {strides}) reads memory beside the elements of its argument, of shape "
            f"{tuple(base.shape)} and strides {base.stride()}; parts of a tensor on several devices have no such memory.",
            "Call contiguous() on the argument first, or use unfold(), slices and reshapes.",
        )

    call = partial(performed, graph, node)
    flat = call(aten.reshape.default, call(aten.permute.default, source, order), [-1])
    place: Node | None = None
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        along = call(aten.arange.start, 0, size, dtype=torch.int64, device=base.device)
        along = call(aten.reshape.default, call(aten.mul.Tensor, along, stride), [-1] + [1] * (len(sizes) - 1 - dim))
        place = along if place is None else call(aten.add.Tensor, place, along)
    if place is None:
        place = call(aten.arange.start, 0, 1, dtype=torch.int64, device=base.device)
    if first:
        place = call(aten.add.Tensor, place, first)
    return call(aten.reshape.default, call(aten.index.Tensor, flat, [place]), sizes)


aten = torch.ops.aten
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def scatter_pairs(graph: Graph) -> None:
    """Put pairs of real numbers in place of the complex arguments of such operators."""
    for node in [n for n in graph.nodes if n.target in _SCATTERS and n.meta["val"].is_complex()]:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_of_pairs(graph, node))
        graph.erase_node(node)


def _of_pairs(graph: Graph, node: Node) -> Node:
    call = partial(performed, graph, node)
    whole, part, *rest = node.args
    pairs = [call(aten.view_as_real.default, call(aten.resolve_conj.default, x)) for x in (whole, part)]
    dims = node.meta["val"].dim()
    given = dict(node.kwargs)
    if rest:
        given["dim"] = rest.pop(0)
    dim: Any = given.pop("dim", 0)
    made = call(node.target, *pairs, dim % dims, *rest, **given)
    return call(aten.view_as_complex.default, made)


_ASSERTION = re.compile(r"aten\.(_assert|sym_constrain|_functional_assert|_functional_sym_constrain)")
_SCALAR = re.compile(r"aten\.(item|_local_scalar_dense|sym_\w+)\.|<built-in function|<function sym_|torch\.sym_")


def drop_assertions(graph: Graph) -> None:
    """Erase assertions, then scalars nobody reads any more."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            target = str(node.target)
            if _ASSERTION.match(target) or _SCALAR.match(target):
                graph.erase_node(node)
