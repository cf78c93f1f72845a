"""Wide ResNet: the bottleneck ResNet-50/101/152 (He et al., 2016) with every convolution ``width`` times as wide.

Tofu's WResNet-L-W (after Zagoruyko and Komodakis, 2016): ``layers`` is L, ``width`` is W; W = 1 is the plain ResNet. At
W = 10 the weights, gradients and momentum of ResNet-152 take 65 GB, several accelerators of Tofu's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ModelError

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
EXPANSION = 4


class QuietNorm(nn.BatchNorm2d):
    """A batch norm that starts at zero, so that each block starts as its shortcut (Goyal et al., 2017)."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        self.reduce = nn.Conv2d(inputs, inner, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(inner)
        self.conv = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.conv_norm = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, outputs, 1, bias=False)
        self.expand_norm = QuietNorm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.reduce_norm(self.reduce(x)))
        inner = F.relu(self.conv_norm(self.conv(inner)))
        return F.relu(self.expand_norm(self.expand(inner)) + self.shortcut(x))


class WideResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...], channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages, inputs = [], channels
        for stage, depth in enumerate(blocks):
            inner = channels * 2**stage
            for block in range(depth):
                stages.append(Bottleneck(inputs, inner, stride=2 if stage > 0 and block == 0 else 1))
                inputs = inner * EXPANSION
        self.blocks = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return F.cross_entropy(self.classifier(features), targets)


def build(
    *, batch: int, image: int, layers: int, width: int, channels: int, classes: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if layers not in BLOCKS:
        raise ModelError(f"There is no ResNet of {layers} layers here.", "Use layers=50, 101 or 152.")
    model = WideResNet(BLOCKS[layers], channels * width, classes)
    return model, (torch.randn(batch, 3, image, image), torch.randint(0, classes, (batch,))), {}
