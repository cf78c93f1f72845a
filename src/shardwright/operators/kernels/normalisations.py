"""Normalisations over cut dims: sums of elements and of squared deviations are exchanged, so statistics are exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from shardwright.operators.kernels.reductions import everywhere, wide
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


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
def layer_norm(call: Call) -> Piece | None:
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
def rms_norm(call: Call) -> Piece | None:
    import torch

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
def native_group_norm(call: Call) -> Piece:
    return call.rewritten(N=call.local_shape()[0])


@computes("aten.group_norm.default")
def group_norm(call: Call) -> Piece | None:
    import torch

    x = call.tensors[call.op.inputs[0]].shape
    groups = call.argument("num_groups")
    spans = call.input_spans(0)
    if 1 in spans:
        groups = groups * spans[1].size // spans[1].extent
    loops = [span.loop for dim, span in spans.items() if dim > 1]
    if not loops:
        return call.rewritten(num_groups=groups) if groups != call.argument("num_groups") else None
    count = math.prod(x[1:]) // call.argument("num_groups")

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
    import torch

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
def batch_norm(call: Call) -> Piece | None:
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
        from shardwright.operators.kernels.statistics import normalised

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
def instance_norm(call: Call) -> Piece | None:
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
