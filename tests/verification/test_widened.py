"""A model in double precision is so in all of its parts, also in those that PyTorch does not know of."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.verification.prepare import widened


class Listed(nn.Module):
    """OneFormer: projections in a plain list, and a table that is an attribute like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.projections = [nn.Sequential(nn.Linear(4, 4)), self.last]
        self.table = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projections[1](self.projections[0](x)) * self.table


def test_modules_in_plain_lists_are_widened() -> None:
    model, (x,), _ = widened(Listed(), (torch.randn(2, 4),), {})
    assert model(x).dtype == torch.float64
