"""Losses. Means over a cut batch divide by the global count; cross entropy over cut classes exchanges maximum and sum.

Losses in pieces: every piece sums its own terms and divides by the global count, so the pieces add up to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardwright.operators.families.reductions import everywhere, wide
from shardwright.operators.families.softmaxes import exchanged_log_sum
from shardwright.operators.language import Expression, Max, Sum, TensorArgument, call, hit, value
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import ints, positive, reals

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


@computes(
    "aten.cross_entropy_loss.default",
    "aten.nll_loss.default",
    "aten.nll_loss_nd.default",
    "aten.nll_loss2d.default",
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
)
def class_loss_piece(call: Call) -> Piece | None:
    """Cross entropy and negative log likelihood over a cut batch, cut positions, cut classes, or several of them."""
    import torch

    from shardwright._torch_compat import operator

    x, target = call.tensors[call.op.inputs[0]], call.tensors[call.op.inputs[1]]
    classes = 1 if len(x.shape) > 1 else 0
    spans = call.input_spans(0)
    cut_classes = spans.get(classes)
    points = [span.loop for dim, span in spans.items() if dim != classes]
    reduction = call.argument("reduction", MEAN)
    if cut_classes is None and reduction == NONE:
        return None
    count, first = x.shape[classes], cut_classes.start if cut_classes else 0
    probabilities = target.shape == x.shape
    batch = x.shape[0] if len(x.shape) > 1 else 1
    normalise = "cross_entropy" in call.op.target
    several = "forward" in call.op.target
    smoothing = call.argument("label_smoothing", 0.0)
    ignore = call.argument("ignore_index", -100)
    class_loops = [cut_classes.loop] if cut_classes else []

    def log_probabilities(x: Any, exchange: Any) -> Any:
        if not normalise:
            return x
        if cut_classes is None:
            return x.log_softmax(classes)
        shifted, log_sum = exchanged_log_sum(x, classes, cut_classes.loop, exchange)
        return shifted - log_sum

    def per_class(weight: Any, rank: int) -> Any:
        return weight.view([-1 if d == classes else 1 for d in range(rank)])

    def whole_classes(exchange: Any, **arguments: Any) -> Any:
        """PyTorch's own loss of every point, which keeps one tensor of the logits' size in their own dtype."""
        x, target, weight = arguments["self"], arguments["target"], arguments.get("weight")
        total = wide(function(**(arguments | {"reduction": NONE}))).sum()
        if reduction == MEAN and probabilities:
            total = total / batch
        elif reduction == MEAN:
            kept = target != ignore
            weights = kept if weight is None else weight[torch.where(kept, target, 0)] * kept
            total = total / everywhere(exchange, weights.detach().sum().to(total.dtype), "sum", points)
        return total.to(x.dtype)

    if cut_classes is None and not several:
        function = operator(call.op.target)
        return call.kernel(whole_classes)

    def accumulate(exchange: Any, arguments: dict[str, Any]) -> Any:
        x = wide(arguments["self"])
        target, weight = arguments["target"], arguments.get("weight")
        logs = log_probabilities(x, exchange)
        weighted = logs if weight is None else logs * per_class(weight, logs.dim())
        if probabilities:
            smooth = target * (1 - smoothing) + smoothing / count
            losses = -(weighted * smooth).sum(classes)
            if reduction == NONE:
                return losses
            return losses.sum() / (batch if reduction == MEAN else 1)
        kept = target != ignore
        local = target - first
        here = kept & (local >= 0) & (local < logs.shape[classes])
        index = torch.where(here, local, 0).unsqueeze(classes)
        zero = torch.zeros((), dtype=logs.dtype, device=logs.device)
        losses = torch.where(here, -weighted.gather(classes, index).squeeze(classes), zero)
        weights = kept.to(logs.dtype) if weight is None else torch.where(here, weight[index.squeeze(classes)], zero)
        if smoothing:
            smooth = torch.where(kept, -weighted.sum(classes), zero)
            losses = losses * (1 - smoothing) + smooth * (smoothing / count)
        if reduction == NONE:
            return (losses, torch.zeros_like(zero)) if several else losses
        total = losses.sum()
        if reduction == MEAN:
            divisor = everywhere(exchange, weights.detach().sum(), "sum", points)
            if weight is not None:
                divisor = everywhere(exchange, divisor, "sum", class_loops)
            total = total / divisor
        return (total, weights.detach().sum()) if several else total

    def kernel(exchange: Any, **arguments: Any) -> Any:
        made = accumulate(exchange, arguments)
        dtype = arguments["self"].dtype
        return tuple(m.to(dtype) for m in made) if isinstance(made, tuple) else made.to(dtype)

    return call.kernel(kernel)


@computes(*PAIRS)
def mean_loss_piece(call: Call) -> Piece | None:
    """The mean of local terms times the local share of all terms."""
    from shardwright._torch_compat import operator

    if call.argument("reduction", MEAN) != MEAN:
        return None
    shapes = [call.tensors[name].shape for name in call.op.inputs[:2]]
    whole = math.prod(broadcast(*shapes))
    function = operator(call.op.target)

    def kernel(exchange: Any, **arguments: Any) -> Any:
        return function(**(arguments | {"reduction": NONE})).sum() / whole

    return call.kernel(kernel)


known("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d", loss="classes")
known(*PAIRS, loss="pairs")


known("aten.nll_loss", "aten.nll_loss_nd", measured="cross_entropy_loss")


known(
    "aten.cross_entropy_loss.default",
    samples=lambda n, c, d: [
        (reals(n, c), ints(n, below=c)),
        (reals(n, c), ints(n, below=c), positive(c, grad=False)),
        (reals(n, c), ints(n, below=c), positive(c, grad=False), 1, 3, 0.1),
        (reals(n, c), ints(n, below=c), None, 1, 2),
        (reals(n, c), ints(n, below=c), None, 0),
        (reals(n, c), ints(n, below=c), None, 2),
        (reals(n, c, d), ints(n, d, below=c)),
        (reals(n, c), positive(n, c, grad=False)),
        (reals(c), ints(below=c)),
    ],
)
known(
    "aten.nll_loss.default",
    "aten.nll_loss_nd.default",
    samples=lambda n, c: [
        (reals(n, c), ints(n, below=c)),
        (reals(n, c), ints(n, below=c), positive(c, grad=False), 1, 3),
        (reals(n, c), ints(n, below=c), None, 2),
    ],
)
known("aten.nll_loss2d.default", samples=lambda n, c, h: [(reals(n, c, h, h), ints(n, h, h, below=c))])
known("aten.nll_loss_forward.default", samples=lambda n, c: [(reals(n, c), ints(n, below=c), None, 1, -100)])
known(
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.kl_div.default",
    samples=lambda a, b: [
        (reals(a, b), positive(a, b)),
        (reals(a, b), positive(a, b, grad=False), 2),
        (reals(a, b), positive(a, b), 0),
    ],
)
known("aten.soft_margin_loss.default", samples=lambda a, b: [(reals(a, b), positive(a, b, grad=False))])
known(
    "aten.binary_cross_entropy.default",
    samples=lambda a, b: [
        (positive(a, b), positive(a, b, grad=False)),
        (positive(a, b), positive(a, b, grad=False), positive(b, grad=False)),
    ],
)
known(
    "aten.binary_cross_entropy_with_logits.default",
    samples=lambda a, b: [
        (reals(a, b), positive(a, b, grad=False)),
        (reals(a, b), positive(a, b, grad=False), positive(b, grad=False), positive(b, grad=False)),
    ],
)


known("aten.nll_loss_forward", "aten.nll_loss_backward", any_strides=True)
