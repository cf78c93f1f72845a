"""Small models for stored plans that the zoo does not have; ``bench/predictions/models.py:tied`` names one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Tied(nn.Module):
    """A language model whose head is its embedding, of residual blocks with dropout."""

    def __init__(self, width: int = 32, vocabulary: int = 48, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _tokens(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 48, (batch, 16)), torch.randint(0, 48, (batch, 16))


def tied(batch: int = 8) -> Built:
    return Tied(), _tokens(batch), {}


def dropping(batch: int = 8) -> Built:
    return Tied(dropout=0.1), _tokens(batch), {}


class Telling(Tied):
    """The same, which gives its logits beside the loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def telling(batch: int = 8) -> Built:
    return Telling(), _tokens(batch), {}


class Images(nn.Module):
    """Convolutions with batch norms, a pooling and a classifier: halos where images are cut."""

    def __init__(self, channels: int = 8, size: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (3, channels, channels):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.out = nn.Linear(channels * (size // 2) ** 2, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(self.layers(images))
        return functional.cross_entropy(self.out(x.flatten(1)), labels)


def images(batch: int = 8) -> Built:
    return Images(), (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,))), {}


class Vit(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021): patches, encoder layers, the mean of the tokens."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, patch: int = 8, image: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.out(self.norm(x).mean(1)), labels)


def vit(batch: int = 8) -> Built:
    return Vit(), (torch.randn(batch, 3, 32, 32), torch.randint(0, 1000, (batch,))), {}


def vit_base(batch: int = 64) -> Built:
    """ViT-B/16 in its widths, of two layers."""
    model = Vit(768, 2, 12, 16, 224)
    return model, (torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))), {}


class Perceptron(nn.Module):
    """Linear layers of one width, alike."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def perceptron(batch: int = 16) -> Built:
    return Perceptron(64, 6), (torch.randn(batch, 64),), {}


def wide_perceptron(batch: int = 4096) -> Built:
    return Perceptron(8192, 4), (torch.randn(batch, 8192),), {}
