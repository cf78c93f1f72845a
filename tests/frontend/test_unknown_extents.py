"""Shapes and numbers that depend on data stay inside one operator, and the numbers are the eager model's for any data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.frontend import capture
from shardwright.frontend.replay import replay

WHOLE = "shardwright.unknown_extents.default"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)


class Masked(Base):
    """Boolean indexing, a layer on the selected rows, a loss over them."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.first(x)
        kept = labels >= 0
        return F.cross_entropy(self.second(h[kept]), labels[kept])


class Selected(Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.first(x)
        chosen = torch.masked_select(h, (labels >= 0)[:, None])
        return (
            chosen.sum() / chosen.numel()
            + torch.bincount(labels.clamp(min=0), minlength=3).sum() * self.second(h).mean()
        )


class Repeated(Base):
    """Rows repeated as often as the data says, and back."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        counts = labels + 2
        many = torch.repeat_interleave(self.first(x), counts, dim=0)
        rows = torch.repeat_interleave(torch.arange(len(x)), counts)
        return self.second(torch.zeros_like(x).index_add(0, rows, torch.tanh(many)))


class Scaled(Base):
    """A number read from data and computed with."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h) * h.max().item() + labels.sum().item()


class TwoGroups(Base):
    """What leaves the first selection is needed, through a layer outside, for the second."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = torch.nonzero(labels >= 0).squeeze(1)
        h = self.first(torch.zeros_like(x).index_add(0, rows, x[rows]))
        return self.second(h) + h[torch.nonzero(labels < 0).squeeze(1)].sum()


@pytest.mark.parametrize("kind", [Masked, Selected, Repeated, Scaled, TwoGroups])
def test_any_data_through_one_graph(kind: type[nn.Module]) -> None:
    model = kind()
    x, labels = torch.randn(5, 4), torch.tensor([1, -1, 0, 2, -1])
    graph = faithful(model, (x, labels))
    assert WHOLE in targets(graph)
    for other in (torch.tensor([0, 0, 0, 0, 0]), torch.tensor([-1, -1, -1, -1, 1])):
        model.zero_grad()
        expected = model(x * 2, other)
        expected.sum().backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        found = replay(graph, model, (x * 2, other))
        found.sum().backward()
        torch.testing.assert_close(found, expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name])


def test_only_what_depends_on_data_is_whole() -> None:
    graph = capture(Masked(), (torch.randn(5, 4), torch.tensor([1, -1, 0, 2, -1])))
    assert targets(graph).count("aten.linear.default") == 1  # the second layer works on selected rows


class Dropping(Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.dropout(x[labels >= 0], 0.5).sum()


def test_random_numbers_inside_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"draws random numbers in a shape that depends on data.*test_unknown_extents.py"
    ):
        capture(Dropping(), (torch.randn(5, 4), torch.tensor([1, -1, 0, 2, -1])))
