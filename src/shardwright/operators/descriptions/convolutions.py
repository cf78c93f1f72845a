"""Convolutions: affine windows over positions, whole sums over channels, groups by integer division."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardwright.operators.language import Expression, Sum, TensorArgument, call
from shardwright.operators.registry import describes


def spread(setting: Any, count: int) -> list[int]:
    """A stride, padding or dilation given once or per dim."""
    values = [setting] if isinstance(setting, int) else list(setting)
    return values * count if len(values) == 1 else values


def paddings(padding: Any, weight_shape: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Padding in front of every position dim; ``"same"`` puts the smaller half in front."""
    count = len(weight_shape) - 2
    if padding == "valid":
        return [0] * count
    if padding == "same":
        return [(d * (k - 1)) // 2 for k, d in zip(weight_shape[2:], dilation, strict=True)]
    return spread(padding, count)


def convolve(
    x: TensorArgument, weight: TensorArgument, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    count = weight.rank - 2
    strides, dilations = spread(stride, count), spread(dilation, count)
    pads = paddings(padding, weight.shape, dilations)
    per_group = weight.shape[0] // groups
    channels = weight.shape[1]

    def element(n: Any, o: Any, position: Sequence[Any]) -> Expression:
        def term(c: Any, *r: Any) -> Expression:
            where = [p * s + t * d - b for p, s, t, d, b in zip(position, strides, r, dilations, pads, strict=True)]
            batch = () if n is None else (n,)
            return x.padded((*batch, o // per_group * channels + c, *where)) * weight[(o, c, *r)]

        total = Sum(lambda c, *r: term(c, *r), weight.shape[1:])
        return total if bias is None else total + bias[o]

    if x.rank == weight.rank:
        return lambda n, o, *y: element(n, o, y)
    return lambda o, *y: element(None, o, y)


@describes(
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv1d.padding",
    "aten.conv2d.padding",
    "aten.conv3d.padding",
    kind="convolution",
)
def conv(
    x: TensorArgument, weight: TensorArgument, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    return convolve(x, weight, bias, stride, padding, dilation, groups)


@describes("aten.convolution.default", kind="convolution")
def convolution(
    x: TensorArgument,
    weight: TensorArgument,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if transposed:
        return transposed_convolution(x, weight, bias, groups)
    return convolve(x, weight, bias, stride, padding, dilation, groups)


def transposed_convolution(x: TensorArgument, weight: TensorArgument, bias: Any, groups: int) -> Any:
    """Positions scatter, so they are needed whole; batch and channels are free (channels of one group together)."""
    per_group = weight.shape[1]
    channels = weight.shape[0] // groups
    alls = (slice(None),) * (weight.rank - 2)

    def element(n: Any, o: Any) -> Expression:
        batch = () if n is None else (n,)

        def term(c: Any) -> Expression:
            source = o // per_group * channels + c
            kernel = weight[(source, o % per_group, *alls)]
            return call("scatter", x[(*batch, source, *alls)]) * kernel

        total = Sum(lambda c: term(c), [channels])
        return total if bias is None else total + bias[o]

    if x.rank == weight.rank:
        return lambda n, o, *y: element(n, o)
    return lambda o, *y: element(None, o)


@describes(
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
    kind="convolution",
    flops=lambda a, shapes: 2.0 * math.prod(a["input"].shape) * math.prod(a["weight"].shape[1:]),
)
def conv_transpose(
    x: TensorArgument, weight: TensorArgument, bias: Any, stride: Any, padding: Any, output_padding: Any, groups: int
) -> Any:
    return transposed_convolution(x, weight, bias, groups)
