"""InceptionV3: blocks of parallel convolution branches whose outputs are concatenated (Szegedy et al., 2016).

PaSE's largest convolutional model; its branches are what makes a breadth-first search over the graph run out of memory.
``width`` multiplies every number of channels. ``auxiliary`` adds the second classifier of the paper (off in PaSE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = int | tuple[int, int]
Channels = Callable[[int], int]


class Branches(nn.Module):
    """Run several branches on the same input and concatenate their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def conv(inputs: int, outputs: int, kernel: Size, stride: int = 1, padding: Size = 0) -> nn.Module:
    """A convolution without bias, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(outputs, eps=0.001),
        nn.ReLU(),
    )


def pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv(inputs, outputs, 1))


def block_a(c: Channels, inputs: int, pool: int) -> nn.Module:
    """35 x 35: 1x1, 5x5 and double 3x3."""
    return Branches(
        conv(inputs, c(64), 1),
        nn.Sequential(conv(inputs, c(48), 1), conv(c(48), c(64), 5, padding=2)),
        nn.Sequential(conv(inputs, c(64), 1), conv(c(64), c(96), 3, padding=1), conv(c(96), c(96), 3, padding=1)),
        pooled(inputs, c(pool)),
    )


def block_b(c: Channels, inputs: int) -> nn.Module:
    """From 35 x 35 to 17 x 17."""
    return Branches(
        conv(inputs, c(384), 3, stride=2),
        nn.Sequential(conv(inputs, c(64), 1), conv(c(64), c(96), 3, padding=1), conv(c(96), c(96), 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def block_c(c: Channels, inputs: int, inner: int) -> nn.Module:
    """17 x 17: 7x7 convolutions factored into 1x7 and 7x1."""
    n = c(inner)
    across, down = (1, 7), (7, 1)
    return Branches(
        conv(inputs, c(192), 1),
        nn.Sequential(conv(inputs, n, 1), conv(n, n, across, padding=(0, 3)), conv(n, c(192), down, padding=(3, 0))),
        nn.Sequential(
            conv(inputs, n, 1),
            conv(n, n, down, padding=(3, 0)),
            conv(n, n, across, padding=(0, 3)),
            conv(n, n, down, padding=(3, 0)),
            conv(n, c(192), across, padding=(0, 3)),
        ),
        pooled(inputs, c(192)),
    )


def block_d(c: Channels, inputs: int) -> nn.Module:
    """From 17 x 17 to 8 x 8."""
    n = c(192)
    return Branches(
        nn.Sequential(conv(inputs, n, 1), conv(n, c(320), 3, stride=2)),
        nn.Sequential(
            conv(inputs, n, 1),
            conv(n, n, (1, 7), padding=(0, 3)),
            conv(n, n, (7, 1), padding=(3, 0)),
            conv(n, n, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def block_e(c: Channels, inputs: int) -> nn.Module:
    """8 x 8: branches that branch again."""
    n = c(384)

    def fan() -> nn.Module:
        return Branches(conv(n, n, (1, 3), padding=(0, 1)), conv(n, n, (3, 1), padding=(1, 0)))

    return Branches(
        conv(inputs, c(320), 1),
        nn.Sequential(conv(inputs, n, 1), fan()),
        nn.Sequential(conv(inputs, c(448), 1), conv(c(448), n, 3, padding=1), fan()),
        pooled(inputs, c(192)),
    )


class InceptionV3(nn.Module):
    def __init__(self, width: float, classes: int, dropout: float, auxiliary: bool) -> None:
        super().__init__()

        def c(channels: int) -> int:
            return max(1, round(channels * width))

        def joined(*channels: int) -> int:
            return sum(c(n) for n in channels)

        a1, a2 = joined(64, 64, 96, 32), joined(64, 64, 96, 64)
        b = c(384) + c(96) + a2
        mid = 4 * c(192)
        d = c(320) + c(192) + mid
        e = c(320) + 4 * c(384) + c(192)
        self.stem = nn.Sequential(
            conv(3, c(32), 3, stride=2),
            conv(c(32), c(32), 3),
            conv(c(32), c(64), 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            conv(c(64), c(80), 1),
            conv(c(80), c(192), 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.middle = nn.Sequential(
            block_a(c, c(192), 32),
            block_a(c, a1, 64),
            block_a(c, a2, 64),
            block_b(c, a2),
            block_c(c, b, 128),
            block_c(c, mid, 160),
            block_c(c, mid, 160),
            block_c(c, mid, 192),
        )
        self.auxiliary = None
        if auxiliary:
            self.auxiliary = nn.Sequential(
                nn.AvgPool2d(5, stride=3),
                conv(mid, c(128), 1),
                conv(c(128), c(768), 5),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(c(768), classes),
            )
        self.top = nn.Sequential(block_d(c, mid), block_e(c, d), block_e(c, e))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(e, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        middle = self.middle(self.stem(images))
        features = self.top(middle).mean(dim=(2, 3))
        loss = F.cross_entropy(self.classifier(self.dropout(features)), targets)
        if self.auxiliary is not None:
            loss = loss + 0.3 * F.cross_entropy(self.auxiliary(middle), targets)
        return loss


def build(
    *,
    batch: int,
    image: int,
    width: float,
    classes: int,
    auxiliary: bool,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = InceptionV3(width, classes, dropout, auxiliary)
    return model, (torch.randn(batch, 3, image, image), torch.randint(0, classes, (batch,))), {}
