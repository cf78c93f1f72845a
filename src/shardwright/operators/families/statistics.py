"""A batch norm over a cut batch that keeps its input and two numbers per channel, and on CUDA is five kernels.

Written out in PyTorch's operators it would be nineteen kernels and keep deviations in float32. The backward formula is that
of Ioffe and Szegedy (2015), the sums over the batch exchanged between the pieces; on CUDA the kernels are those of PyTorch's
``SyncBatchNorm``. A module of its own, because it needs torch when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.operators.families.normalisations import moments_of, per_channel
from shardwright.operators.families.reductions import wide

Summed = Callable[[Tensor], Tensor]


def normalised(
    arguments: Mapping[str, Any], dims: list[int], count: int, summed: Summed, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised input, its mean and its biased variance over ``dims``; ``summed`` adds up over the pieces.

    ``plain``: by differentiable operators alone, which also suits the compiler.
    """
    x, weight, bias, eps = (arguments[name] for name in ("input", "weight", "bias", "eps"))
    if plain or torch.compiler.is_compiling():
        return _written_out(x, weight, bias, eps, dims, count, summed)
    return _BatchNorm.apply(x, weight, bias, eps, dims, count, summed)


def _written_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: list[int], count: int, summed: Summed
) -> tuple[Tensor, Tensor, Tensor]:
    mean, deviations, variance = moments_of(wide(x), dims, count, summed)
    scale = (variance + eps).rsqrt()
    return per_channel(deviations, scale, {"weight": weight, "bias": bias}).to(x.dtype), mean, variance


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dims: list[int],
        count: int,
        summed: Summed,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _native(x):
            x = _dense(x, x)
            mean, variance = _moments_cuda(x, count, summed)
            scale = (variance + eps).rsqrt()
            normal = torch.batch_norm_elemt(x, _wide(weight), _wide(bias), mean, scale, eps)
        else:
            normal, mean, variance = _written_out(x, weight, bias, eps, dims, count, summed)
            scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dims, ctx.count, ctx.summed = dims, count, summed
        ctx.mark_non_differentiable(mean, variance)
        return normal, mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        (x, weight, mean, scale), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad[:3]
        native = _native(x)
        x_gradient: Tensor | None = None
        weight_gradient: Tensor | None
        bias_gradient: Tensor | None
        if native:
            gradient = _dense(gradient, x)
            total, along, weight_gradient, bias_gradient = torch.batch_norm_backward_reduce(
                gradient, x, mean, scale, _wide(weight), True, of_weight, of_bias
            )
            weight_gradient = weight_gradient.to(weight.dtype) if of_weight else None
            bias_gradient = bias_gradient.to(ctx.bias_dtype) if of_bias else None
        else:
            wider, deviations = wide(gradient), wide(x) - mean
            total = wider.sum(ctx.dims, keepdim=True)
            along = (wider * deviations).sum(ctx.dims, keepdim=True)
            weight_gradient = (along * scale).flatten().to(weight.dtype) if of_weight else None
            bias_gradient = total.flatten().to(ctx.bias_dtype) if of_bias else None
        if of_x:
            total, along = ctx.summed(total), ctx.summed(along)
            if native:
                count = torch.full((1,), ctx.count, dtype=torch.int32, device=x.device)
                x_gradient = torch.batch_norm_backward_elemt(
                    gradient, x, mean, scale, _wide(weight), total, along, count
                )
            else:
                factor = scale if weight is None else scale * weight.view(scale.shape)
                inner = deviations * (scale.square() * (along / ctx.count))
                x_gradient = ((wider - total / ctx.count - inner) * factor).to(gradient.dtype)
        return x_gradient, weight_gradient, bias_gradient, None, None, None, None


def _wide(parameter: Tensor | None) -> Tensor | None:
    """The kernels take halves and parameters in float32."""
    return None if parameter is None else wide(parameter)


def _native(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


def _moments_cuda(x: Tensor, count: int, summed: Summed) -> tuple[Tensor, Tensor]:
    """Of the whole batch, from the pieces' own: their means lie apart, which adds to the variance."""
    share = math.prod(n for dim, n in enumerate(x.shape) if dim != 1) / count
    mine, inverse = torch.batch_norm_stats(x, 0.0)
    mean = summed(mine * share)
    apart = mine - mean
    variance = summed(torch.addcmul(inverse.pow(-2), apart, apart) * share)
    return mean, variance


def _dense(x: Tensor, like: Tensor) -> Tensor:
    """As the kernels want it: channels last where the input is, else contiguous."""
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
