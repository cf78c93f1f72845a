"""Which kernels a device picks where PyTorch has a choice, as far as memory is concerned.

Fused attention never stores the scores, a fused dropout keeps a mask of one byte per element, and a matrix product on CUDA
owns a workspace. These choices depend on the device, so they are made here by hand and not found by asking meta tensors;
the functions below call, on meta tensors, the operator the device would call. PyTorch's choice is described in
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``aten/src/ATen/cuda/CublasHandlePool.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.cluster import Device
from shardwright.program.recurrent_kernels import lstm_on

KiB, MiB = 1 << 10, 1 << 20
_LARGE_WORKSPACES = ("H100", "H200", "H800", "H20", "B100", "B200", "B300")
aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def kernel_for(target: str, device: str) -> Callable[..., Any] | None:
    """The function to call in place of the operator on this kind of device, or ``None`` for the operator itself."""
    return _KERNELS.get(device, {}).get(target)


def workspace(device: Device, training: bool = True) -> int:
    """Bytes the matrix-product library holds for good once a step has run.

    Every thread that multiplies owns a handle with its workspace, and the backward pass runs in a thread of its own.
    """
    if device.kind != "cuda":
        return 0
    one = 32 * MiB if any(name in device.name for name in _LARGE_WORKSPACES) else 8 * MiB + 128 * KiB
    return 2 * one if training else one


def hidden(target: str, device: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, int]:
    """Bytes a kernel allocates for itself, forward and backward; ``inputs`` and ``outputs`` have ``bytes``.

    Convolutions are computed on copies in the library's own order of dims (on CUDA input, weight and output, in the CPU's
    backward pass output and weight); fused attention adds up the query's gradient (and, where heads are shared, those
    of key and value per head) in float32. These are assumptions about libraries, not facts about PyTorch.
    """
    name = target.split(".")[1]
    if name.startswith("conv") and len(inputs) > 1 and outputs and outputs[0] is not None:
        copies = inputs[1].bytes + outputs[0].bytes
        return (copies + inputs[0].bytes, copies + inputs[0].bytes) if device == "cuda" else (0, copies)
    if name == "scaled_dot_product_attention" and device == "cuda":
        query, key = inputs[0], inputs[1]
        elements = math.prod(query.shape)
        shared = query.shape[1] != key.shape[1] if len(query.shape) == 4 else False
        per_head = 2 * query.bytes * math.prod(key.shape) // max(elements, 1) * query.shape[1] // key.shape[1]
        return 0, (4 * elements if query.dtype in ("float16", "bfloat16") else 0) + (per_head if shared else 0)
    return 0, 0


def fused_piece(target: str, device: str) -> bool:
    """Whether a piece that is written out on tensors without data is a few kernels on the device, which need no temporaries
    (a cut batch norm on CUDA: ``operators/kernels/statistics.py``)."""
    return device == "cuda" and target == "aten._native_batch_norm_legit_functional.default"


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


def _dropout_cuda(x: Any, p: float, train: bool) -> Any:
    return aten.native_dropout.default(x, p, True)[0] if train and 0 < p < 1 else aten.dropout.default(x, p, train)


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's one kernel keeps its input and a statistic per row; written out, a norm would keep float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Any, dims: int, weight: Any) -> Any:
        rows = x.new_empty((*x.shape[: x.dim() - dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, rows, *(() if weight is None else (weight,)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), None, *([torch.empty_like(weight[0])] if weight else [None])


def _rms_norm_cuda(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _FusedRmsNorm.apply(x, len(normalized_shape), weight)


_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "cuda": {
        "aten.scaled_dot_product_attention.default": _attention_cuda,
        "aten.dropout.default": _dropout_cuda,
        "aten.rms_norm.default": _rms_norm_cuda,
        "aten.lstm.input": lstm_on("cuda"),
    },
    "cpu": {
        "aten.scaled_dot_product_attention.default": _attention_cpu,
        "aten.lstm.input": lstm_on("cpu"),
    },
}
