"""Constant padding of a cut dim: the window is clipped at the tensor's border, the piece pads what is missing there."""

from __future__ import annotations

from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes("aten.constant_pad_nd.default", "aten.pad.default")
def pad(call: Call) -> Piece | None:
    missing = call.missing(0)
    if not missing:
        return None
    rank = len(call.output.shape)
    pads = list(call.argument("pad"))
    for dim, (before, after) in missing.items():
        place = 2 * (rank - 1 - dim)
        if place < len(pads):
            pads[place : place + 2] = [before, after]
    return call.rewritten(pad=tuple(pads))


def padded(x: Any, missing: dict[int, tuple[int, int]], fill: float) -> Any:
    """``x`` with constant borders; ``missing`` holds (before, after) per dim."""
    import torch

    if not any(before or after for before, after in missing.values()):
        return x
    pads: list[int] = []
    for dim in range(x.dim() - 1, min(missing) - 1, -1):
        pads += missing.get(dim, (0, 0))
    return torch.ops.aten.constant_pad_nd(x, pads, fill)
