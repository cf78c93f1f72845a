"""Lookup in a table whose rows are cut: rows that lie elsewhere count as zero, the sum over the pieces is the lookup."""

from __future__ import annotations

from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes("aten.embedding.default")
def embedding(call: Call) -> Piece | None:
    import torch

    span = call.input_spans(0).get(0)
    if span is None:
        return None
    padding = call.argument("padding_idx", -1)
    inside = padding - span.start if span.start <= padding < span.stop else -1

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        indices = arguments["indices"] - span.start
        here = (indices >= 0) & (indices < span.size)
        rows = torch.ops.aten.embedding(arguments["weight"], torch.where(here, indices, 0), inside)
        return torch.where(here.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))

    return call.kernel(kernel)
