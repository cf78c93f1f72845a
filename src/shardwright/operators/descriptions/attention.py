"""Scaled dot-product attention: free along batch, heads (grouped ones too) and query positions; keys are needed whole."""

from __future__ import annotations

import math
from typing import Any

from shardwright.operators.language import Expression, Opaque, TensorArgument
from shardwright.operators.registry import describes


def attention_flops(arguments: dict[str, Any], shapes: Any) -> float:
    """Two products: queries with keys, weights with values."""
    q, k, v = list(arguments.values())[:3]
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


@describes("aten.scaled_dot_product_attention.default", kind="attention", flops=attention_flops)
def attention(
    query: TensorArgument,
    key: TensorArgument,
    value: TensorArgument,
    attn_mask: TensorArgument | None,
    dropout_p: float,
    is_causal: bool,
) -> Any:
    def element(n: tuple[Any, ...], i: Any) -> Expression:
        parts = [query.at((*n, i, slice(None)))]
        for x in (key, value):
            # Grouped queries: query head h reads key head h // group.
            group = query.shape[-3] // x.shape[-3] if query.rank > 2 and x.rank > 2 else 1
            heads = (*n[:-1], n[-1] // group) if n else ()
            parts.append(x.at((*heads, slice(None), slice(None))))
        if attn_mask is not None:
            parts.append(attn_mask.at((*n, i, slice(None))))
        return Opaque(*parts)

    if query.rank == 4:
        return lambda b, h, i, e: element((b, h), i)
    return lambda *n, i, e: element(n, i)
