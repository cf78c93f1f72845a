"""Convolutions in pieces: halo rows arrive with the window, the border is padded here, groups are counted locally."""

from __future__ import annotations

from typing import Any

from shardwright.operators.descriptions.convolutions import paddings, spread
from shardwright.operators.kernels.padding import padded
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes(
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv1d.padding",
    "aten.conv2d.padding",
    "aten.conv3d.padding",
    "aten.convolution.default",
)
def convolution(call: Call) -> Piece | None:
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
def conv_transpose(call: Call) -> Piece | None:
    groups = _local_groups(call, call.output.shape[1])
    return call.rewritten(groups=groups) if groups != call.argument("groups", 1) else None
