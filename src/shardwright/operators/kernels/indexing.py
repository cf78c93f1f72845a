"""Lookups into a cut dim: what lies elsewhere counts as zero, the sum over the pieces is the lookup."""

from __future__ import annotations

from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes("aten.gather.default", "aten.index_select.default")
def lookup(call: Call) -> Piece | None:
    import torch

    rank = len(call.tensors[call.op.inputs[0]].shape)
    dim = call.argument("dim") % rank
    span = call.input_spans(0).get(dim)
    if span is None:
        return None
    gather = "gather" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        x, index = arguments["self"], arguments["index"] - span.start
        here = (index >= 0) & (index < span.size)
        near = torch.where(here, index, 0)
        found = x.gather(dim, near) if gather else x.index_select(dim, near)
        if not gather:
            here = here.view([-1 if d == dim else 1 for d in range(rank)])
        return torch.where(here, found, torch.zeros((), dtype=x.dtype, device=x.device))

    return call.kernel(kernel)
