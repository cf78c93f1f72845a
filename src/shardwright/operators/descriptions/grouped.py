"""Grouped matrix products (mixtures of experts): row t belongs to the expert in whose group of rows it lies.

Rows, features and experts can all be cut; a piece with some of the experts leaves the rows of the others at zero.
"""

from __future__ import annotations

import math
from typing import Any

from shardwright.operators.language import Sum, TensorArgument, call, value
from shardwright.operators.registry import describes


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
