"""Softmax and its relatives: when the normalised dim is cut, the maximum and the sum are exchanged, not the elements."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Expression, Max, Sum, TensorArgument, call, put
from shardwright.operators.registry import describes


def _shifted(x: TensorArgument, i: tuple[Any, ...], dim: int, at: Any) -> Expression:
    largest = Max(lambda m: x[put(i, dim, m)], [x.shape[dim]])
    return x[put(i, dim, at)] - largest


@describes("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default", kind="normalisation")
def softmax(x: TensorArgument, dim: int) -> Any:
    if x.rank == 0:
        return lambda: x[()] * 0 + 1
    at = dim % x.rank
    return lambda *i: (
        call("exp", _shifted(x, i, at, i[at])) / Sum(lambda k: call("exp", _shifted(x, i, at, k)), [x.shape[at]])
    )


@describes("aten.log_softmax.int", "aten._log_softmax.default", kind="normalisation")
def log_softmax(x: TensorArgument, dim: int) -> Any:
    if x.rank == 0:
        return lambda: x[()] * 0
    at = dim % x.rank
    return lambda *i: (
        _shifted(x, i, at, i[at]) - call("log", Sum(lambda k: call("exp", _shifted(x, i, at, k)), [x.shape[at]]))
    )


@describes("aten.logsumexp.default", kind="reduction")
def logsumexp(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    chosen = [d % x.rank for d in ((dims,) if isinstance(dims, int) else dims)]
    if len(chosen) != 1:
        return None
    at = chosen[0]

    def element(*i: Any) -> Expression:
        full = put(i, at, 0) if keepdim else (*i[:at], 0, *i[at:])
        largest = Max(lambda m: x[put(full, at, m)], [x.shape[at]])
        return call("log", Sum(lambda k: call("exp", x[put(full, at, k)] - largest), [x.shape[at]])) + largest

    return element
