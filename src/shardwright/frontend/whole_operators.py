"""Operators that stand for several steps of a model, and whose backward performs these again and asks autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiated_again(operator: Any, again: Callable[..., Sequence[Tensor]]) -> None:
    """Give an operator of ``(text, tensors, *texts)`` the gradients that its tensors have where ``again`` performs it."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.text, tensors, *ctx.others = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        tensors = [tensor.detach() for tensor in ctx.saved_tensors]
        wanted = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        with torch.enable_grad():
            results = again(ctx.text, tensors, *ctx.others)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        found: Iterable[Tensor | None] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        by_tensor = {id(tensor): grad for tensor, grad in zip(wanted, found, strict=True)}
        return None, [by_tensor.get(id(tensor)) for tensor in tensors], *[None for _ in ctx.others]

    operator.register_autograd(backward, setup_context=remember)
