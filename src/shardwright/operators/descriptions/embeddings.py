"""Lookups in a table: a sum over the table's rows of which one is hit, so that the rows can be cut (masked lookup)."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Sum, TensorArgument, hit
from shardwright.operators.registry import describes


@describes("aten.embedding.default", kind="gather")
def embedding(
    weight: TensorArgument, indices: TensorArgument, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Any:
    if scale_grad_by_freq or sparse:  # the gradient depends on all indices together
        return lambda *n, d: weight[slice(None), d] * indices[tuple(slice(None) for _ in indices.shape)]
    return lambda *n, d: Sum(lambda v: hit(indices[n], v) * weight[v, d])
