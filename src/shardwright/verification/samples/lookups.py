"""Samples of indexing and sorting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.verification.samples.core import Pick, bools, ints, positive, sample, t


@sample("aten.gather.default")
def gather(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, ints(a, c, below=b)
    yield t(a, b), 0, ints(c, b, below=a)


@sample("aten.take_along_dim.default")
def take_along_dim(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), ints(a, c, below=b), 1


@sample("aten.index_select.default")
def index_select(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, ints(c, below=b)


@sample("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(pick: Pick) -> Iterator[Any]:
    a, b, c, d = pick(4)
    yield t(a, b), [ints(c, below=a)]
    yield t(a, b, c), [None, ints(d, below=b)]
    yield t(a, b, c), [ints(d, 1, below=a), ints(b, below=b)]
    yield t(a, b, c), [ints(d, below=a), None, ints(d, below=c)]


@sample("aten._unsafe_index_put.default")
def index_put(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), [ints(c, below=a)], t(c, b), True
    yield t(a, b, c), [None, ints(4, below=b)], t(c), True


@sample("aten.index_put.default")
def index_put_mask(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield from index_put(pick)
    yield t(a, b, c), [bools(a, b)], t()


@sample("aten.scatter.src", "aten.scatter_add.default")
def scatter(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 1, ints(a, 1, below=b), t(a, 1)


@sample("aten.scatter.value")
def scatter_value(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, ints(a, c, below=b), 1.0


@sample("aten.scatter_reduce.two")
def scatter_reduce(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, ints(a, c, below=b), t(a, c), "sum"


@sample("aten.scatter.reduce")
def scatter_with(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, grad=False), 1, ints(a, c, below=b), t(a, c, grad=False), {"reduce": "add"}


@sample("aten.scatter.value_reduce")
def scatter_value_with(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, grad=False), 1, ints(a, c, below=b), 2.0, {"reduce": "multiply"}


@sample("aten.index_add.default")
def index_add(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, ints(c, below=b), t(a, c)


@sample("aten.index_copy.default")
def index_copy(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 1, ints(1, below=b), t(a, 1)


@sample("aten.index_fill.int_Scalar")
def index_fill(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b), 1, ints(c, below=b), 2.0


@sample("aten.select_scatter.default")
def select_scatter(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), t(a, c), 1, 2


@sample("aten.slice_scatter.default")
def slice_scatter(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), t(a, 3, c), 1, 1, 4


@sample("aten.bucketize.Tensor")
def bucketize(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield positive(a, b, grad=False), positive(1, grad=False)


@sample("aten.searchsorted.Tensor")
def searchsorted(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield positive(1, grad=False), positive(a, b, grad=False)
    yield positive(a, 1, grad=False), positive(a, b, grad=False)


@sample("aten.isin.Tensor_Tensor")
def isin(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield ints(a, b, below=9), ints(c, below=9)


@sample("aten.topk.default", "aten.kthvalue.default")
def topk(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 2
    yield t(a, b, c), 2, 1


@sample(
    "aten.sort.default",
    "aten.argsort.default",
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.logcumsumexp.default",
)
def sort(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 1
    yield t(a, b), -1


@sample("aten.sort.stable", "aten.argsort.stable")
def sort_stable(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), {"stable": True, "dim": 0}


@sample("aten.diff.default")
def diff(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 1, -1, t(a, 1)


@sample("aten.glu.default")
def glu(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, 2 * b), -1
