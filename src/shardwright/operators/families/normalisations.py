"""Normalisations: statistics over some dims, then an element-wise function. Cutting those dims exchanges the statistics.

Normalisations over cut dims: sums of elements and of squared deviations are exchanged, so statistics are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwright.operators.families.reductions import everywhere, wide
from shardwright.operators.language import Expression, Sum, TensorArgument, call
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import positive, reals
from shardwright.operators.work import STEPS, Kernels, LocalOp, Work, memory_kernels


def _moments(x: TensorArgument, read: Any, extents: Sequence[int]) -> tuple[Expression, Expression]:
    """Mean and mean squared deviation of ``read(*k)`` over ``extents``."""
    mean = Sum(lambda *m: read(*m), extents) * 0.5
    return mean, Sum(lambda *k: call("square", read(*k) - mean), extents) * 0.5


def _affine(normal: Expression, weight: TensorArgument | None, bias: TensorArgument | None, at: Any) -> Expression:
    if weight is not None:
        normal = normal * weight[at]
    return normal if bias is None else normal + bias[at]


@describes("aten.layer_norm.default", "aten.native_layer_norm.default", kind="normalisation")
def layer_norm(
    x: TensorArgument, normalized_shape: Sequence[int], weight: TensorArgument | None, bias: TensorArgument | None
) -> Any:
    lead = x.rank - len(normalized_shape)

    def statistics(i: tuple[Any, ...]) -> tuple[Expression, Expression]:
        return _moments(x, lambda *k: x[(*i[:lead], *k)], normalized_shape)

    def normal(*i: Any) -> Expression:
        mean, variance = statistics(i)
        return _affine((x[i] - mean) * call("rsqrt", variance), weight, bias, i[lead:])

    return normal, lambda *i: call("saved", statistics(i)[0]), lambda *i: call("rsqrt", statistics(i)[1])


@describes("aten.rms_norm.default", "aten._fused_rms_norm.default", kind="normalisation")
def rms_norm(x: TensorArgument, normalized_shape: Sequence[int], weight: TensorArgument | None) -> Any:
    lead = x.rank - len(normalized_shape)

    def scale(i: tuple[Any, ...]) -> Expression:
        return call("rsqrt", Sum(lambda *k: call("square", x[(*i[:lead], *k)]), normalized_shape))

    def normal(*i: Any) -> Expression:
        return _affine(x[i] * scale(i), weight, None, i[lead:])

    return normal, lambda *i: scale(i)


@describes("aten.native_group_norm.default", kind="normalisation")
def native_group_norm(x: TensorArgument, weight: Any, bias: Any, n: int, c: int, area: int, groups: int) -> Any:
    """It is told its sizes a second time; free along the batch."""
    wholes = [w[slice(None),] for w in (weight, bias) if w is not None]

    def sample(i: Any) -> Expression:
        return call("moments", x[(i, *(slice(None),) * (x.rank - 1))])

    return lambda i, *p: call("normal", sample(i), *wholes), lambda i, g: sample(i), lambda i, g: sample(i)


@describes("aten.group_norm.default", kind="normalisation")
def group_norm(x: TensorArgument, groups: int, weight: TensorArgument | None, bias: TensorArgument | None) -> Any:
    size = x.shape[1] // groups

    def normal(*i: Any) -> Expression:
        def read(c: Any, *p: Any) -> Expression:
            return x[(i[0], i[1] // size * size + c, *p)]

        mean, variance = _moments(x, read, (size, *x.shape[2:]))
        return _affine((x[i] - mean) * call("rsqrt", variance), weight, bias, (i[1],))

    return normal


def batch_statistics(x: TensorArgument, channel: Any) -> tuple[Expression, Expression]:
    """Mean and variance of one channel over batch and positions."""
    return _moments(x, lambda n, *k: x[(n, channel, *k)], (x.shape[0], *x.shape[2:]))


def _batch_norm(
    x: TensorArgument, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float
) -> Any:
    def moments(channel: Any) -> tuple[Expression, Expression]:
        return batch_statistics(x, channel) if training or mean is None else (mean[channel], variance[channel])

    def normal(*i: Any) -> Expression:
        m, v = moments(i[1])
        return _affine((x[i] - m) * call("rsqrt", v), weight, bias, (i[1],))

    saved = (
        (lambda i1: call("saved", moments(i1)[0]), lambda i1: call("rsqrt", moments(i1)[1]))
        if training
        else (None, None)
    )
    if mean is None:
        return normal, *saved
    if not training:
        return normal, *saved, lambda i1: mean[i1] * 1, lambda i1: variance[i1] * 1
    return (
        normal,
        *saved,
        lambda i1: call("blend", mean[i1], moments(i1)[0]),
        lambda i1: call("blend", variance[i1], moments(i1)[1]),
    )


@describes("aten._native_batch_norm_legit_functional.default", kind="normalisation")
def batch_norm_functional(
    x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float
) -> Any:
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum)


@describes("aten._native_batch_norm_legit_no_training.default", kind="normalisation")
def batch_norm_inference(x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> Any:
    return _batch_norm(x, weight, bias, running_mean, running_var, False, 0.0)[:1]


@describes("aten._native_batch_norm_legit.no_stats", kind="normalisation")
def batch_norm_no_stats(x: TensorArgument, weight: Any, bias: Any, training: bool, momentum: float) -> Any:
    return _batch_norm(x, weight, bias, None, None, True, momentum)[:3]


@describes("aten.batch_norm.default", kind="normalisation")
def batch_norm(
    x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float
) -> Any:
    """Only without running statistics or in inference is it functional; training with statistics is the functional one."""
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum)[0]


@describes("aten.instance_norm.default", kind="normalisation")
def instance_norm(
    x: TensorArgument, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool
) -> Any:
    if running_mean is not None:
        return None

    def normal(*i: Any) -> Expression:
        mean, variance = _moments(x, lambda *k: x[(i[0], i[1], *k)], x.shape[2:])
        return _affine((x[i] - mean) * call("rsqrt", variance), weight, bias, (i[1],))

    return normal


def moments(x: Any, dims: list[int], count: int, loops: list[str], exchange: Any) -> tuple[Any, Any, Any]:
    """Mean, deviations from it and biased variance over ``dims``, some of which are cut along ``loops``."""
    return moments_of(x, dims, count, partial(_summed, exchange, loops))


def moments_of(x: Any, dims: list[int], count: int, summed: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """The same; ``summed`` adds a statistic up over the pieces."""
    mean = summed(x.sum(dims, keepdim=True)) / count
    deviations = x - mean
    variance = summed(deviations.square().sum(dims, keepdim=True)) / count
    return mean, deviations, variance


@computes("aten.layer_norm.default", "aten.native_layer_norm.default")
def layer_norm_piece(call: Call) -> Piece | None:
    x = call.tensors[call.op.inputs[0]].shape
    shape = call.argument("normalized_shape")
    dims = list(range(len(x) - len(shape), len(x)))
    loops = [span.loop for dim, span in call.input_spans(0).items() if dim in dims]
    if not loops:
        return None
    count, several = math.prod(shape), "native" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x = wide(arguments["input"])
        mean, deviations, variance = moments(x, dims, count, loops, exchange)
        scale = (variance + arguments["eps"]).rsqrt()
        normal = deviations * scale
        if arguments["weight"] is not None:
            normal = normal * arguments["weight"]
        if arguments["bias"] is not None:
            normal = normal + arguments["bias"]
        normal = normal.to(arguments["input"].dtype)
        return (normal, mean, scale) if several else normal

    return call.kernel(kernel)


@computes("aten.rms_norm.default", "aten._fused_rms_norm.default")
def rms_norm_piece(call: Call) -> Piece | None:
    x = call.tensors[call.op.inputs[0]].shape
    shape = call.argument("normalized_shape")
    dims = list(range(len(x) - len(shape), len(x)))
    loops = [span.loop for dim, span in call.input_spans(0).items() if dim in dims]
    if not loops:
        return None
    count, several = math.prod(shape), "fused" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x = wide(arguments["input"])
        eps = arguments["eps"] if arguments["eps"] is not None else torch.finfo(arguments["input"].dtype).eps
        squares = everywhere(exchange, x.square().sum(dims, keepdim=True), "sum", loops)
        scale = (squares / count + eps).rsqrt()
        normal = x * scale
        if arguments["weight"] is not None:
            normal = normal * arguments["weight"]
        normal = normal.to(arguments["input"].dtype)
        return (normal, scale) if several else normal

    return call.kernel(kernel)


@computes("aten.native_group_norm.default")
def native_group_norm_piece(call: Call) -> Piece:
    return call.rewritten(N=call.local_shape()[0])


@computes("aten.group_norm.default")
def group_norm_piece(call: Call) -> Piece | None:
    """Whole groups, or parts of each: of a single group channels are cut as positions are."""
    x = call.tensors[call.op.inputs[0]].shape
    groups = whole = call.argument("num_groups")
    spans = call.input_spans(0)
    loops = [span.loop for dim, span in spans.items() if dim > 1 or (dim == 1 and whole == 1)]
    if 1 in spans and whole > 1:
        groups = groups * spans[1].size // spans[1].extent
    if not loops:
        return call.rewritten(num_groups=groups) if groups != whole else None
    count = math.prod(x[1:]) // whole

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        x = arguments["input"]
        parts = wide(x).reshape(x.shape[0], groups, -1)
        _, deviations, variance = moments(parts, [2], count, loops, exchange)
        normal = (deviations * (variance + arguments["eps"]).rsqrt()).reshape(x.shape)
        return per_channel(normal, 1.0, arguments).to(x.dtype)

    return call.kernel(kernel)


def per_channel(deviations: Any, scale: Any, arguments: dict[str, Any]) -> Any:
    """``deviations * scale * weight + bias``, with as few roundings per element as PyTorch's own kernel.

    Every later layer inherits them: one by one they made gradients of a deep model up to 2.5 times less accurate.
    """
    shape = [1, -1] + [1] * (deviations.dim() - 2)
    if arguments["weight"] is not None:
        scale = scale * arguments["weight"].view(shape)
    if arguments["bias"] is None:
        return deviations * scale
    bias = arguments["bias"].view(shape).to(deviations.dtype)
    return torch.addcmul(bias, deviations, scale) if isinstance(scale, torch.Tensor) else deviations + bias


def _summed(exchange: Any, loops: list[str], x: Any) -> Any:
    return everywhere(exchange, x, "sum", loops)


@computes(
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.batch_norm.default",
)
def batch_norm_piece(call: Call) -> Piece | None:
    """Exact global statistics over a cut batch or cut positions, and the running statistics they lead to."""
    x = call.tensors[call.op.inputs[0]].shape
    dims = [d for d in range(len(x)) if d != 1]
    loops = [span.loop for dim, span in call.input_spans(0).items() if dim in dims]
    running = call.bound.values.get("running_mean") is not None
    if not loops or (not call.argument("training", True) and running):
        return None
    count = math.prod(x[d] for d in dims)
    unbiased = count / max(count - 1, 1)
    outputs = len(call.op.outputs)

    def kernel(exchange: Any, **arguments: Any) -> Any:
        from shardwright.operators.families.statistics import normalised

        # Where all pieces lie in one graph of autograd, as checks run them, nobody exchanges in its backward.
        plain = getattr(exchange, "shared_backward", False)
        summed = partial(_summed, exchange, loops)
        normal, mean, variance = normalised(arguments, dims, count, summed, plain)
        if outputs == 1:
            return normal
        mean, variance = mean.detach().flatten(), variance.detach().flatten()
        results = [normal, mean, (variance + arguments["eps"]).rsqrt()]
        if running:
            for old, new in (("running_mean", mean), ("running_var", variance * unbiased)):
                results.append(arguments[old].lerp(new.to(arguments[old].dtype), arguments["momentum"]))
        return tuple(results[:outputs])

    return call.kernel(kernel)


@computes("aten.instance_norm.default")
def instance_norm_piece(call: Call) -> Piece | None:
    x = call.tensors[call.op.inputs[0]].shape
    dims = list(range(2, len(x)))
    loops = [span.loop for dim, span in call.input_spans(0).items() if dim in dims]
    if not loops:
        return None
    count = math.prod(x[2:])

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x = wide(arguments["input"])
        _, deviations, variance = moments(x, dims, count, loops, exchange)
        scale = (variance + arguments["eps"]).rsqrt()
        return per_channel(deviations, scale, arguments).to(arguments["input"].dtype)

    return call.kernel(kernel)


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


known("aten.rms_norm", on_device={"cuda": _rms_norm_cuda})
known("aten.batch_norm.default", "aten._native_batch_norm_legit.no_stats", batch_statistics=True)
known(
    "aten._native_batch_norm_legit_functional.default",
    batch_statistics=True,
    only_updates=True,
    fused_on=frozenset(("cuda",)),
)


def _batch_norm_kernels(local: LocalOp) -> Kernels:
    """Its kernels give each channel one block of threads, so few channels leave most of a GPU idle."""
    moved = local.bytes
    features = np.stack([moved, local.input_shapes[0][:, 1]], axis=1)
    passes = [Work(f"{local.name}/{step}", local.dtype, np.zeros_like(moved), moved, features) for step in STEPS]
    return passes[:1], passes[1:] if any(t.grad for t in local.inputs) else []


def _layer_norm_kernels(local: LocalOp) -> Kernels:
    return memory_kernels(local, local.input_shapes[0][:, -1])


known(
    "aten.batch_norm",
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit",
    "aten.native_batch_norm",
    measured="batch_norm",
    kernels=_batch_norm_kernels,
)
known("aten.layer_norm", "aten.native_layer_norm", measured="layer_norm", kernels=_layer_norm_kernels)
known("aten.native_group_norm", measured="group_norm")


known(
    "aten.layer_norm.default",
    samples=lambda a, b, c: [
        (reals(a, b, c), (c,), reals(c), reals(c), 1e-05),
        (reals(a, b, c), (b, c), reals(b, c), None, 1e-05),
        (reals(a, b, c), (c,)),
    ],
)
known("aten.native_layer_norm.default", samples=lambda a, b, c: [(reals(a, b, c), (c,), reals(c), reals(c), 1e-05)])
known(
    "aten.rms_norm.default",
    "aten._fused_rms_norm.default",
    samples=lambda a, b, c: [(reals(a, b, c), (c,), reals(c), 1e-05)],
)
known(
    "aten.group_norm.default",
    samples=lambda n, c, h: [
        (reals(n, 4 * c, h, h), 4, reals(4 * c), reals(4 * c)),
        (reals(n, 2 * c, h), c),
        (reals(n, 2 * c, h), 1, reals(2 * c)),
    ],
)
known(
    "aten.native_group_norm.default",
    samples=lambda n, c, h: [(reals(n, 2 * c, h), reals(2 * c), reals(2 * c), n, 2 * c, h, c, 1e-05)],
)
known(
    "aten._native_batch_norm_legit_functional.default",
    samples=lambda n, c, h: [
        (reals(n, c, h, h), reals(c), reals(c), reals(c, grad=False), positive(c, grad=False), True, 0.1, 1e-05),
        (reals(n, c, h), reals(c), reals(c), reals(c, grad=False), positive(c, grad=False), False, 0.1, 1e-05),
        (reals(n, c), None, None, reals(c, grad=False), positive(c, grad=False), True, 0.1, 1e-05),
    ],
)
known(
    "aten._native_batch_norm_legit_no_training.default",
    samples=lambda n, c, h: [
        (reals(n, c, h), reals(c), reals(c), reals(c, grad=False), positive(c, grad=False), 0.1, 1e-05)
    ],
)
known(
    "aten._native_batch_norm_legit.no_stats",
    samples=lambda n, c, h: [(reals(n, c, h), reals(c), reals(c), True, 0.1, 1e-05)],
)
known(
    "aten.batch_norm.default",
    samples=lambda n, c, h: [
        (reals(n, c, h), reals(c), reals(c), reals(c, grad=False), positive(c, grad=False), False, 0.1, 1e-05, False),
        (reals(n, c, h), reals(c), reals(c), None, None, True, 0.1, 1e-05, False),
    ],
)
known(
    "aten.instance_norm.default",
    samples=lambda n, c, h: [(reals(n, c, h), reals(c), reals(c), None, None, True, 0.1, 1e-05, False)],
)


known("aten.native_layer_norm", "aten.native_layer_norm_backward", any_strides=True)


# PyTorch's kernel for channels last on the CPU writes it in any case, to nowhere (torch 2.13).
known("aten.native_group_norm_backward", always_writes=frozenset({0}))
