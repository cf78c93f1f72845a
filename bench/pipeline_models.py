"""Models that neither the zoo nor Hugging Face has: U-Nets, a small one and one for diffusion, and two contrasted towers.

Each function builds a model and its batch; ``bench/pipeline_models.py:unet`` names one wherever a model is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Convolutions(nn.Sequential):
    """Two convolutions with group norms, whose statistics are those of one image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for wide in (inputs, outputs):
            layers += [nn.Conv2d(wide, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down, across and up again (Ronneberger et al., 2015), with a skip at every resolution; trained to remove noise."""

    def __init__(self, widths: tuple[int, ...] = (4, 6, 8)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.middle = Convolutions(widths[-1], widths[-1])
        self.wider = nn.ModuleList(nn.ConvTranspose2d(w, w, 2, stride=2) for w in reversed(widths))
        self.up = nn.ModuleList(
            Convolutions(2 * w, after)
            for w, after in zip(reversed(widths), (*reversed(widths[:-1]), widths[0]), strict=True)
        )
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x, skips = images + noise, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for wider, up, skip in zip(self.wider, self.up, reversed(skips), strict=True):
            x = up(torch.cat([wider(x), skip], 1))
        return functional.mse_loss(self.out(x), noise)


def unet(batch: int = 8) -> Built:
    return UNet(), (torch.randn(batch, 3, 16, 16), torch.randn(batch, 3, 16, 16)), {}


class Residual(nn.Module):
    """Norm, activation, convolution, twice, beside a shortcut: the block of Ho et al. (2020)."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide in (inputs, outputs):
            layers += [nn.GroupNorm(groups, wide), nn.SiLU(), nn.Conv2d(wide, outputs, 3, padding=1)]
        self.inner = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.inner(x)


class Diffusion(nn.Module):
    """A U-Net over four latent channels at four resolutions, two blocks at each on either side."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        widths = [width * times for times in (1, 2, 4, 4)]
        before = [width, *widths[:-1]]

        def pair(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(Residual(inputs, outputs, groups), Residual(outputs, outputs, groups))

        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down = nn.ModuleList(pair(a, b) for a, b in zip(before, widths, strict=True))
        self.smaller = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = pair(widths[-1], widths[-1])
        below = [*widths[1:], widths[-1]]
        self.up = nn.ModuleList(pair(a + b, b) for a, b in zip(reversed(below), reversed(widths), strict=True))

    def forward(self, noisy: Tensor, noise: Tensor) -> Tensor:
        x, skips = self.first(noisy), []
        for number, down in enumerate(self.down):
            x = down(x if number == 0 else self.smaller[number - 1](x))
            skips.append(x)
        x = self.middle(x)
        for number, up in enumerate(self.up):
            x = x if number == 0 else functional.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, skips.pop()], 1))
        return functional.mse_loss(self.last(x), noise)


def diffusion(batch: int = 16) -> Built:
    latents = torch.randn(batch, 4, 64, 64)
    return Diffusion(128, 32), (latents, torch.randn_like(latents)), {}


def small_diffusion(batch: int = 2) -> Built:
    latents = torch.randn(batch, 4, 16, 16)
    return Diffusion(8, 4), (latents, torch.randn_like(latents)), {}


class TwoTowers(nn.Module):
    """Pictures and words, each through a tower of its own; the loss contrasts every row with all others of the batch
    (CLIP: Radford et al., 2021)."""

    def __init__(self, width: int = 16, vocabulary: int = 41) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.seen = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.words = nn.Embedding(vocabulary, width)
        self.read = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        pictures = self.seen(self.patches(images).flatten(2).transpose(1, 2)).mean(1)
        texts = self.read(self.words(tokens)).mean(1)
        pictures, texts = (functional.normalize(x, dim=-1) for x in (pictures, texts))
        logits = self.scale.exp() * pictures @ texts.T
        own = torch.arange(len(logits), device=logits.device)
        loss = (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2
        return {"loss": loss, "pictures": pictures, "texts": texts}


def two_towers(batch: int = 8) -> Built:
    return TwoTowers(), (torch.randn(batch, 3, 8, 8), torch.randint(0, 41, (batch, 6))), {}
