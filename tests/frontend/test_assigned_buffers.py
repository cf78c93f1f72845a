"""Buffers that are assigned anew in a forward keep what they were given, also in submodules."""

from __future__ import annotations

import torch
from tests.frontend.faithful import faithful
from torch import Tensor, nn


class Range(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        previous = self.largest
        self.largest = 0.5 * self.largest + x.detach().max()
        self.largest = self.largest + 1
        return x / self.largest + previous


class Observed(Range):
    """Calls its part twice, so that the second call reads what the first has assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), Range()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(self.inner(self.linear(x))))


def test_assigned_buffers_are_written() -> None:
    graph = faithful(Observed(), (torch.rand(3, 4),))
    assert len(graph.mutations) == len(graph.buffers) == 2
