"""Lookups in a table: a sum over the table's rows of which one is hit, so that the rows can be cut (masked lookup).

Lookup in a table whose rows are cut: rows that lie elsewhere count as zero, the sum over the pieces is the lookup.
"""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Sum, TensorArgument, hit
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes


@describes("aten.embedding.default", kind="gather")
def embedding(
    weight: TensorArgument, indices: TensorArgument, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Any:
    if scale_grad_by_freq or sparse:  # the gradient depends on all indices together
        return lambda *n, d: weight[slice(None), d] * indices[tuple(slice(None) for _ in indices.shape)]
    return lambda *n, d: Sum(lambda v: hit(indices[n], v) * weight[v, d])


@computes("aten.embedding.default")
def embedding_piece(call: Call) -> Piece | None:
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
