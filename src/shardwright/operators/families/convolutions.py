"""Convolutions: affine windows over positions, whole sums over channels, groups by integer division.

Convolutions in pieces: halo rows arrive with the window, the border is padded here, groups are counted locally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from shardwright.operators.families.joining import padded
from shardwright.operators.language import Expression, Sum, TensorArgument, call
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import HostClass, computes, describes, known
from shardwright.operators.samples import reals
from shardwright.operators.work import Kernels, LocalOp, Work, memory_kernels, memory_work


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


@computes(
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv1d.padding",
    "aten.conv2d.padding",
    "aten.conv3d.padding",
    "aten.convolution.default",
)
def convolution_piece(call: Call) -> Piece | None:
    import torch

    weight = call.tensors[call.op.inputs[1]].shape
    groups = _local_groups(
        call, weight[0] if not call.argument("transposed", False) else call.output.shape[-len(weight) + 1]
    )
    missing = call.missing(0)
    tiles = _tiles(call, len(weight) - 2)
    if call.argument("transposed", False):
        return call.rewritten(groups=groups) if groups != call.argument("groups") else None
    if not missing and not tiles:
        return call.rewritten(groups=groups) if groups != call.argument("groups", 1) else None
    count = len(weight) - 2
    stride = spread(call.argument("stride", (1,)), count)
    dilation = spread(call.argument("dilation", (1,)), count)
    before = paddings(call.argument("padding", (0,)), weight, dilation)
    lead = len(call.output.shape) - count
    borders, inner = dict(missing), []
    for n in range(count):
        dim = lead + n
        inner.append(0 if dim in borders or dim in tiles else before[n])
        if call.argument("padding") == "same" and dim not in borders and dim not in tiles:
            total = dilation[n] * (weight[2 + n] - 1)  # "same" may pad more behind than in front
            borders[dim], inner[n] = (before[n], total - before[n]), 0

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        x = padded(arguments["input"], borders, 0.0) if borders else arguments["input"]
        batched = x if x.dim() == count + 2 else x.unsqueeze(0)
        weight, bias = arguments["weight"], arguments["bias"]
        made = torch.ops.aten.convolution(batched, weight, bias, stride, inner, dilation, False, [0] * count, groups)
        return made if x.dim() == count + 2 else made.squeeze(0)

    return call.kernel(kernel)


def _tiles(call: Call, count: int) -> set[int]:
    """Position dims cut in whole tiles (patches): no padding is needed there."""
    lead = len(call.output.shape) - count
    return {dim for dim in call.output_spans() if dim >= lead}


def _local_groups(call: Call, channels: int) -> int:
    """Cutting output channels of a grouped convolution cuts its groups."""
    groups = call.argument("groups", 1)
    dim = len(call.output.shape) - (len(call.tensors[call.op.inputs[1]].shape) - 2) - 1
    span = call.output_spans().get(dim)
    return groups if span is None or groups == 1 else groups * span.size // span.extent


@computes("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose_piece(call: Call) -> Piece | None:
    groups = _local_groups(call, call.output.shape[1])
    return call.rewritten(groups=groups) if groups != call.argument("groups", 1) else None


def _reserve(device: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, int]:
    """Convolutions are computed on copies in the library's own order of dims: on CUDA input, weight and output, in the
    CPU's backward pass output and weight. This is an assumption about libraries, not a fact about PyTorch."""
    if len(inputs) < 2 or not outputs or outputs[0] is None:
        return 0, 0
    copies = inputs[1].bytes + outputs[0].bytes
    return (copies + inputs[0].bytes, copies + inputs[0].bytes) if device == "cuda" else (0, copies)


ALIGNED = 16
"""Positions: kernels make no difference between multiples of more."""


def _kernels(local: LocalOp) -> Kernels:
    """Convolutions as products: rows are output positions, columns output channels, summed over the filter.

    Pointwise and depthwise ones have curves of their own over what decides there, where calibration measured them.
    """
    if len(local.inputs) < 2 or len(local.inputs[1].shape) < 3:
        return memory_kernels(local)
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


_DENSE = (*(f"aten.conv{rank}d" for rank in (1, 2, 3)), "aten.convolution")
_TRANSPOSED = (f"aten.conv_transpose{rank}d" for rank in (1, 2, 3))
known(*_DENSE, *_TRANSPOSED, reserve=_reserve, kernels=_kernels)
known(*_DENSE, issued=HostClass("conv2d", gradients=2))
known("aten.conv2d", channels_last=True)


known("aten.conv1d.default", samples=lambda n, c, o: [(reals(n, c, 24), reals(o, c, 3), reals(o), (1,), (1,))])
known(
    "aten.conv2d.padding",
    samples=lambda n, c, o: [
        (reals(n, c, 16, 16), reals(o, c, 3, 4), reals(o), (1, 1), "same"),
        (reals(n, c, 16, 16), reals(o, c, 3, 3), reals(o), (1, 1), "valid"),
    ],
)
known("aten.conv1d.padding", samples=lambda n, c, o: [(reals(n, c, 16), reals(o, c, 3), reals(o), (1,), "same")])
known(
    "aten.conv3d.padding",
    samples=lambda _, c, o: [(reals(2, c, 9, 9, 9), reals(o, c, 3, 3, 3), reals(o), (1, 1, 1), "same")],
)
known(
    "aten.conv3d.default",
    samples=lambda _n, c, o: [(reals(2, c, 9, 9, 9), reals(o, c, 3, 3, 3), reals(o), (1, 1, 1), (1, 1, 1))],
)
known(
    "aten.convolution.default",
    samples=lambda n, c, o: [
        (reals(n, c, 14, 14), reals(o, c, 3, 3), reals(o), (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        (reals(n, c, 6, 6), reals(c, o, 3, 3), reals(o), (2, 2), (1, 1), (1, 1), True, (0, 0), 1),
    ],
)
known("aten.conv_transpose1d.default", samples=lambda n, c, o: [(reals(n, c, 8), reals(c, o, 3), reals(o), (2,))])
known(
    "aten.conv_transpose2d.input",
    samples=lambda n, c, o: [
        (reals(n, c, 6, 6), reals(c, o, 3, 3), reals(o), (2, 2), (1, 1)),
        (reals(n, 8, 6, 6), reals(8, 3, 3, 3), reals(12), (2, 2), (1, 1), (0, 0), 4),
    ],
)
known("aten.conv_transpose3d.input", samples=lambda _n, c, o: [(reals(2, c, 3, 3, 3), reals(c, o, 3, 3, 3), reals(o))])


def _conv2d_calls(n: int, c: int, o: int) -> list[tuple]:
    h = 13 + n % 2
    return [
        (reals(2, c, h, h), reals(o, c, 3, 3), reals(o), (1, 1), (1, 1)),
        (reals(n, 3, 23, 23), reals(o, 3, 5, 5), reals(o), (2, 2), (2, 2)),
        (reals(2, 4 * 2, h, h), reals(4 * 3, 2, 3, 3), reals(12), (1, 1), (1, 1), (1, 1), 4),
        (reals(2, c, h, h), reals(c, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), c),
        (reals(2, c, 4 * n, 4 * n), reals(o, c, 4, 4), reals(o), (4, 4)),
        (reals(2, c, 17, 17), reals(o, c, 3, 3), None, (1, 1), (2, 2), (2, 2)),
        (reals(c, h, h), reals(o, c, 3, 3), reals(o), (1, 1), (0, 1)),
    ]


known("aten.conv2d.default", samples=_conv2d_calls)


known("aten.convolution", "aten.convolution_backward", any_strides=True)
