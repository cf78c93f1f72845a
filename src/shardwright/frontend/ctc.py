"""``ctc_loss``, kept whole as one operator.

PyTorch cannot trace it with lengths as tensors, because the size of its work space depends on their values. Its loss
does not, so during a capture it is recorded as ``shardwright.ctc_loss``, which runs PyTorch's own forward and
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def recorded_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """``torch.nn.functional.ctc_loss`` as one operator."""
    lengths = [value if isinstance(value, Tensor) else torch.tensor(value) for value in (input_lengths, target_lengths)]
    return torch.ops.shardwright.ctc_loss(log_probs, targets, *lengths, blank, _REDUCTIONS[reduction], zero_infinity)


@torch.library.custom_op("shardwright::ctc_loss", mutates_args=())
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> Tensor:
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


@_ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *options: Any) -> Tensor:
    unbatched = log_probs.dim() == 2
    whole = options[1] != _REDUCTIONS["none"] or unbatched
    return log_probs.new_empty(()) if whole else log_probs.new_empty(log_probs.shape[1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    log_probs, *others = ctx.saved_tensors
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        loss = torch.ctc_loss(leaf, *others, *ctx.options)
    (found,) = torch.autograd.grad(loss, leaf, grad)
    return found, None, None, None, None, None, None


_ctc_loss.register_autograd(_backward, setup_context=_remember)
