"""Models of images: convolutions, patches, detection, rendering."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.frontend.various.registry import ROWS, Built, named
from torch import Tensor, nn


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 8, 2, 2), nn.ConvTranspose2d(16, 4, 2, 2)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        skips, x = [], image
        for layer in self.down:
            x = F.max_pool2d(F.relu(layer(x)), 2)
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = F.relu(layer(torch.cat([x, skips.pop()], 1)))
        return F.cross_entropy(self.head(x), mask)


@named
def unet() -> Built:
    return UNet(), (torch.randn(ROWS, 3, 16, 16), torch.randint(0, 2, (ROWS, 16, 16))), {}


class DiT(nn.Module):
    """A diffusion transformer: patches, a time embedding that scales and shifts every norm, noise predicted."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.out = nn.Linear(width, 48)

    def forward(self, image: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(8, device=image.device, dtype=image.dtype) / 8)
        angles = step[:, None] * rates
        signal = torch.cos(step * math.pi / 2)[:, None, None, None]
        noisy = signal * image + (1 - signal**2).clamp(min=0).sqrt() * noise
        shift, scale, gate, shift2, scale2, gate2 = (
            self.time(torch.cat([angles.sin(), angles.cos()], 1)).unsqueeze(1).chunk(6, -1)
        )
        x = self.patch(noisy).flatten(2).transpose(1, 2)
        h = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(h, h, h, need_weights=False)[0]
        x = x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)
        found = self.out(x).view(len(x), 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(image.shape)
        return F.mse_loss(found, noise)


@named
def dit() -> Built:
    return DiT(), (torch.randn(ROWS, 3, 16, 16), torch.randn(ROWS, 3, 16, 16), torch.rand(ROWS)), {}


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16))
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(image).chunk(2, 1)
        found = self.decode(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(found, image.sigmoid()) + 0.1 * divergence


@named
def vae() -> Built:
    return Vae(), (torch.randn(ROWS, 1, 8, 8), torch.randn(ROWS, 8)), {}


class VqVae(nn.Module):
    """Nearest codes, a straight-through gradient, and a codebook loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = nn.Linear(12, 8), nn.Linear(8, 12), nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z.flatten(0, 1), self.codes.weight).argmin(-1).view(z.shape[:-1])
        q = self.codes(nearest)
        codebook = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return F.mse_loss(self.decode(z + (q - z).detach()), x) + codebook


@named
def vq_vae() -> Built:
    return VqVae(), (torch.randn(ROWS, 6, 12),), {}


class Detector(nn.Module):
    """Dense prediction of boxes and objects: a grid of cells, focal loss, overlap of boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU()
        )
        self.lateral, self.head = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, image: Tensor, present: Tensor, boxes: Tensor) -> Tensor:
        features = F.interpolate(self.lateral(self.body(image)), scale_factor=2, mode="nearest")
        found = self.head(features).permute(0, 2, 3, 1)
        score, box = found[..., 0], F.softplus(found[..., 1:])
        cross = F.binary_cross_entropy_with_logits(score, present, reduction="none")
        focal = ((1 - torch.exp(-cross)) ** 2 * cross).mean()
        smaller, larger = torch.minimum(box, boxes), torch.maximum(box, boxes)
        overlap = (smaller[..., :2] + smaller[..., 2:]).prod(-1) / (larger[..., :2] + larger[..., 2:]).prod(-1)
        return focal + ((1 - overlap) * present).sum() / present.sum().clamp(min=1)


@named
def detector() -> Built:
    present = (torch.rand(ROWS, 8, 8) > 0.7).float()
    return Detector(), (torch.randn(ROWS, 3, 16, 16), present, torch.rand(ROWS, 8, 8, 4) + 0.1), {}


class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).mT
        x = x + self.tokens(self.norm(x).mT).mT
        x = x + self.channels(self.norm(x))
        return F.cross_entropy(self.head(x.mean(1)), labels, label_smoothing=0.1)


@named
def mlp_mixer() -> Built:
    return MlpMixer(), (torch.randn(ROWS, 3, 16, 16), torch.randint(0, 5, (ROWS,))), {}


class Capsules(nn.Module):
    """Routing by agreement: three rounds, the coefficients without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 4, 5) * 0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        votes = torch.einsum("bni,ncio->bnco", x, self.weight)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(3):
            s = (logits.softmax(2)[..., None] * votes).sum(1)
            v = s * (s.norm(dim=-1, keepdim=True) / (1 + s.pow(2).sum(-1, keepdim=True)))
            logits = logits + (votes.detach() * v.detach()[:, None]).sum(-1)
        return F.multi_margin_loss(v.norm(dim=-1), labels)


@named
def capsules() -> Built:
    return Capsules(), (torch.randn(ROWS, 6, 4), torch.randint(0, 3, (ROWS,))), {}


class SpectralResNet(nn.Module):
    """Residual blocks with squeeze-and-excitation, weight and spectral normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(image)
        h = self.block(x)
        x = x + h * self.squeeze(h).sigmoid()
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


@named
def residual_network() -> Built:
    return SpectralResNet(), (torch.randn(ROWS, 3, 8, 8), torch.randint(0, 4, (ROWS,))), {}


class Nerf(nn.Module):
    """Rays sampled at given depths, positions encoded, densities composed to a colour."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(27, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, origin: Tensor, direction: Tensor, colour: Tensor) -> Tensor:
        depth = torch.linspace(0.5, 2.0, 8, dtype=origin.dtype)
        points = origin[:, None] + direction[:, None] * depth[:, None]
        waves = [f(points * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos)]
        found = self.net(torch.cat([points, *waves], -1))
        opacity = 1 - torch.exp(-F.relu(found[..., 3]) * 0.2)
        through = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], 1), 1)[:, :-1]
        return F.mse_loss(((opacity * through)[..., None] * torch.sigmoid(found[..., :3])).sum(1), colour)


@named
def nerf() -> Built:
    return Nerf(), (torch.randn(8, 3), F.normalize(torch.randn(8, 3), dim=1), torch.rand(8, 3)), {}
