"""``as_strided`` reads the same elements wherever they lie."""

from __future__ import annotations

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.frontend import capture
from shardwright.frontend.replay import replay


class Chunks(nn.Module):
    """Overlapping chunks of a transposed view, as Longformer makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).view(8, 2, 6).transpose(0, 1)
        return heads.as_strided((2, 3, 4, 6), (6, 24, 12, 1)).pow(2).cumsum(-1)


def test_elements_are_read_by_their_numbers() -> None:
    torch.manual_seed(0)
    graph = faithful(Chunks(), (torch.randn(8, 2, 6),))
    assert "aten.as_strided.default" not in targets(graph)


class Corner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t().as_strided((3,), (5,), 1) + x.as_strided((), ())


def test_an_offset_counts_and_the_argument_may_lie_otherwise() -> None:
    x = torch.randn(4, 4)
    graph = capture(Corner(), (x,))
    elsewhere = torch.empty(4, 4).t().copy_(x)
    assert torch.equal(replay(graph, Corner(), (elsewhere,)), Corner()(x))


class Beside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2].as_strided((4, 4), (4, 1))


def test_memory_beside_the_argument_is_refused() -> None:
    with pytest.raises(CaptureError, match="beside the elements") as refusal:
        capture(Beside(), (torch.randn(4, 4),))
    assert "contiguous" in refusal.value.remedy
