"""Backbones of images as libraries of them write them: mobile, windowed, grouped and dense convolutional networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.frontend.various.registry import ROWS, Built, named
from torch import Tensor, nn


def _picture(size: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, size, size), torch.randint(0, 5, (ROWS,))


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, weigh channels by what they hold on average, project (Tan and Le, 2019)."""

    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        inner = 2 * width
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), activation())
        self.filter = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), activation()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, 4, 1), activation(), nn.Conv2d(4, inner, 1), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.filter(self.expand(x))
        return x + self.project(inner * self.squeeze(inner))


class Classifier(nn.Module):
    """A stem, blocks, the mean over all places, and a class."""

    def __init__(self, stem: nn.Module, blocks: nn.Module, width: int) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, blocks, nn.Linear(width, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), label)


@named
def efficient_network() -> Built:
    blocks = nn.Sequential(InvertedResidual(8, nn.SiLU), InvertedResidual(8, nn.SiLU))
    return Classifier(nn.Conv2d(3, 8, 3, 2, 1), blocks, 8), _picture(), {}


@named
def mobile_network() -> Built:
    blocks = nn.Sequential(InvertedResidual(8, nn.Hardswish), InvertedResidual(8, nn.ReLU6))
    return Classifier(nn.Conv2d(3, 8, 3, 2, 1), blocks, 8), _picture(), {}


class ConvNextBlock(nn.Module):
    """Large filters per channel, a norm over channels in the last dim, a scale per channel (Liu et al., 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.filter(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(inner)))).permute(0, 3, 1, 2)


@named
def conv_next() -> Built:
    return Classifier(nn.Conv2d(3, 8, 4, 4), nn.Sequential(ConvNextBlock(8), ConvNextBlock(8)), 8), _picture(), {}


class GroupedBlock(nn.Module):
    """A bottleneck whose middle is cut into groups (Xie et al., 2017; Radosavovic et al., 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, groups=4, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x), inplace=True)


@named
def grouped_network() -> Built:
    return Classifier(nn.Conv2d(3, 16, 3, 2, 1), nn.Sequential(GroupedBlock(16), GroupedBlock(16)), 16), _picture(), {}


class Dense(nn.Module):
    """Every layer reads all before it (Huang et al., 2017)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width + 4 * i, 4, 3, padding=1) for i in range(layers))
        self.last = nn.Conv2d(width + 4 * layers, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(F.relu(layer(torch.cat(found, 1))))
        return F.avg_pool2d(self.last(torch.cat(found, 1)), 2)


@named
def dense_network() -> Built:
    return Classifier(nn.Conv2d(3, 8, 3, padding=1), Dense(8, 3), 8), _picture(8), {}


class WindowAttention(nn.Module):
    """Attention inside of windows, shifted by half of one, with a learned bias by relative place (Liu et al., 2021)."""

    def __init__(self, width: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, 2
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, self.heads) * 0.1)
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        between = (place[:, :, None] - place[:, None]) + window - 1
        self.register_buffer("relative", between[0] * (2 * window - 1) + between[1])

    def forward(self, x: Tensor) -> Tensor:
        rows, height, width, channels = x.shape
        inner, w = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)), self.window
        inner = inner.view(rows, height // w, w, width // w, w, channels).permute(0, 1, 3, 2, 4, 5)
        inner = inner.reshape(-1, w * w, channels)
        q, k, v = self.qkv(inner).view(len(inner), w * w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.relative.flatten()].view(w * w, w * w, self.heads).permute(2, 0, 1)
        inner = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        inner = self.out(inner.transpose(1, 2).reshape(len(inner), w * w, channels))
        inner = inner.view(rows, height // w, width // w, w, w, channels).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(inner.reshape(x.shape), (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.Sequential(WindowAttention(8, 4, 0), WindowAttention(8, 4, 2))
        self.merge, self.head = nn.Linear(32, 16, bias=False), nn.Linear(16, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, i::2, j::2] for j in range(2) for i in range(2)], -1)
        return F.cross_entropy(self.head(self.merge(x).mean((1, 2))), label)


@named
def swin() -> Built:
    return Swin(), _picture(), {}


class AttentionUNet(nn.Module):
    """Diffusion's form: a time step's embedding scales every block, attention at the lowest resolution, noise predicted."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4 * width))
        self.first, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm, self.attention = nn.GroupNorm(4, 2 * width), nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up, self.last = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        angles = step[:, None] * torch.exp(torch.arange(8) * -1.0)
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None].chunk(2, 1)
        kept = (-0.01 * step)[:, None, None, None].exp()
        first = self.first(kept * x + (1 - kept**2).sqrt() * noise)
        inner = self.norm(self.down(F.silu(first))) * (1 + scale) + shift
        flat = inner.flatten(2).transpose(1, 2)
        inner = inner + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(inner)
        inner = self.up(F.interpolate(inner, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(torch.cat([F.silu(inner), first], 1)), noise)


@named
def attention_unet() -> Built:
    step = torch.arange(1, ROWS + 1).float()
    return AttentionUNet(), (torch.randn(ROWS, 3, 8, 8), torch.randn(ROWS, 3, 8, 8), step), {}


class Perceiver(nn.Module):
    """A few learned vectors ask a long input, then each other (Jaegle et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.inputs = nn.Parameter(torch.randn(6, 16) * 0.1), nn.Linear(5, 16)
        self.ask = nn.MultiheadAttention(16, 2, batch_first=True)
        self.among = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        latents, inputs = self.latents.expand(len(x), -1, -1), self.inputs(x)
        for _ in range(2):  # the same weights twice
            latents = self.among(latents + self.ask(latents, inputs, inputs)[0])
        return F.cross_entropy(self.head(latents.mean(1)), label)


@named
def perceiver() -> Built:
    return Perceiver(), (torch.randn(ROWS, 20, 5), torch.randint(0, 5, (ROWS,))), {}
