"""Attention for some of the query positions: a causal mask must know which ones."""

from __future__ import annotations

from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes("aten.scaled_dot_product_attention.default")
def attention(call: Call) -> Piece | None:
    import torch

    rank = len(call.output.shape)
    span = call.output_spans().get(rank - 2)
    if span is None or not call.argument("is_causal", False):
        return None
    seen = min(span.stop, call.tensors[call.op.inputs[1]].shape[-2])  # later keys are hidden from all these queries

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        query = arguments["query"]
        rows = torch.arange(span.start, span.stop, device=query.device).unsqueeze(1)
        mask = rows >= torch.arange(seen, device=query.device)
        return torch.ops.aten.scaled_dot_product_attention(
            query,
            arguments["key"].narrow(-2, 0, seen),
            arguments["value"].narrow(-2, 0, seen),
            mask,
            arguments["dropout_p"],
            False,
            scale=arguments["scale"],
            enable_gqa=arguments["enable_gqa"],
        )

    return call.kernel(kernel)
