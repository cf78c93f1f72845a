"""Sorts, scans and selections along one dim: opaque along it, free along the others. Scans that sum are linear."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Opaque, TensorArgument, put
from shardwright.operators.record import describes, known
from shardwright.operators.samples import reals

ALL = slice(None)


def _along(x: TensorArgument, dim: int | None, outputs: int = 1) -> Any:
    if x.rank == 0:
        return (lambda: Opaque(x[()]),) * outputs
    at = (-1 if dim is None else dim) % x.rank
    return (lambda *i: Opaque(x[put(i, at, ALL)]),) * outputs


@describes("aten.topk.default", "aten.kthvalue.default", kind="other")
def topk(x: TensorArgument, k: int, dim: int | None, *, keepdim: Any) -> Any:
    if keepdim is False and x.rank:  # kthvalue drops the dim
        at = (-1 if dim is None else dim) % x.rank
        return (lambda *i: Opaque(x[(*i[:at], ALL, *i[at:])]),) * 2
    return _along(x, dim, 2)


@describes("aten.sort.default", "aten.cummax.default", "aten.cummin.default", kind="other")
def sort(x: TensorArgument, dim: int | None) -> Any:
    return _along(x, dim, 2)


@describes("aten.sort.stable", kind="other")
def sort_stable(x: TensorArgument, *, dim: int | None) -> Any:
    return _along(x, dim, 2)


@describes("aten.argsort.default", "aten.cumprod.default", "aten.logcumsumexp.default", kind="other")
def along_one(x: TensorArgument, dim: int | None) -> Any:
    return _along(x, dim)


@describes("aten.argsort.stable", kind="other")
def argsort_stable(x: TensorArgument, *, dim: int | None) -> Any:
    return _along(x, dim)


@describes("aten.cumsum.default", kind="reduction")
def cumsum(x: TensorArgument, dim: int) -> Any:
    if x.rank == 0:
        return lambda: x[()] * 1
    return lambda *i: x[put(i, dim % x.rank, ALL)] * 1


@describes("aten.diff.default", kind="elementwise")
def diff(x: TensorArgument, n: int, dim: int, prepend: Any, append: Any) -> Any:
    at = dim % x.rank
    extra = [t for t in (prepend, append) if t is not None]
    return lambda *i: Opaque(x[put(i, at, ALL)], *(t[put(i, at, ALL)] for t in extra))


@describes("aten.glu.default", kind="elementwise")
def glu(x: TensorArgument, dim: int) -> Any:
    return lambda *i: Opaque(x[put(i, dim % x.rank, ALL)])


known(
    "aten.topk.default", "aten.kthvalue.default", samples=lambda a, b, c: [(reals(a, b, c), 2), (reals(a, b, c), 2, 1)]
)
known(
    "aten.sort.default",
    "aten.argsort.default",
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.logcumsumexp.default",
    samples=lambda a, b, c: [(reals(a, b, c), 1), (reals(a, b), -1)],
)
known("aten.sort.stable", "aten.argsort.stable", samples=lambda a, b: [(reals(a, b), {"stable": True, "dim": 0})])
known("aten.diff.default", samples=lambda a, b: [(reals(a, b), 1, -1, reals(a, 1))])
known("aten.glu.default", samples=lambda a, b: [(reals(a, 2 * b), -1)])


known("aten.cumsum", "aten.topk", "aten.sort", any_strides=True)


known("aten.topk", decides="chosen")
