"""Which kernel an operator runs as, and the work that kernel does on local shapes: flops, bytes and shape features.

An operator is priced as one or more kernels: a matrix product's backward is two more products, an elementwise
operator's reads the gradient and what was saved. A kernel's *ideal* seconds are those of the roofline (Williams,
Waterman, Patterson 2009): the larger of flops over peak and bytes over bandwidth; calibration measures how far from
ideal each kind of kernel stays at each size. Features are those calibration measured with: (m, n, k) of the product for
matrix products and convolutions, bytes for memory-bound kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.graph.core import DTYPE_BYTES, Op, Tensor

MATMUL = {"linear": (0, 1), "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "einsum": (0, 1)}
MATMUL |= {"addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2), "mv": (0, 1)}
"""Matrix products: which tensor inputs are multiplied."""

FREE_BACKWARD = frozenset(("add", "sub", "clone", "alias", "detach", "lift_fresh_copy"))
"""Operators whose gradient is the incoming one, or that have none."""


@dataclass(frozen=True)
class Work:
    """One kernel for many splits at once: ``curve`` names its calibration, arrays have one entry per split."""

    curve: str
    dtype: str
    flops: np.ndarray
    bytes: np.ndarray
    features: np.ndarray


@dataclass(frozen=True)
class LocalOp:
    """An operator seen by one rank: local extents of inputs and outputs, [splits, dims] each, and its share of the work."""

    op: Op
    kind: str
    name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    input_shapes: Sequence[np.ndarray]
    output_shapes: Sequence[np.ndarray]
    flops: np.ndarray

    def elements(self, index: int, output: bool = False) -> np.ndarray:
        return (self.output_shapes if output else self.input_shapes)[index].prod(axis=1)

    @property
    def bytes(self) -> np.ndarray:
        """Bytes of all inputs and outputs."""
        total = np.zeros(len(self.flops))
        for tensor, shape in zip([*self.inputs, *self.outputs], [*self.input_shapes, *self.output_shapes], strict=True):
            total = total + shape.prod(axis=1) * DTYPE_BYTES[tensor.dtype]
        return total

    @property
    def dtype(self) -> str:
        """The dtype the arithmetic runs in: that of the first floating-point tensor."""
        floating = [t.dtype for t in [*self.inputs, *self.outputs] if "float" in t.dtype]
        return floating[0] if floating else "int64"


def base_name(target: str) -> str:
    """``aten.add.Tensor`` → ``add``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _memory(local: LocalOp, name: str, scale: float | np.ndarray = 1.0) -> Work:
    amount = local.bytes * scale
    return Work(name, local.dtype, np.zeros_like(amount), amount, amount[:, None])


def _product(dtype: str, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray, curve: str) -> Work:
    size = DTYPE_BYTES[dtype]
    moved = (m * k + k * n + m * n) * batch * size
    return Work(curve, dtype, 2 * m * n * k * batch, moved, np.stack([m, n, k, batch], axis=1))


def _matmul(local: LocalOp) -> tuple[list[Work], list[Work]]:
    left, right = MATMUL[local.name]
    a, b, c = local.elements(left), local.elements(right), local.elements(0, output=True)
    batch = np.ones_like(c)
    ranks = [local.input_shapes[i].shape[1] for i in (left, right)]
    if min(ranks) >= 3:
        batch = local.output_shapes[0][:, :-2].prod(axis=1)
        a, b, c = a / batch, b / batch, c / batch
    m, n, k = np.sqrt(a * c / b), np.sqrt(b * c / a), np.sqrt(a * b / c)
    kind = "bmm" if min(ranks) >= 3 else "matmul"
    forward = [_product(local.dtype, m, n, k, batch, f"{kind}/forward")]
    backward = []
    if local.inputs[left].grad:
        backward.append(_product(local.dtype, m, k, n, batch, f"{kind}/input"))
    if local.inputs[right].grad:
        backward.append(_product(local.dtype, k, n, m, batch, f"{kind}/weight"))
    others = [i for i in range(len(local.inputs)) if i not in (left, right)]
    if any(local.inputs[i].grad for i in others):  # the bias' gradient sums the output's
        amount = local.elements(0, output=True) * DTYPE_BYTES[local.dtype]
        backward.append(Work("sum/forward", local.dtype, np.zeros_like(amount), amount, amount[:, None]))
    return forward, backward


def _convolution(local: LocalOp) -> tuple[list[Work], list[Work]]:
    x, weight, out = local.input_shapes[0], local.input_shapes[1], local.output_shapes[0]
    transposed = "transpose" in local.name
    here = out if not transposed else x
    m = here[:, 0] * here[:, 2:].prod(axis=1)
    n = weight[:, 0]
    k = weight[:, 1:].prod(axis=1)
    groups = np.maximum(local.flops / np.maximum(2 * m * n * k, 1), 1e-9)
    depthwise = bool((weight[:, 1] == 1).all() and (n > 1).all() and local.inputs[0].shape[1] > 1)
    moved = local.bytes
    if depthwise:
        curve = "depthwise"
        features = moved[:, None]
    else:
        curve = "convolution"
        features = np.stack([m, n, k, weight[:, 2:].prod(axis=1)], axis=1)
    flops = 2 * m * n * k * np.minimum(groups, 1.0)
    work = lambda which: Work(f"{curve}/{which}", local.dtype, flops, moved, features)
    backward = [work(which) for which, i in (("input", 0), ("weight", 1)) if local.inputs[i].grad]
    if len(local.inputs) > 2 and local.inputs[2].grad:
        amount = out.prod(axis=1) * DTYPE_BYTES[local.dtype]
        backward.append(Work("sum/forward", local.dtype, np.zeros_like(amount), amount, amount[:, None]))
    return [work("forward")], backward


def _attention(local: LocalOp) -> tuple[list[Work], list[Work]]:
    q, key = local.input_shapes[0], local.input_shapes[1]
    heads = q[:, :-2].prod(axis=1)
    rows, columns, width = q[:, -2], key[:, -2], q[:, -1]
    masked = len(local.inputs) > 3
    flags = [a for a in (*local.op.args[3:], *(v for _, v in local.op.kwargs)) if a is True]
    causal = bool(flags) and not masked
    curve = "attention_masked" if masked else "attention_causal" if causal else "attention"
    flops = 4 * heads * rows * columns * width * (0.5 if causal else 1.0)
    features = np.stack([heads, rows, columns, width], axis=1)
    forward = [Work(f"{curve}/forward", local.dtype, flops, local.bytes, features)]
    if not any(t.grad for t in local.inputs[:3]):
        return forward, []
    return forward, [Work(f"{curve}/backward", local.dtype, 2.5 * flops, 2 * local.bytes, features)]


def _recurrent(local: LocalOp) -> tuple[list[Work], list[Work]]:
    x, out = local.input_shapes[0], local.output_shapes[0]
    steps, batch = np.maximum(x[:, 0], x[:, 1]), np.minimum(x[:, 0], x[:, 1])
    features = np.stack([steps, batch, out[:, -1]], axis=1)
    forward = [Work("lstm/forward", local.dtype, local.flops, local.bytes, features)]
    if not any(t.grad for t in local.inputs):
        return forward, []
    return forward, [Work("lstm/backward", local.dtype, 2 * local.flops, 2 * local.bytes, features)]


def kernels(local: LocalOp, copies: bool = False) -> tuple[list[Work], list[Work]]:
    """The kernels of an operator's forward and backward pass. ``copies``: a view here must copy (strides do not fit)."""
    if local.kind == "view" and not copies:
        return [], []
    if local.name in MATMUL and len(local.inputs) > max(MATMUL[local.name]):
        return _matmul(local)
    if local.kind == "convolution":
        return _convolution(local)
    if local.kind == "attention":
        return _attention(local)
    if local.kind == "recurrent":
        return _recurrent(local)
    name = "copy" if local.kind == "view" else local.name
    forward = [_memory(local, f"{name}/forward")]
    grads = sum(t.grad for t in local.inputs)
    if not grads or local.name in FREE_BACKWARD:
        return forward, []
    return forward, [_memory(local, f"{name}/backward", grads if local.kind == "elementwise" else 1.0)]
