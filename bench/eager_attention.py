"""Attention as PyTorch runs it by itself on a GPU where its fused kernels refuse the mask: written out, in float32.

A mask whose last dim has not stride 1 is refused by all of them; what is computed then is
``_scaled_dot_product_attention_math`` in PyTorch's ``attention.cpp``. Our graphs copy such a mask first
(:mod:`shardwright.frontend.masks`). Predictions of eager PyTorch, which does not, are made from graphs with these operators
instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Node

from shardwright.frontend.masks import strided_masks

aten = torch.ops.aten


@contextmanager
def as_eager_runs_it() -> Iterator[None]:
    """Capture attention with strided masks as what an eager step computes for it."""
    with mock.patch.object(import_module("shardwright.frontend.capture"), "dense_masks", written_out):
        yield


def written_out(traced: Graph) -> None:
    """Replace attention with a strided bias that is learned by its operators.

    Other strided masks are there because the library is traced: eager calls leave them out.
    """
    for node, mask in strided_masks(traced):
        if not _learned(mask):
            continue
        with traced.inserting_before(node):
            out = _scores_and_values(traced, node, mask)
        node.replace_all_uses_with(out)
        traced.erase_node(node)


def _learned(mask: Node) -> bool:
    """Whether a mask is made from a parameter (exported ones are called so)."""
    waiting, seen = [mask], {mask}
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" and node.name.startswith("p_"):
            return mask.meta["val"].is_floating_point()
        more = set(node.all_input_nodes) - seen
        seen |= more
        waiting += more
    return False


def _scores_and_values(traced: Graph, node: Node, mask: Node) -> Node:
    def call(function: Any, *args: Any) -> Node:
        made = traced.call_function(function, args)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        made.meta = {**node.meta, "val": function(*values)}
        return made

    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), node.args, strict=False)) | node.kwargs
    query, key, value = (given[name] for name in ("query", "key", "value"))
    dtype = query.meta["val"].dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = (call(aten.to.dtype, each, torch.float32) for each in (query, key, value))
    scale = given.get("scale")
    root = math.sqrt(query.meta["val"].shape[-1] ** -0.5 if scale is None else scale)
    turned = call(aten.mul.Tensor, call(aten.transpose.int, key, -2, -1), root)
    scores = call(aten.matmul.default, call(aten.mul.Tensor, query, root), turned)
    weights = call(aten._safe_softmax.default, call(aten.add.Tensor, scores, mask), -1)
    if given.get("dropout_p"):
        weights = call(aten.dropout.default, weights, given["dropout_p"], True)
    out = call(aten.matmul.default, weights, value)
    return call(aten.to.dtype, out, dtype) if dtype != torch.float32 else out
