"""Samples of reductions, softmaxes, losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.verification.samples.core import Pick, bools, ints, positive, sample, t


@sample(
    "aten.sum.default",
    "aten.mean.default",
    "aten.max.default",
    "aten.min.default",
    "aten.var.default",
    "aten.std.default",
    "aten.prod.default",
    "aten.count_nonzero.default",
)
def everything(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (t(a, b),)


@sample("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.nansum.default")
def some_dims(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (1,)
    yield t(a, b, c), (0, -1), True
    yield t(a, b, c, grad=False), (-1,)


@sample("aten.count_nonzero.dim_IntList")
def count_nonzero(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield ints(a, b, below=2), (1,)


@sample(
    "aten.prod.dim_int",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.median.dim",
    "aten.nanmedian.dim",
    "aten.mode.default",
)
def one_dim(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), 1
    yield t(a, b, c), -1, True


@sample("aten.any.default", "aten.all.default")
def truth(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield (bools(a, b),)


@sample("aten.any.dim", "aten.all.dim")
def truth_dim(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield bools(a, b), 1


@sample("aten.any.dims", "aten.all.dims")
def truth_dims(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield bools(a, b), (1,)


@sample("aten.var.correction", "aten.std.correction", "aten.var_mean.correction")
def deviation(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (1,)
    yield t(a, b, c), (0, 2), {"correction": 0, "keepdim": True}


@sample("aten.var.dim", "aten.std.dim", "aten.var_mean.dim")
def deviation_dim(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), (1,), False


@sample("aten.linalg_vector_norm.default")
def vector_norm(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 2, (1,), True
    yield t(a, b), 3
    yield t(a, b), 1, (0,)


@sample("aten.norm.ScalarOpt_dim")
def norm_dim(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 2, (1,), True


@sample("aten.norm.Scalar")
def norm(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), 2


@sample("aten.softmax.int", "aten.log_softmax.int", "aten._safe_softmax.default")
def softmax(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), -1
    yield t(a, b, c), 1


@sample("aten._softmax.default", "aten._log_softmax.default")
def inner_softmax(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), -1, False


@sample("aten.logsumexp.default")
def logsumexp(pick: Pick) -> Iterator[Any]:
    a, b, c = pick(3)
    yield t(a, b, c), (1,)
    yield t(a, b, c), (-1,), True


@sample("aten.cross_entropy_loss.default")
def cross_entropy(pick: Pick) -> Iterator[Any]:
    n, c, d = pick(3)
    yield t(n, c), ints(n, below=c)
    yield t(n, c), ints(n, below=c), positive(c, grad=False)
    yield t(n, c), ints(n, below=c), positive(c, grad=False), 1, 3, 0.1
    yield t(n, c), ints(n, below=c), None, 1, 2
    yield t(n, c), ints(n, below=c), None, 0
    yield t(n, c), ints(n, below=c), None, 2
    yield t(n, c, d), ints(n, d, below=c)
    yield t(n, c), positive(n, c, grad=False)
    yield t(c), ints(below=c)


@sample("aten.nll_loss.default", "aten.nll_loss_nd.default")
def nll_loss(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c), ints(n, below=c)
    yield t(n, c), ints(n, below=c), positive(c, grad=False), 1, 3
    yield t(n, c), ints(n, below=c), None, 2


@sample("aten.nll_loss2d.default")
def nll_loss2d(pick: Pick) -> Iterator[Any]:
    n, c, h = pick(3)
    yield t(n, c, h, h), ints(n, h, h, below=c)


@sample("aten.nll_loss_forward.default")
def nll_loss_forward(pick: Pick) -> Iterator[Any]:
    n, c = pick(2)
    yield t(n, c), ints(n, below=c), None, 1, -100


@sample(
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.kl_div.default",
)
def pair_loss(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), positive(a, b)
    yield t(a, b), positive(a, b, grad=False), 2
    yield t(a, b), positive(a, b), 0


@sample("aten.soft_margin_loss.default")
def margin_loss(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), positive(a, b, grad=False)


@sample("aten.binary_cross_entropy.default")
def binary_cross_entropy(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield positive(a, b), positive(a, b, grad=False)
    yield positive(a, b), positive(a, b, grad=False), positive(b, grad=False)


@sample("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(pick: Pick) -> Iterator[Any]:
    a, b = pick(2)
    yield t(a, b), positive(a, b, grad=False)
    yield t(a, b), positive(a, b, grad=False), positive(b, grad=False), positive(b, grad=False)
