"""Grouped matrix products (mixtures of experts): row t belongs to the expert in whose group of rows it lies.

Rows, features and experts can all be cut; a piece with some of the experts leaves the rows of the others at zero.

Grouped matrix products in pieces: offsets are moved to the local rows, experts that lie elsewhere leave zeros.
"""

from __future__ import annotations

import math
from typing import Any

from shardwright.operators.language import Sum, TensorArgument, call, value
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes


def _flops(arguments: dict[str, Any], shapes: Any) -> float:
    x, weight = list(arguments.values())[:2]
    return 2.0 * math.prod(x.shape) * weight.shape[-1]


@describes("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default", kind="matmul", flops=_flops)
def grouped_mm(x: TensorArgument, weight: TensorArgument, offs: Any, *, bias: Any) -> Any:
    if bias is not None:
        return None
    if offs is None or x.rank != 2 or weight.rank != 3:
        return (lambda n, i, j: Sum(lambda k: x[n, i, k] * weight[n, k, j])) if x.rank == weight.rank == 3 else None
    return lambda t, j: Sum(
        lambda e: (
            call("belongs", offs[slice(None)], value(t + 0), value(e + 0)) * Sum(lambda k: x[t, k] * weight[e, k, j])
        )
    )


@computes("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm_piece(call: Call) -> Piece | None:
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
