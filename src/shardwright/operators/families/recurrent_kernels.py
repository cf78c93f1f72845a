"""The memory of a fused LSTM, which meta tensors know nothing about: libraries compute all time steps in one call.

cuDNN and oneDNN keep their inputs, their outputs and a reserve of intermediate values for the backward pass. How large
the reserve is, only the libraries know; the factors below count values per time step, batch entry and hidden unit of a
layer (four gates, cell and hidden state for cuDNN; measured once for oneDNN).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RESERVE = {"cuda": 6.0, "cpu": 17.5}


def lstm_on(device: str) -> Callable[..., Any]:
    """A stand-in for ``aten.lstm.input`` on meta tensors that keeps what the library of this device keeps."""

    def lstm(
        x: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        return _Fused.apply(x, hx[0], hx[1], device, num_layers, bool(bidirectional), bool(batch_first), *params)

    return lstm


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, h: Any, c: Any, device: str, layers: int, two: bool, first: bool, *params: Any
    ) -> Any:
        directions = 2 if two else 1
        output = x.new_empty((*x.shape[:2], h.shape[-1] * directions))
        between = [torch.empty_like(output) for _ in range(layers - 1)] if device == "cpu" else []
        steps_and_batch = x.shape[0] * x.shape[1]
        units = steps_and_batch * c.shape[-1] * layers * directions
        reserve = x.new_empty((int(RESERVE[device] * units * x.element_size()),), dtype=torch.uint8)
        # A program that holds weights one by one hands cuDNN a copy in one piece, which is kept for the backward pass.
        flat = [x.new_empty((sum(p.numel() for p in params),))] if device == "cuda" else []
        copied = [torch.empty_like(x)] if device == "cpu" and first else []
        ctx.save_for_backward(x, h, c, output, reserve, *params, *between, *flat, *copied)
        ctx.count = len(params)
        return output, torch.empty_like(h), torch.empty_like(c)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, h, c, _, _, *rest = ctx.saved_tensors
        params = rest[: ctx.count]
        flat = x.new_empty((sum(p.numel() for p in params),))
        grads, place = [], 0
        for p in params:
            grads.append(flat[place : place + p.numel()].view(p.shape))
            place += p.numel()
        return torch.empty_like(x), torch.empty_like(h), torch.empty_like(c), None, None, None, None, *grads
