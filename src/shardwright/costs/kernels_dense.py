"""Kernels bound by arithmetic: matrix products, contractions, convolutions, attention, recurrences.

Sizes of a product come from the local element counts of its operands: for C[m,n] = A[m,k] B[k,n], |A||C|/|B| = m², and
likewise for n and k. A contraction (``einsum``) is taken apart into batched products the way PyTorch does it, including
the copies that bring operands into order.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from shardwright.cluster.cases_convolution import ALIGNED
from shardwright.costs.kernels_memory import LocalOp, Work, memory_work
from shardwright.graph.core import DTYPE_BYTES

MATMUL = {"linear": (0, 1), "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "mv": (0, 1), "dot": (0, 1)}
MATMUL |= {"addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2)}
"""Matrix products: which tensor inputs are multiplied."""
TILE = 64
"""Rows and columns that a GPU's attention takes at a time: 197 positions cost what 256 do."""
Kernels = tuple[list[Work], list[Work]]


def product(
    dtype: str,
    m: np.ndarray,
    n: np.ndarray,
    k: np.ndarray,
    batch: np.ndarray,
    curve: str,
    alignment: np.ndarray | None = None,
) -> Work:
    """A (batch of) matrix product(s)."""
    moved = (m * k + k * n + m * n) * batch * DTYPE_BYTES[dtype]
    return Work(curve, dtype, 2 * m * n * k * batch, moved, np.stack([m, n, k, batch], axis=1), alignment)


def _with_backward(
    dtype: str, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray, left: bool, right: bool, single: bool
) -> Kernels:
    """A product and its gradients; ``single``: of two matrices, however it is split. A batch that is cut down to one stays
    a batch: what a split costs must not depend on the other splits that are priced with it."""
    kind = "matmul" if single else "bmm"
    size = DTYPE_BYTES[dtype]
    rows = np.gcd(np.round(n * size).astype(np.int64), np.round(k * size).astype(np.int64))
    alignment = np.gcd(rows, 16)
    backward = []
    if left:
        backward.append(product(dtype, m, k, n, batch, f"{kind}/{'input' if single else 'forward'}", alignment))
    if right:
        backward.append(product(dtype, n, k, m, batch, f"{kind}/{'weight' if single else 'forward'}", alignment))
    return [product(dtype, m, n, k, batch, f"{kind}/forward", alignment)], backward


def matmul(local: LocalOp) -> Kernels:
    """Products of two operands, with or without a batch and a bias."""
    left, right = MATMUL[local.name]
    a, b, c = local.elements(left), local.elements(right), local.elements(0, output=True)
    batch, single = np.ones_like(c), True
    if min(local.input_shapes[i].shape[1] for i in (left, right)) >= 3:
        batch, single = local.output_shapes[0][:, :-2].prod(axis=1), prod(local.outputs[0].shape[:-2]) == 1
        a, b, c = a / batch, b / batch, c / batch
    m, n, k = np.sqrt(a * c / b), np.sqrt(b * c / a), np.sqrt(a * b / c)
    grads = (local.inputs[left].grad, local.inputs[right].grad)
    forward, backward = _with_backward(local.dtype, m, n, k, batch, *grads, single)
    others = [i for i in range(len(local.inputs)) if i not in (left, right)]
    if single and others:  # with a bias libraries choose another kernel
        plain = forward[0]
        forward = [replace(plain, curve="matmul/biased", instead=plain)]
    if any(local.inputs[i].grad for i in others):  # the bias' gradient sums the output's
        backward.append(memory_work("sum/forward", local.dtype, local.output_bytes, n))
    return forward, backward


def _ordered(labels: str, groups: list[str]) -> bool:
    """Whether an operand's labels already stand in these groups, in order, so that it need not be copied."""
    return labels == "".join(groups) or (len(groups) == 3 and labels == groups[0] + groups[2] + groups[1])


def einsum(local: LocalOp) -> Kernels:
    """A contraction, two operands at a time from the left."""
    equation = str(local.op.args[0]).replace(" ", "")
    if "->" not in equation or "." in equation or equation.split("->")[0].count(",") + 1 != len(local.inputs):
        work = memory_work("elementwise/forward", local.dtype, local.bytes)
        return [work], [work, work]
    terms, result = equation.split("->")
    operands = terms.split(",")
    extent: dict[str, np.ndarray] = {}
    whole: dict[str, int] = {}
    for labels, shape, operand in zip(operands, local.input_shapes, local.inputs, strict=True):
        for position, label in enumerate(labels):
            extent[label] = np.maximum(shape[:, position], extent.get(label, shape[:, position]))
            whole[label] = max(operand.shape[position], whole.get(label, 1))
    ones = np.ones(len(local.flops))

    def volume(labels: str) -> np.ndarray:
        return np.prod([extent[x] for x in labels], axis=0) if labels else ones

    size = DTYPE_BYTES[local.dtype]
    forward, backward = [], []
    held, held_grad = operands[0], local.inputs[0].grad
    for index in range(1, len(operands)):
        other, other_grad = operands[index], local.inputs[index].grad
        wanted = set(result).union(*operands[index + 1 :])
        batch = "".join(x for x in held if x in other and x in wanted)
        summed = "".join(x for x in held if x in other and x not in wanted)
        rows = "".join(x for x in held if x not in other)
        columns = "".join(x for x in other if x not in held)
        sizes = (volume(rows), volume(columns), volume(summed), volume(batch))
        single = all(whole[label] == 1 for label in batch)
        there, back = _with_backward(local.dtype, *sizes, held_grad, other_grad, single)
        for labels, groups in ((held, [batch, rows, summed]), (other, [batch, summed, columns])):
            if not _ordered(labels, groups):
                # Turning the innermost dim scatters every element; turning others moves whole rows.
                kind = "copy_rows" if labels[-1:] == "".join(groups)[-1:] else "copy"
                copied = memory_work(f"{kind}/forward", local.dtype, 2 * volume(labels) * size)
                there.append(copied)
                back.append(copied)
        forward += there
        backward += back
        held, held_grad = batch + rows + columns, held_grad or other_grad
    return forward, backward


def convolution(local: LocalOp) -> Kernels:
    """Convolutions as products: rows are output positions, columns output channels, summed over the filter.

    Pointwise and depthwise ones have curves of their own over what decides there, where calibration measured them.
    """
    x, weight, out = local.input_shapes[0], local.input_shapes[1], local.output_shapes[0]
    here = x if "transpose" in local.name else out
    m, n, k = here[:, 0] * here[:, 2:].prod(axis=1), weight[:, 0], weight[:, 1:].prod(axis=1)
    moved, flops = local.bytes, 2 * m * n * k
    inner, outer = local.inputs[1].shape[1], local.inputs[0].shape[1]
    area = weight[:, 2:].prod(axis=1)
    positions = here[:, 2:].prod(axis=1)
    family, sizes, better = "convolution", [m, n, k, area], ""
    if inner == 1 and outer > 1:
        family, sizes, better = "depthwise", [moved, area], "channelwise"
        shape = [x[:, 0] * x[:, 1], positions, area, x[:, 2:].prod(axis=1) / positions]
    elif inner < outer and "transpose" not in local.name:  # computed group by group
        family, sizes = "grouped", [m, n, k, area, np.maximum(x[:, 1] / weight[:, 1], 1.0)]
    elif prod(local.inputs[1].shape[2:]) == 1 and local.inputs[0].shape[2:] == local.outputs[0].shape[2:]:
        better, shape = "pointwise", [m, n, k, np.gcd(np.round(positions).astype(np.int64), ALIGNED)]

    def work(which: str) -> Work:
        plain = Work(f"{family}/{which}", local.dtype, flops, moved, np.stack(sizes, axis=1))
        if not better:
            return plain
        return replace(plain, curve=f"{better}/{which}", features=np.stack(shape, axis=1), instead=plain)

    backward = [work(which) for which, index in (("input", 0), ("weight", 1)) if local.inputs[index].grad]
    if len(local.inputs) > 2 and local.inputs[2].grad:
        backward.append(memory_work("sum/forward", local.dtype, local.output_bytes))
    forward = [work("forward")]
    if len(local.inputs) > 2:  # the bias is added by a kernel of its own
        forward.append(memory_work("add/forward", local.dtype, 2 * local.output_bytes))
    return forward, backward


def attention(local: LocalOp) -> Kernels:
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


def recurrent(local: LocalOp) -> Kernels:
    """LSTM layers: per layer and time step four gates of (input + hidden) × hidden products."""
    x, out = local.input_shapes[0], local.output_shapes[0]
    first = any(a is True for a in local.op.args[-1:])  # batch_first is the last argument
    batch, steps = (x[:, 0], x[:, 1]) if first else (x[:, 1], x[:, 0])
    weights = [i for i, t in enumerate(local.inputs) if len(t.shape) == 2]
    flops = 2 * sum((local.elements(i) for i in weights), np.zeros(len(local.flops))) * steps * batch
    features = np.stack([steps, batch, out[:, -1]], axis=1)
    forward = [Work("lstm/forward", local.dtype, flops, local.bytes, features)]
    if not any(t.grad for t in local.inputs):
        return forward, []
    return forward, [Work("lstm/backward", local.dtype, 2 * flops, 2 * local.bytes, features)]
