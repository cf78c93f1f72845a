"""Grouped matrix products in pieces: offsets are moved to the local rows, experts that lie elsewhere leave zeros."""

from __future__ import annotations

from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(call: Call) -> Piece | None:
    import torch

    from shardwright._torch_compat import operator

    rows, experts = call.input_spans(0).get(0), call.input_spans(1).get(0)
    if len(call.op.inputs) < 3 or (rows is None and experts is None):
        return None
    function = operator(call.op.target)
    first_name, _, offs_name = call.bound.names[:3]

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        x, offs = arguments[first_name], arguments[offs_name]
        count = x.shape[0]
        if rows is not None:
            offs = (offs - rows.start).clamp(0, count)
        if experts is None:
            return function(**(arguments | {offs_name: offs.to(arguments[offs_name].dtype)}))
        # Turn the rows so that those of the local experts come first: only they are multiplied.
        before = offs[experts.start - 1] if experts.start else offs.new_zeros(())
        here = offs[experts.start : experts.stop] - before
        places = torch.arange(count, device=x.device)
        turned = x[(places + before) % count]
        made = function(**(arguments | {first_name: turned, offs_name: here.to(arguments[offs_name].dtype)}))
        made = torch.where((places < here[-1]).unsqueeze(1), made, torch.zeros((), dtype=made.dtype, device=x.device))
        return made[(places - before) % count]

    return call.kernel(kernel)
