"""Lookups in a table: a sum over the table's rows of which one is hit, so that the rows can be cut (masked lookup).

Lookup in a table whose rows are cut: rows that lie elsewhere count as zero, the sum over the pieces is the lookup.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from shardwright.operators.language import Sum, TensorArgument, hit
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import ints, reals
from shardwright.operators.work import Kernels, LocalOp, memory_kernels, memory_work


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


SORTED = 3072
"""More rows than these are sorted before the gradient of a table is added up; of fewer, one after the other is looked at
(``embedding_dense_backward_cuda`` in PyTorch's ``Embedding.cu``)."""


def lookup_kernels(local: LocalOp, added: bool = False, sorted_above: float = -1) -> Kernels:
    """Rows are read where indices say. Their gradient is ``added`` to zeros wherever it belongs, or, of more indices than
    ``sorted_above``, sorted first."""
    if len(local.inputs) < 2:
        return memory_kernels(local)
    table = 0 if local.inputs[0].grad or "float" in local.inputs[0].dtype else 1
    indices = sum((local.input_bytes(i) for i in range(len(local.inputs)) if i != table), np.zeros(len(local.flops)))
    moved = indices + 2 * local.output_bytes
    forward = [memory_work("embedding/forward", local.dtype, moved)]
    if not local.inputs[table].grad:
        return forward, []
    size = local.input_bytes(table)
    plain = memory_work("embedding/backward", local.dtype, moved + size)
    filled = memory_work("fill/forward", local.dtype, size)
    if added:
        return forward, [filled, memory_work("elementwise/forward", local.dtype, moved)]
    if local.inputs[1 - table].elements <= sorted_above:
        return forward, [memory_work("embedding_few/backward", local.dtype, indices, instead=plain), filled]
    return forward, [memory_work("embedding_sorted/backward", local.dtype, moved, instead=plain), filled]


known("aten.embedding", kernels=partial(lookup_kernels, sorted_above=SORTED))


known(
    "aten.embedding.default",
    module="Embedding",
    samples=lambda v, d, a, b: [(reals(v, d), ints(a, b, below=v)), (reals(v, d), ints(a, below=v), 2)],
)


known("aten.embedding", "aten.embedding_dense_backward", any_strides=True)
