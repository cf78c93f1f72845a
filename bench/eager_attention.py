"""Attention as an eager step runs it on a GPU, where that differs from what is captured.

*Masks.* Hugging Face leaves a mask out in an eager call where it hides nothing or is the causal one (PyTorch then gets
``is_causal``), and cannot while it is traced. Here it is asked as in an eager call whose sequences are all full, as those
of the zoo are.

*Kernels.* A mask whose last dim has not stride 1 is refused by all fused kernels, and float32 numbers whose keys have fewer
heads than the queries by those that are left for float32 (``check_batch_size_and_num_heads_dense`` in PyTorch's
``sdp_utils_cpp.h``); what is computed then is ``_scaled_dot_product_attention_math`` of ``attention.cpp``: written out, in
float32. Our graphs copy such a mask first (:mod:`shardwright.frontend.masks`) and repeat such keys. Predictions of eager
PyTorch are made from graphs with these operators instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Node

from shardwright.frontend.masks import strided_masks

aten = torch.ops.aten
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
LIBRARIES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""The functions by which Hugging Face decides whether a mask is needed; their first argument is the mask of padding."""


@contextmanager
def as_eager_runs_it() -> Iterator[None]:
    """Capture attention as what an eager step computes for it."""
    with ExitStack() as changes:
        changes.enter_context(
            mock.patch.object(import_module("shardwright.frontend.capture"), "dense_masks", written_out)
        )
        for library in filter(None, map(sys.modules.get, LIBRARIES)):
            asked = getattr(library, "is_tracing", None)
            if asked is not None:
                changes.enter_context(mock.patch.object(library, "is_tracing", _unless_nothing_is_given(asked)))
            for name in SKIPS:
                if hasattr(library, name):
                    changes.enter_context(mock.patch.object(library, name, _of_full_sequences(getattr(library, name))))
        yield


def _unless_nothing_is_given(asked: Callable[..., bool]) -> Callable[..., bool]:
    return lambda tensor=None: tensor is not None and asked(tensor)


def _of_full_sequences(decide: Callable[..., bool]) -> Callable[..., bool]:
    return lambda padding_mask=None, *sizes, **named: decide(None, *sizes, **named)


def written_out(traced: Graph) -> None:
    """Replace attention that no fused kernel takes by its operators.

    Strided masks that are not learned are there because the library is traced: eager calls leave them out.
    """
    refused = {node for node, mask in strided_masks(traced) if _learned(mask)}
    for node in list(traced.nodes):
        if str(node.target) == "aten.scaled_dot_product_attention.default" and (node in refused or _few_keys(node)):
            with traced.inserting_before(node):
                out = _scores_and_values(traced, node)
            node.replace_all_uses_with(out)
            traced.erase_node(node)


def _given(node: Node) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, node.args, strict=False)) | node.kwargs


def _few_keys(node: Node) -> bool:
    """Whether keys have fewer heads than queries, in a dtype for which no kernel takes that."""
    given = _given(node)
    query, key = (given[name].meta["val"] for name in ("query", "key"))
    return query.dtype == torch.float32 and query.shape[-3] != key.shape[-3]


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


def _scores_and_values(traced: Graph, node: Node) -> Node:
    def call(function: Any, *args: Any, **named: Any) -> Node:
        made = traced.call_function(function, args, named)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        with node.meta["val"].fake_mode:
            made.meta = {**node.meta, "val": function(*values, **named)}
        return made

    given = _given(node)
    query, key, value, mask = (given.get(name) for name in ARGUMENTS[:4])
    dtype, repeats = query.meta["val"].dtype, query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = (call(aten.to.dtype, each, torch.float32) for each in (query, key, value))
    if repeats > 1:
        key, value = (call(aten.repeat_interleave.self_int, each, repeats, -3) for each in (key, value))
    if given.get("is_causal"):
        size, device = [query.meta["val"].shape[-2], key.meta["val"].shape[-2]], query.meta["val"].device
        seen = call(aten.tril.default, call(aten.ones.default, size, dtype=torch.bool, device=device))
        none = call(aten.zeros.default, size, dtype=query.meta["val"].dtype, device=device)
        mask = call(aten.masked_fill.Scalar, none, call(aten.logical_not.default, seen), -math.inf)
    scale = given.get("scale")
    root = math.sqrt(query.meta["val"].shape[-1] ** -0.5 if scale is None else scale)
    turned = call(aten.mul.Tensor, call(aten.transpose.int, key, -2, -1), root)
    scores = call(aten.matmul.default, call(aten.mul.Tensor, query, root), turned)
    if mask is not None:
        scores = call(aten.add.Tensor, scores, mask)
    weights = call(aten._safe_softmax.default, scores, -1)
    if given.get("dropout_p"):
        weights = call(aten.dropout.default, weights, given["dropout_p"], True)
    out = call(aten.matmul.default, weights, value)
    return call(aten.to.dtype, out, dtype) if dtype != torch.float32 else out
