"""Scaled dot-product attention: free along batch, heads (grouped ones too) and query positions; keys are needed whole.

Attention for some of the query positions: a causal mask must know which ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.language import Expression, Opaque, TensorArgument
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import Draws, computes, describes, known
from shardwright.operators.samples import bools, reals
from shardwright.operators.work import Kernels, LocalOp, Work, memory_work


def attention_flops(arguments: dict[str, Any], shapes: Any) -> float:
    """Two products: queries with keys, weights with values."""
    q, k, v = list(arguments.values())[:3]
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


@describes("aten.scaled_dot_product_attention.default", kind="attention", flops=attention_flops)
def attention(
    query: TensorArgument,
    key: TensorArgument,
    value: TensorArgument,
    attn_mask: TensorArgument | None,
    dropout_p: float,
    is_causal: bool,
) -> Any:
    def element(n: tuple[Any, ...], i: Any) -> Expression:
        parts = [query.at((*n, i, slice(None)))]
        for x in (key, value):
            # Grouped queries: query head h reads key head h // group.
            group = query.shape[-3] // x.shape[-3] if query.rank > 2 and x.rank > 2 else 1
            heads = (*n[:-1], n[-1] // group) if n else ()
            parts.append(x.at((*heads, slice(None), slice(None))))
        if attn_mask is not None:
            parts.append(attn_mask.at((*n, i, slice(None))))
        return Opaque(*parts)

    if query.rank == 4:
        return lambda b, h, i, e: element((b, h), i)
    return lambda *n, i, e: element(n, i)


@computes("aten.scaled_dot_product_attention.default")
def attention_piece(call: Call) -> Piece | None:
    rank = len(call.output.shape)
    span = call.output_spans().get(rank - 2)
    if span is None or not call.argument("is_causal", False):
        return None
    seen = min(span.stop, call.tensors[call.op.inputs[1]].shape[-2])  # later keys are hidden from all these queries

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        query = arguments["query"]
        rows = torch.arange(span.start, span.stop, device=query.device).unsqueeze(1)
        mask = rows >= torch.arange(seen, device=query.device)
        return torch.ops.aten.scaled_dot_product_attention(
            query,
            arguments["key"].narrow(-2, 0, seen),
            arguments["value"].narrow(-2, 0, seen),
            mask,
            arguments["dropout_p"],
            False,
            scale=arguments["scale"],
            enable_gqa=arguments["enable_gqa"],
        )

    return call.kernel(kernel)


aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def _attention_cuda(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """A flash kernel for halves without a mask, a memory-efficient one otherwise, plain products where neither can.

    Hopper prefers cuDNN's kernel, which keeps the same tensors.
    """
    width = query.shape[-1]
    fits = query.dim() == 4 and width == value.shape[-1] and width % 8 == 0 and width <= 256
    flash = fits and attn_mask is None and query.dtype in _HALVES
    if flash:
        return aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if query.dim() == 4 and not enable_gqa and width % 4 == 0 and query.dtype in (*_HALVES, torch.float32):
        training = any(t.requires_grad for t in (query, key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, training, dropout_p, is_causal, scale=scale
        )[0]
    return aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _bias(mask: Any, query: Any, key: Any) -> Any:
    """A boolean mask becomes a tensor of zeros and minus infinities of the query's dtype; it is expanded, not copied."""
    if mask.dtype is torch.bool:
        mask = torch.empty(mask.shape, dtype=query.dtype, device=mask.device)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _attention_cpu(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    fused = query.dim() == 4 and dropout_p == 0.0 and query.shape[-1] == value.shape[-1]
    if fused and (attn_mask is None or not attn_mask.requires_grad):
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.empty(mask.shape, dtype=query.dtype, device=mask.device)
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    return aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _reserve(device: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, int]:
    """Fused attention adds up the query's gradient (and, where heads are shared, those of key and value per head) in
    float32: an assumption about libraries, not a fact about PyTorch."""
    if device != "cuda":
        return 0, 0
    query, key = inputs[0], inputs[1]
    elements = math.prod(query.shape)
    shared = query.shape[1] != key.shape[1] if len(query.shape) == 4 else False
    per_head = 2 * query.bytes * math.prod(key.shape) // max(elements, 1) * query.shape[1] // key.shape[1]
    return 0, (4 * elements if query.dtype in ("float16", "bfloat16") else 0) + (per_head if shared else 0)


known(
    "aten.scaled_dot_product_attention",
    draws=Draws(lambda op: bool(op.args[4] if len(op.args) > 4 else op.kwarg("dropout_p", 0.0))),
    on_device={"cuda": _attention_cuda, "cpu": _attention_cpu},
    reserve=_reserve,
)


TILE = 64
"""Rows and columns that a GPU's attention takes at a time: 197 positions cost what 256 do."""


def _kernels(local: LocalOp) -> Kernels:
    """Scaled dot-product attention, fused."""
    q, key = local.input_shapes[0], local.input_shapes[1]
    heads, rows, columns, width = q[:, :-2].prod(axis=1), q[:, -2], key[:, -2], q[:, -1]
    masked = len(local.inputs) > 3
    biased = masked and local.inputs[3].grad
    given = local.op.args[5] if len(local.op.args) > 5 else local.op.kwarg("is_causal", False)
    causal = given is True and not masked
    kind = "_biased" if biased else "_masked" if masked else "_causal" if causal else ""
    family = f"attention{kind}"
    each = 4 * heads * width * (0.5 if causal else 1.0)
    flops, tiles = each * rows * columns, each * np.ceil(rows / TILE) * np.ceil(columns / TILE) * TILE**2
    features = np.stack([heads, rows, columns, width], axis=1)
    forward = [Work(f"{family}/forward", local.dtype, flops, local.bytes, features, padded=tiles)]
    if not any(t.grad for t in local.inputs[:4]):
        return forward, []
    backward = [Work(f"{family}/backward", local.dtype, 2.5 * flops, 2 * local.bytes, features, padded=2.5 * tiles)]
    if biased:  # its gradient is written for every score, and summed to where it was broadcast from
        scores = heads * rows * columns * DTYPE_BYTES[local.dtype]
        if local.inputs[3].elements < np.prod(local.inputs[0].shape[:-1]) * local.inputs[1].shape[-2]:
            backward.append(memory_work("sum/forward", local.dtype, scores + local.input_bytes(3)))
    return forward, backward


known("aten.scaled_dot_product_attention", kernels=_kernels)


known(
    "aten.scaled_dot_product_attention.default",
    samples=lambda b, h, i, e: [
        (reals(b, h, i, e), reals(b, h, i, e), reals(b, h, i, e), None, 0.0, True),
        (reals(b, 4 * h, i, e), reals(b, h, i, e), reals(b, h, i, e), None, 0.0, True, {"enable_gqa": True}),
        (reals(b, h, i, e), reals(b, h, i + 1, e), reals(b, h, i + 1, e + 1), reals(b, 1, i, i + 1)),
        (reals(b, h, i, e), reals(b, h, i, e), reals(b, h, i, e), bools(i, i), 0.0, False, {"scale": 0.3}),
        (reals(b, i, e), reals(b, i, e), reals(b, i, e)),
    ],
)


known("aten.scaled_dot_product_attention", python={"scaled_dot_product_attention": "attention"})
