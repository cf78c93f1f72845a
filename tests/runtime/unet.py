"""A small U-Net: what goes down is read again on the way up, so tensors pass stages by."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top, self.down, self.low = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 24, 3)
        self.up, self.merged = nn.ConvTranspose2d(24, 16, 3), nn.Conv2d(32, 12, 3, padding=1)
        self.higher, self.last = nn.ConvTranspose2d(12, 8, 3), nn.Conv2d(16, 1, 1)

    def forward(self, images: Tensor, wanted: Tensor) -> Tensor:
        top = self.top(images).relu()
        down = self.down(top).relu()
        up = self.up(self.low(down).relu()).relu()
        merged = self.merged(torch.cat([up, down], 1)).relu()
        higher = self.higher(merged).relu()
        return (self.last(torch.cat([higher, top], 1)) - wanted).square().mean()


def build(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    return UNet(), (torch.randn(batch, 3, 16, 16), torch.randn(batch, 1, 16, 16)), {}
