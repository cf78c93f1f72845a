"""Attention masks in the form that fused kernels take: those that hide nothing are left out, others lie densely.

A library that is being traced cannot look whether a mask hides anything, and gives attention one that it would have left out
in an eager call: ``arange(197) >= 0``. With a mask, PyTorch's fast kernels refuse many lengths. Where a mask depends on
nothing that is given to the model, it is computed here once; if every position may be seen, the operator gets none.

On a GPU all fused kernels refuse a mask whose last dim has not stride 1 (``check_last_dim_stride_equals_1_dense`` in
PyTorch's ``sdp_utils_cpp.h``), and float32 products of all scores are computed in their place. Learned biases come so: a
table looked up for (query, key) and turned to (head, query, key). Such a mask is copied first; a fused kernel gives it its
gradient too.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph as Traced
from torch.fx import Node

from shardwright._torch_compat import operator
from shardwright.frontend.replay import values_of
from shardwright.graph import Graph, Op, Ref

_ATTENTION = "aten.scaled_dot_product_attention.default"
_MASK = 3
"""Its place among the arguments."""
_LARGEST = 2**28
"""Elements of a mask that is looked at."""


def dense_masks(traced: Traced) -> None:
    """Put a copy before every attention operator whose mask does not lie densely along the keys."""
    for node, mask in strided_masks(traced):
        with traced.inserting_before(node):
            copy = traced.call_function(torch.ops.aten.contiguous.default, (mask,))
        copy.meta = {**node.meta, "val": mask.meta["val"].contiguous()}
        node.replace_input_with(mask, copy)


def strided_masks(traced: Traced) -> list[tuple[Node, Node]]:
    """Attention operators whose mask has not stride 1 along the keys, and that mask."""
    found = []
    for node in traced.nodes:
        if node.op == "call_function" and str(node.target) == _ATTENTION:
            mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
            if isinstance(mask, Node) and mask.meta["val"].shape[-1] > 1 and mask.meta["val"].stride(-1) != 1:
                found.append((node, mask))
    return found


def without_idle_masks(graph: Graph) -> Graph:
    """The graph, its attention operators without masks that let everything be seen."""
    makers = {out: op for op in graph.ops for out in op.outputs if out is not None}
    constants = {constant.tensor for constant in graph.constants}
    idle: dict[str, bool] = {}

    def masks_nothing(name: str) -> bool:
        if name not in idle:
            idle[name] = _all_seen(graph, name, makers, constants)
        return idle[name]

    ops = []
    for op in graph.ops:
        mask = op.args[_MASK] if len(op.args) > _MASK else op.kwarg("attn_mask")
        if op.target == _ATTENTION and isinstance(mask, Ref) and masks_nothing(mask.name):
            args = tuple(None if place == _MASK else value for place, value in enumerate(op.args))
            op = dataclasses.replace(op, args=args, kwargs=tuple(k for k in op.kwargs if k[0] != "attn_mask"))
        ops.append(op)
    return dataclasses.replace(graph, ops=tuple(ops)) if any(idle.values()) else graph


def _all_seen(graph: Graph, name: str, makers: dict[str, Op], constants: set[str]) -> bool:
    needed, wanted = [], {name}
    for op in reversed(graph.ops):
        if not wanted.isdisjoint(out for out in op.outputs if out is not None):
            needed.append(op)
            wanted.update(op.inputs)
    if any(source not in makers and source not in constants for source in wanted):
        return False  # it depends on what is given
    if any(_is_ours_or_random(op.target) for op in needed):
        return False
    if any(graph.tensors[out].elements > _LARGEST for op in needed for out in op.outputs if out is not None):
        return False
    made = tuple(constant for constant in graph.constants if constant.tensor in wanted)
    steps = tuple(reversed(needed))
    part = dataclasses.replace(graph, ops=steps, constants=made, outputs=(Ref(name),), output_tree="", mutations=())
    with torch.no_grad():
        mask = values_of(part, {}, torch.device("cpu"))[name]
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


def _is_ours_or_random(target: str) -> bool:
    return target.startswith("shardwright.") or torch.Tag.nondeterministic_seeded in operator(target).tags
