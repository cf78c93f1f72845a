"""Samples of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.verification.samples.core import Pick, sample, t


@sample("aten.linear.default")
def linear(pick: Pick) -> Iterator[Any]:
    b, s, k, j = pick(4)
    yield t(b, s, k), t(j, k), t(j)
    yield t(b, k), t(j, k)
    yield t(k), t(j, k), t(j)


@sample("aten.mm.default")
def mm(pick: Pick) -> Iterator[Any]:
    i, k, j = pick(3)
    yield t(i, k), t(k, j)


@sample("aten.bmm.default")
def bmm(pick: Pick) -> Iterator[Any]:
    n, i, k, j = pick(4)
    yield t(n, i, k), t(n, k, j)


@sample("aten.matmul.default")
def matmul(pick: Pick) -> Iterator[Any]:
    n, h, i, k, j = pick(5)
    yield t(k), t(k)
    yield t(k), t(n, k, j)
    yield t(n, i, k), t(k)
    yield t(i, k), t(k, j)
    yield t(n, h, i, k), t(h, k, j)
    yield t(n, 1, i, k), t(h, k, j)
    yield t(n, i, k), t(k, j)


@sample("aten.dot.default", "aten.vdot.default")
def dot(pick: Pick) -> Iterator[Any]:
    k = pick(1)
    yield t(k), t(k)


@sample("aten.mv.default")
def mv(pick: Pick) -> Iterator[Any]:
    i, k = pick(2)
    yield t(i, k), t(k)


@sample("aten.addmm.default")
def addmm(pick: Pick) -> Iterator[Any]:
    i, k, j = pick(3)
    yield t(j), t(i, k), t(k, j)
    yield t(i, j), t(i, k), t(k, j), {"beta": 0.5, "alpha": 2.0}
    yield t(i, 1), t(i, k), t(k, j)


@sample("aten.addmv.default")
def addmv(pick: Pick) -> Iterator[Any]:
    i, k = pick(2)
    yield t(i), t(i, k), t(k)


@sample("aten.baddbmm.default")
def baddbmm(pick: Pick) -> Iterator[Any]:
    n, i, k, j = pick(4)
    yield t(n, i, j), t(n, i, k), t(n, k, j)
    yield t(1, 1, j), t(n, i, k), t(n, k, j)


@sample("aten.addbmm.default")
def addbmm(pick: Pick) -> Iterator[Any]:
    n, i, k, j = pick(4)
    yield t(i, j), t(n, i, k), t(n, k, j)


@sample("aten.outer.default", "aten.ger.default")
def outer(pick: Pick) -> Iterator[Any]:
    i, j = pick(2)
    yield t(i), t(j)


@sample("aten.einsum.default")
def einsum(pick: Pick) -> Iterator[Any]:
    b, s, e, c, w = pick(5)
    yield "bsec,bsw->becw", [t(b, s, e, c), t(b, s, w)]
    yield "...ij,...jk->...ik", [t(b, s, e), t(b, e, w)]
    yield "ij,jk", [t(b, s), t(s, e)]
    yield "bij->bji", [t(b, s, e)]
    yield "bsk,bske->bse", [t(b, s, c), t(b, s, c, e)]
