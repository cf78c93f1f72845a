"""Views, and the way back: given the new value of a view, the new value of what it was a view of."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


_SAME_ELEMENTS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view_as.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.to.dtype,  # casts that change nothing; others copy
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
}
_COPYING_SOMETIMES = {aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default}
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_OTHERS = {aten.permute.default, aten.narrow.default, aten.detach.default}
_PIECES = {"split", "split_with_sizes", "chunk", "tensor_split", "unbind"}
_TRANSPOSITIONS = {aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.mT.default}


def aliased_inputs(node: Node) -> list[Node]:
    """The inputs whose memory the result of ``node`` may share."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:  # a piece of a view such as split
        (source, *_) = node.args
        return [source] if isinstance(source, Node) and aliased_inputs(source) else []
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or _copies(node):
        return []
    shared = [a.alias_info.before_set for a in schema.arguments if a.alias_info is not None]
    if not shared or not any(r.alias_info is not None or isinstance(r.type, torch.ListType) for r in schema.returns):
        return []
    return [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and isinstance(value, Node)
    ]


def _copies(node: Node) -> bool:
    """Whether a view that may copy had to, judging by the strides seen during the trace."""
    cast = getattr(node.target, "overloadpacket", None) in (aten.to, aten.type_as)
    if node.target not in _COPYING_SOMETIMES and not cast:
        return False
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr] # a tensor argument
    if node.target is aten.contiguous.default:
        return not source.is_contiguous()
    if cast:
        return source.dtype != result.dtype or source.device != result.device
    try:
        source.view(result.shape)
    except (RuntimeError, ValueError):  # fake tensors raise the latter
        return True
    return False


def reversible(view: Node) -> bool:
    """Whether :func:`put_back` knows the way back through ``view``."""
    if view.target is operator.getitem:
        return name_of(view.args[0]) in _PIECES
    return view.target in _SAME_ELEMENTS | _TRANSPOSITIONS | _SCATTERS.keys() or view.target in _OTHERS


def put_back(graph: Graph, view: Node, base: Node, fresh: Node) -> Node:
    """The value of ``base`` after ``fresh`` was written into its ``view``."""
    target: Any = view.target
    args: tuple[Any, ...] = view.args
    if target in _SAME_ELEMENTS:
        return _call(graph, view, base, aten.reshape.default, (fresh, list(base.meta["val"].shape)))
    if target in _TRANSPOSITIONS:
        dims = args[1:] if len(args) > 1 else (-2, -1)
        return _call(graph, view, base, aten.transpose.int, (fresh, *dims))
    if target is aten.permute.default:
        rank = len(args[1])
        order = [dim % rank for dim in args[1]]
        return _call(graph, view, base, aten.permute.default, (fresh, [order.index(dim) for dim in range(rank)]))
    if target is aten.detach.default:
        return _call(graph, view, base, aten.detach.default, (fresh,))
    if target in _SCATTERS:
        return _call(graph, view, base, _SCATTERS[target], (base, fresh, *args[1:]))
    if target is aten.narrow.default:
        _, dim, start, length = args
        return _call(graph, view, base, aten.slice_scatter.default, (base, fresh, dim, start, start + length))
    return _put_back_piece(graph, view, base, fresh)


def _put_back_piece(graph: Graph, piece: Node, base: Node, fresh: Node) -> Node:
    """Through ``split``, ``chunk`` or ``unbind``, whose results are lists; ``base`` is what was cut."""
    whole: Any = piece.args[0]
    index: Any = piece.args[1]
    if name_of(whole) == "unbind":
        dim = whole.args[1] if len(whole.args) > 1 else whole.kwargs.get("dim", 0)
        return _call(graph, piece, base, aten.select_scatter.default, (base, fresh, dim, index))
    dim = whole.args[2] if len(whole.args) > 2 else whole.kwargs.get("dim", 0)
    sizes = [item.shape[dim] for item in whole.meta["val"]]
    start = sum(sizes[:index])
    return _call(graph, piece, base, aten.slice_scatter.default, (base, fresh, dim, start, start + sizes[index]))


def performed(graph: Graph, origin: Node, function: Any, *args: Any, **kwargs: Any) -> Node:
    """A call in place of a part of ``origin``, whose value is what the function gives."""
    made = graph.call_function(function, args, kwargs)
    fakes = torch.fx.map_arg(args, lambda argument: argument.meta["val"])
    with getattr(origin.meta["val"], "fake_mode", torch.no_grad()):
        made.meta = {**origin.meta, "val": function(*fakes, **kwargs)}
    return made


def name_of(node: Any) -> str:
    """``aten.split.Tensor`` → ``split``."""
    return getattr(node.target, "__name__", "").split(".")[0]


def _call(graph: Graph, view: Node, base: Node, function: Any, args: tuple[Any, ...]) -> Node:
    node = graph.call_function(function, args)
    node.meta = {**view.meta, "val": base.meta["val"]}
    return node
