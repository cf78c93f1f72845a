"""Layers and habits of ordinary PyTorch code, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shardwright.frontend import capture


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.body(x), use_reentrant=self.reentrant)


class Habits(nn.Module):
    """Things people write: einsum, sort, scatter, where, cumsum, fft, interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mixed = torch.einsum("bi,ij->bj", x, self.weight)
        values, order = mixed.sort(dim=-1)
        scattered = torch.zeros_like(mixed).scatter(1, order, values)
        chosen = torch.where(mixed > 0, mixed.cumsum(-1), scattered)
        spectrum = torch.fft.rfft(mixed).abs()
        larger = F.interpolate(chosen[:, None], scale_factor=2)
        return values, chosen, spectrum, larger, F.one_hot(order, 4).float() @ self.weight


def _sized(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (Checkpointed(True), (3, 4)),
    (Checkpointed(False), (3, 4)),
    (Habits(), (3, 4)),
    (parametrizations.weight_norm(nn.Linear(4, 4)), (3, 4)),
    (parametrizations.spectral_norm(nn.Linear(4, 4)), (3, 4)),
    (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval(), (2, 5, 8)),
    (_sized(nn.Conv2d(4, 8, 3, groups=2, padding="same"), nn.GroupNorm(2, 8), nn.PixelShuffle(2)), (2, 4, 6, 6)),
    (_sized(nn.ConvTranspose1d(4, 6, 3, stride=2), nn.InstanceNorm1d(6), nn.AdaptiveAvgPool1d(3)), (2, 4, 5)),
    (_sized(nn.Conv3d(2, 3, 2), nn.MaxPool3d(2), nn.Flatten(), nn.LazyLinear(5)), (2, 2, 5, 5, 5)),
    (_sized(nn.ReflectionPad2d(1), nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")), (1, 2, 6, 6)),
    (_sized(nn.Linear(4, 6), nn.GLU(), nn.Softplus(), nn.RMSNorm(3), nn.PReLU()), (2, 4)),
]


@pytest.mark.parametrize(("model", "shape"), LAYERS, ids=[type(m).__name__ + str(i) for i, (m, _) in enumerate(LAYERS)])
def test_layers(model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    if any(isinstance(module, nn.LazyLinear) for module in model.modules()):
        model(x)
    faithful(model, (x,))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, a: Tensor, b: Tensor | None = None, **rest: Any) -> Tensor:
        return self.linear(x) + a - rest["c"] * 2


def test_keywords_in_any_order() -> None:
    a, c = torch.randn(4), torch.randn(4)
    faithful(Keywords(), (), {"c": c, "a": a, "x": torch.randn(2, 4)})


def test_lists_of_indices() -> None:
    model = nn.EmbeddingBag(10, 4, mode="sum")
    graph = faithful(model, (torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2])))
    assert targets(graph)


def test_evaluation_without_gradients() -> None:
    model = nn.Linear(4, 4).requires_grad_(False).eval()
    graph = faithful(model, (torch.randn(2, 4),))
    assert not any(tensor.grad for tensor in graph.tensors.values())


def test_half_precision_models() -> None:
    graph = capture(nn.LayerNorm(8).to(torch.bfloat16), (torch.randn(2, 8, dtype=torch.bfloat16),))
    assert {tensor.dtype for tensor in graph.tensors.values()} == {"bfloat16"}
