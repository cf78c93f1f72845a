"""Losses in pieces: every piece sums its own terms and divides by the global count, so the pieces add up to the loss."""

from __future__ import annotations

import math
from typing import Any

from shardwright.operators.descriptions.losses import MEAN, NONE, PAIRS, broadcast
from shardwright.operators.kernels.reductions import everywhere, wide
from shardwright.operators.kernels.softmaxes import exchanged_log_sum
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes(
    "aten.cross_entropy_loss.default",
    "aten.nll_loss.default",
    "aten.nll_loss_nd.default",
    "aten.nll_loss2d.default",
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
)
def class_loss(call: Call) -> Piece | None:
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
def mean_loss(call: Call) -> Piece | None:
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
