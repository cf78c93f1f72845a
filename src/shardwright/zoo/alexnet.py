"""AlexNet as one tower: five convolutions and three large linear layers (Krizhevsky et al., 2012).

The sizes are those of PaSE's computation graph: 227 x 227 images, batch 128, and 1024 classes, a number that cuts
evenly. The linear layers hold 94 % of the parameters and the convolutions 92 % of the arithmetic, which is why one
way to split does not fit all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AlexNet(nn.Module):
    def __init__(self, image: int, channels: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        wide, widest = channels * 8 // 3, channels * 4
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 11, stride=4),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(channels, wide, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(wide, widest, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(widest, widest, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(widest, wide, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        side = (image - 11) // 4 + 1
        for _ in range(3):
            side = (side - 3) // 2 + 1
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(wide * side * side, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), targets)


def build(
    *,
    batch: int,
    image: int,
    channels: int,
    hidden: int,
    classes: int,
    dropout: float,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = AlexNet(image, channels, hidden, classes, dropout)
    return model, (torch.randn(batch, 3, image, image), torch.randint(0, classes, (batch,))), {}
