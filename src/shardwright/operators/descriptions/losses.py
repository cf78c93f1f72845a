"""Losses. Means over a cut batch divide by the global count; cross entropy over cut classes exchanges maximum and sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.operators.language import Expression, Max, Sum, TensorArgument, call, hit, value
from shardwright.operators.registry import describes

NONE, MEAN, SUM = 0, 1, 2
"""Values of ``reduction`` in ATen."""

PAIRS = (
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.soft_margin_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.kl_div.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
)
"""Losses that compare two tensors element by element."""


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(max(x, y) if x and y else 0 for x, y in zip(a, b, strict=True))


def _points(x: TensorArgument) -> tuple[list[int], int]:
    """Dims of ``x`` other than the classes, and the class dim: (N, C, ...) or (C)."""
    classes = 1 if x.rank > 1 else 0
    return [d for d in range(x.rank) if d != classes], classes


def _reduce(element: Any, extents: Sequence[int], reduction: int, weights: Any = None) -> Any:
    if reduction == NONE:
        return lambda *n: element(*n)
    if reduction == SUM or not extents:
        return lambda: Sum(lambda *n: element(*n), extents) if extents else element() * 1
    if weights is None:
        return lambda: Sum(lambda *n: element(*n), extents) * 0.5
    return lambda: Sum(lambda *n: element(*n), extents) / Sum(lambda *n: weights(*n), extents)


def _class_loss(
    x: TensorArgument, target: TensorArgument, weight: TensorArgument | None, reduction: int, log_probability: Any
) -> Any:
    """``-weight[t] * log_probability(n, t)`` for the target class t of every point n."""
    dims, classes = _points(x)
    count = x.shape[classes]
    extents = [x.shape[d] for d in dims]

    def at(n: tuple[Any, ...], c: Any) -> tuple[Any, ...]:
        return (*n[:1], c, *n[1:]) if classes == 1 else (c,)

    def element(*n: Any) -> Expression:
        def of_class(c: Any) -> Expression:
            loss = call("counted", hit(target[n], c)) * -log_probability(x, at, n, c)
            return loss if weight is None else loss * weight[c]

        return Sum(lambda c: of_class(c), [count])

    def of_weight(*n: Any) -> Expression:
        if weight is None:
            return call("counts", target[n])
        return Sum(lambda c: hit(target[n], c) * weight[c], [count])

    return _reduce(element, extents, reduction, of_weight)


def _log_softmax(x: TensorArgument, at: Any, n: tuple[Any, ...], c: Any) -> Expression:
    count = x.shape[1 if x.rank > 1 else 0]
    largest = Max(lambda m: x[at(n, m)], [count])
    return x[at(n, c)] - largest - call("log", Sum(lambda k: call("exp", x[at(n, k)] - largest), [count]))


@describes("aten.cross_entropy_loss.default", kind="normalisation")
def cross_entropy(
    x: TensorArgument, target: TensorArgument, weight: Any, reduction: int, ignore_index: int, label_smoothing: float
) -> Any:
    if target.shape != x.shape:
        return _class_loss(x, target, weight, reduction, _log_softmax)
    dims, classes = _points(x)  # targets are probabilities

    def element(*n: Any) -> Expression:
        def at(n: tuple[Any, ...], c: Any) -> tuple[Any, ...]:
            return (*n[:1], c, *n[1:]) if classes == 1 else (c,)

        loss = Sum(
            lambda c: target[at(n, c)] * -_log_softmax(x, at, n, c) * (value(1) if weight is None else weight[c]),
            [x.shape[classes]],
        )
        return loss

    extents = [x.shape[d] for d in dims]
    if reduction != MEAN:
        return _reduce(element, extents, reduction)
    # The mean of probability targets is over the batch only.
    return lambda: Sum(lambda *n: element(*n), extents) * 0.5 if extents else element() * 1


def _of_log_probability(x: TensorArgument, at: Any, n: tuple[Any, ...], c: Any) -> Expression:
    return x[at(n, c)]


@describes("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default", kind="reduction")
def nll_loss(x: TensorArgument, target: TensorArgument, weight: Any, reduction: int) -> Any:
    return _class_loss(x, target, weight, reduction, _of_log_probability)


@describes("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", kind="reduction")
def nll_loss_forward(x: TensorArgument, target: TensorArgument, weight: Any, reduction: int) -> Any:
    """Its second output is the total weight, which the backward pass divides by."""
    dims, classes = _points(x)

    def of_weight(*n: Any) -> Expression:
        if weight is None:
            return call("counts", target[n])
        return Sum(lambda c: hit(target[n], c) * weight[c], [x.shape[classes]])

    total = Sum(lambda *n: of_weight(*n), [x.shape[d] for d in dims]) if dims else of_weight()
    return _class_loss(x, target, weight, reduction, _of_log_probability), lambda: total if reduction else value(0)


@describes(
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.soft_margin_loss.default",
    kind="reduction",
)
def pair_loss(x: TensorArgument, target: TensorArgument, reduction: int) -> Any:
    shape = broadcast(x.shape, target.shape)
    return _reduce(lambda *n: call("loss", x.at(n), target.at(n)), shape, reduction)


@describes("aten.smooth_l1_loss.default", "aten.huber_loss.default", kind="reduction")
def smooth_loss(x: TensorArgument, target: TensorArgument, reduction: int) -> Any:
    return pair_loss(x, target, reduction)


@describes("aten.kl_div.default", kind="reduction")
def kl_div(x: TensorArgument, target: TensorArgument, reduction: int) -> Any:
    return pair_loss(x, target, reduction)


@describes("aten.binary_cross_entropy.default", kind="reduction")
def binary_cross_entropy(x: TensorArgument, target: TensorArgument, weight: Any, reduction: int) -> Any:
    extra = () if weight is None else (weight,)
    return _reduce(lambda *n: call("loss", x[n], target[n], *(w.at(n) for w in extra)), x.shape, reduction)


@describes("aten.binary_cross_entropy_with_logits.default", kind="reduction")
def binary_cross_entropy_with_logits(
    x: TensorArgument, target: TensorArgument, weight: Any, pos_weight: Any, reduction: int
) -> Any:
    extra = [w for w in (weight, pos_weight) if w is not None]
    return _reduce(lambda *n: call("loss", x[n], target[n], *(w.at(n) for w in extra)), x.shape, reduction)
