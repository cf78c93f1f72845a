"""How tensors lie in memory where an operator was traced, and that they lie so again where the trace is run.

Most operators compute the same whatever the strides of their arguments, and say so in their records (pointwise ones by a
tag): views and copies, products, lookups, and reductions, whose kernels make contiguous copies themselves. All others are
taken to read memory as it lies: ``native_group_norm`` refuses what is not contiguous or, backwards on the CPU, silently
reads it in the wrong order, because PyTorch's formulas call ``contiguous()`` before it, which leaves no trace where the
traced tensor was contiguous already. Attention takes another kernel, with other saved values, when the last dimension is
not the innermost in memory. Such operators get every argument with the strides that it was traced with: a comparison where
it has them, a copy where it has not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import is_operator
from shardwright.operators.record import record


@lru_cache(maxsize=4096)
def reads_as_it_lies(target: Any) -> bool:
    """Whether an operator may depend on the strides of its arguments.

    >>> reads_as_it_lies(torch.ops.aten.mm.default), reads_as_it_lies(torch.ops.aten.native_group_norm.default)
    (False, True)
    """
    if not is_operator(target) or target.namespace == "shardwright":
        return False
    return not record(str(target)).any_strides and torch.Tag.pointwise not in target.tags


def reads_storage(target: Any) -> bool:
    """Whether an operator counts from the beginning of a tensor's storage, which may be another one next time."""
    return is_operator(target) and target.overloadpacket.__name__.startswith("as_strided")


def as_traced(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides: itself where it has them, a copy otherwise.

    >>> as_traced(torch.zeros(3, 2).t(), (3, 1)).stride()
    (3, 1)
    """
    return x if x.stride() == strides else _copied(x, strides)


def _copied(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    wide = [(extent, stride) for extent, stride in zip(x.shape, strides, strict=True) if extent != 1]
    if [s for extent, s in zip(x.shape, x.stride(), strict=True) if extent != 1] == [stride for _, stride in wide]:
        return x
    if any(stride == 0 for _, stride in wide):  # expanded when it was traced: memory that nobody can write to
        return x.contiguous()
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], x.shape[dim]))
    turned = x.permute(order).contiguous()  # nothing is written in place, which compiled regions refuse
    dense = turned.permute([order.index(dim) for dim in range(len(order))])
    if all(a == b for a, b, extent in zip(dense.stride(), strides, x.shape, strict=True) if extent != 1):
        return dense
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)  # with gaps
