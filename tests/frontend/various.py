"""Models that people train and that are not Hugging Face's, each in a few lines: a test of "any model", not of accuracy.

``build(name)`` gives ``(model, args, kwargs)``; what a model returns is its loss, or outputs to make one of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Built]] = {}
ROWS = 4


def build(name: str) -> Built:
    """The model of that name with its inputs, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def _named(make: Callable[[], Built]) -> Callable[[], Built]:
    MODELS[make.__name__] = make
    return make


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


@_named
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


@_named
def dit() -> Built:
    return DiT(), (torch.randn(ROWS, 3, 16, 16), torch.randn(ROWS, 3, 16, 16), torch.rand(ROWS)), {}


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their ends with ``index_add`` and ``scatter_reduce``."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(24, 16), nn.GRUCell(32, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        for _ in range(2):
            message = F.relu(self.message(torch.cat([nodes[source], nodes[target], features], 1)))
            total = torch.zeros(len(nodes), 16, dtype=nodes.dtype).index_add(0, target, message)
            index = target[:, None].expand_as(message)
            largest = torch.zeros_like(total).scatter_reduce(0, index, message, "amax", include_self=True)
            nodes = self.update(torch.cat([total, largest], 1), nodes)
        return F.cross_entropy(self.head(nodes), labels)


@_named
def graph_network() -> Built:
    edges = torch.randint(0, 12, (2, 40))
    return GraphNetwork(), (torch.randn(12, 8), edges, torch.randn(40, 8), torch.randint(0, 3, (12,))), {}


class GraphAttention(nn.Module):
    """Attention over a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.left, self.right = nn.Linear(8, 16, bias=False), nn.Linear(16, 1), nn.Linear(16, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, adjacency: Tensor, labels: Tensor) -> Tensor:
        h = self.project(nodes)
        scores = F.leaky_relu(self.left(h) + self.right(h).transpose(-1, -2), 0.2)
        weights = scores.masked_fill(~adjacency, float("-inf")).softmax(-1)
        return F.cross_entropy(self.head(F.elu(weights @ h)).flatten(0, 1), labels.flatten())


@_named
def graph_attention() -> Built:
    adjacency = (torch.rand(ROWS, 10, 10) > 0.5) | torch.eye(10, dtype=torch.bool)
    return GraphAttention(), (torch.randn(ROWS, 10, 8), adjacency, torch.randint(0, 3, (ROWS, 10))), {}


class Gan(nn.Module):
    """Both losses of one step, each with the other network's part detached or frozen as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        critic = F.binary_cross_entropy_with_logits(self.critic(real), ones.to(real))
        critic = critic + F.binary_cross_entropy_with_logits(self.critic(fake.detach()), zeros.to(real))
        generator = F.binary_cross_entropy_with_logits(self.critic(fake), ones.to(real))
        return {"loss": critic + generator, "critic": critic, "generator": generator}


@_named
def gan() -> Built:
    return Gan(), (torch.randn(ROWS, 16), torch.randn(ROWS, 8)), {}


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


@_named
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


@_named
def vq_vae() -> Built:
    return VqVae(), (torch.randn(ROWS, 6, 12),), {}


class Seq2Seq(nn.Module):
    """LSTMs with additive attention, teacher forced."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(30, 16), nn.Embedding(30, 16)
        self.encoder, self.cell = nn.LSTM(16, 16, batch_first=True, bidirectional=True), nn.LSTMCell(48, 16)
        self.query, self.score, self.head = nn.Linear(16, 32), nn.Linear(32, 1), nn.Linear(16, 30)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, (hidden, state) = self.encoder(self.source(source))
        h, c, logits = hidden.mean(0), state.mean(0), []
        for word in target[:, :-1].unbind(1):
            weights = self.score(torch.tanh(memory + self.query(h)[:, None])).softmax(1)
            h, c = self.cell(torch.cat([self.target(word), (weights * memory).sum(1)], 1), (h, c))
            logits.append(self.head(h))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), target[:, 1:].flatten())


@_named
def seq2seq_lstm() -> Built:
    return Seq2Seq(), (torch.randint(0, 30, (ROWS, 6)), torch.randint(0, 30, (ROWS, 5))), {}


class SelectiveScan(nn.Module):
    """A state-space layer whose step, input and output matrices depend on the input, scanned in order."""

    def __init__(self, width: int = 12, states: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2 * width)
        self.convolve = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.select, self.step = nn.Linear(width, 2 * states + 1), nn.Linear(1, width)
        self.decay = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(width, 1))
        self.skip, self.out = nn.Parameter(torch.ones(width)), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.inner(x).chunk(2, -1)
        h = F.silu(self.convolve(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, into, out = self.select(h).split([1, 4, 4], -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * self.decay.exp())
        drive = step[..., None] * into[:, :, None] * h[..., None]
        state, found = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            found.append((state * out[:, t, None]).sum(-1))
        y = torch.stack(found, 1) + self.skip * h
        return F.mse_loss(self.out(y * F.silu(gate)), x)


@_named
def selective_scan() -> Built:
    return SelectiveScan(), (torch.randn(ROWS, 6, 8),), {}


class FourierMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.filter, self.head = nn.Parameter(torch.randn(5, 16, 2) * 0.1), nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + torch.fft.fft2(self.norm(x)).real
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        x = torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")
        return F.cross_entropy(self.head((x + self.mlp(x)).mean(1)), labels)


@_named
def fourier_mixer() -> Built:
    return FourierMixer(), (torch.randn(ROWS, 8, 16), torch.randint(0, 3, (ROWS,))), {}


class Lora(nn.Module):
    """A frozen linear layer and a trained low-rank correction."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x @ self.a.T) @ self.b.T * 2.0


@_named
def lora() -> Built:
    model = nn.Sequential(Lora(nn.Linear(12, 24)), nn.GELU(), Lora(nn.Linear(24, 12)))
    return model, (torch.randn(ROWS, 12),), {}


class MultiTask(nn.Module):
    """A shared trunk, a classifier, a regressor with missing targets, and learned weights of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.value = nn.Linear(10, 16), nn.Linear(16, 4), nn.Linear(16, 1)
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, labels: Tensor, values: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.trunk(x))
        known = ~values.isnan()
        error = torch.where(known, self.value(h).squeeze(1) - values.nan_to_num(), 0.0)
        losses = torch.stack([F.cross_entropy(self.classes(h), labels), (error**2).sum() / known.sum().clamp(min=1)])
        return {"loss": (losses * torch.exp(-self.weights) + self.weights).sum(), "losses": losses.detach()}


@_named
def multi_task() -> Built:
    values = torch.randn(ROWS)
    values[1] = float("nan")
    return MultiTask(), (torch.randn(ROWS, 10), torch.randint(0, 4, (ROWS,)), values), {}


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


@_named
def detector() -> Built:
    present = (torch.rand(ROWS, 8, 8) > 0.7).float()
    return Detector(), (torch.randn(ROWS, 3, 16, 16), present, torch.rand(ROWS, 8, 8, 4) + 0.1), {}


class Flow(nn.Module):
    """Affine couplings with permutations, and the log-determinant they add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(3))
        self.register_buffer("order", torch.randperm(6))

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x), dtype=x.dtype)
        for net in self.nets:
            still, moved = x.chunk(2, 1)
            scale, shift = net(still).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([still, moved * scale.exp() + shift], 1)[:, self.order]
            volume = volume + scale.sum(1)
        return -(torch.distributions.Normal(0.0, 1.0, validate_args=False).log_prob(x).sum(1) + volume).mean()


@_named
def normalising_flow() -> Built:
    return Flow(), (torch.randn(ROWS, 6),), {}


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


@_named
def nerf() -> Built:
    return Nerf(), (torch.randn(8, 3), F.normalize(torch.randn(8, 3), dim=1), torch.rand(8, 3)), {}


class Recommender(nn.Module):
    """Large embedding tables (one summed over bags), dense features, pairwise products: DLRM's form."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 8) for rows in (1000, 500, 37))
        self.history = nn.EmbeddingBag(1000, 8, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, kinds: Tensor, history: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, self.history(history), *(table(kinds[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        i, j = torch.triu_indices(5, 5, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, i, j]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1), clicked)


@_named
def recommender() -> Built:
    kinds = torch.stack([torch.randint(0, n, (ROWS,)) for n in (1000, 500, 37)], 1)
    clicked = torch.randint(0, 2, (ROWS,)).float()
    return Recommender(), (torch.randn(ROWS, 5), kinds, torch.randint(0, 1000, (ROWS, 6)), clicked), {}


class Conformer(nn.Module):
    """Half-step feed-forwards around attention and a gated depthwise convolution, and CTC."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(20, width, 3, 2, 1)
        self.first, self.last = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width)) for _ in range(2)
        )
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.open, self.depth = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.close, self.batch_norm = nn.Conv1d(width, width, 1), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11)

    def forward(self, sound: Tensor, words: Tensor) -> Tensor:
        x = self.subsample(sound.transpose(1, 2)).transpose(1, 2)
        x = x + 0.5 * self.first(x)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = self.depth(F.glu(self.open(x.transpose(1, 2)), 1))
        x = x + self.close(F.silu(self.batch_norm(h))).transpose(1, 2)
        logits = self.head(x + 0.5 * self.last(x)).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(sound),), logits.shape[0]), torch.full((len(sound),), words.shape[1])
        return F.ctc_loss(logits, words, *lengths)


@_named
def conformer() -> Built:
    return Conformer(), (torch.randn(ROWS, 24, 20), torch.randint(1, 11, (ROWS, 4))), {}


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


@_named
def mlp_mixer() -> Built:
    return MlpMixer(), (torch.randn(ROWS, 3, 16, 16), torch.randint(0, 5, (ROWS,))), {}


class Contrastive(nn.Module):
    """Two towers and a temperature; every row is compared with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.EmbeddingBag(40, 8, mode="mean")
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        one, other = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = one @ other.T * self.temperature.exp()
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@_named
def contrastive() -> Built:
    return Contrastive(), (torch.randn(ROWS, 12), torch.randint(0, 40, (ROWS, 5))), {}


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.mix, self.head = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3)), nn.Conv1d(8, 16, 1)

    def forward(self, sound: Tensor) -> Tensor:
        x, skip = self.embed(sound).mT, 0.0
        for index, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            value, gate = layer(F.pad(x, (2**index, 0))).chunk(2, 1)
            h = mix(torch.tanh(value) * torch.sigmoid(gate))
            x, skip = x + h, skip + h
        return F.cross_entropy(self.head(F.relu(skip))[..., :-1], sound[:, 1:])


@_named
def wavenet() -> Built:
    return WaveNet(), (torch.randint(0, 16, (ROWS, 12)),), {}


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


@_named
def capsules() -> Built:
    return Capsules(), (torch.randn(ROWS, 6, 4), torch.randint(0, 3, (ROWS,))), {}


class NeuralOde(nn.Module):
    """A vector field integrated with four stages of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    def slope(self, time: float, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, x.new_full((len(x), 1), time)], 1))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        size = 0.25
        for step in range(4):
            time = step * size
            k1 = self.slope(time, x)
            k2 = self.slope(time + size / 2, x + size / 2 * k1)
            k3 = self.slope(time + size / 2, x + size / 2 * k2)
            x = x + size / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(time + size, x + size * k3))
        return F.smooth_l1_loss(x, target)


@_named
def neural_ode() -> Built:
    return NeuralOde(), (torch.randn(ROWS, 4), torch.randn(ROWS, 4)), {}


class Hypernetwork(nn.Module):
    """One network makes the weights of another, a set for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(6, 5 * 4 + 4)

    def forward(self, task: Tensor, x: Tensor) -> Tensor:
        made = self.make(task)
        weight, bias = made[:, :20].view(-1, 5, 4), made[:, 20:]
        return torch.func.vmap(lambda w, b, row: torch.tanh(row @ w + b))(weight, bias, x)


@_named
def hypernetwork() -> Built:
    return Hypernetwork(), (torch.randn(ROWS, 6), torch.randn(ROWS, 7, 5)), {}


class PointNet(nn.Module):
    """Points transformed by a predicted matrix, each by itself, then their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU())
        self.matrix, self.points, self.head = nn.Linear(8, 9), nn.Conv1d(3, 16, 1), nn.Linear(16, 4)

    def forward(self, cloud: Tensor, labels: Tensor) -> Tensor:
        matrix = self.matrix(self.align(cloud).amax(-1)).view(-1, 3, 3) + torch.eye(3, dtype=cloud.dtype)
        features = F.relu(self.points(matrix @ cloud)).amax(-1)
        regular = (matrix @ matrix.mT - torch.eye(3, dtype=cloud.dtype)).pow(2).sum((1, 2)).mean()
        return F.nll_loss(self.head(features).log_softmax(-1), labels) + 0.01 * regular


@_named
def point_net() -> Built:
    return PointNet(), (torch.randn(ROWS, 3, 12), torch.randint(0, 4, (ROWS,))), {}


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 9)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, mean, log_deviation = self.head(torch.tanh(self.body(x))).chunk(3, -1)
        scaled = (y[:, None] - mean) * torch.exp(-log_deviation)
        return -torch.logsumexp(share.log_softmax(-1) - log_deviation - 0.5 * scaled**2, -1).mean()


@_named
def mixture_density() -> Built:
    return MixtureDensity(), (torch.randn(ROWS, 4), torch.randn(ROWS)), {}


class Crf(nn.Module):
    """A tagger whose loss sums over all sequences of tags."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.emit = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)
        self.moves = nn.Parameter(torch.randn(5, 5) * 0.1)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        scores = self.emit(self.lstm(self.embed(words))[0])
        chosen = scores.gather(2, tags[..., None]).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        total = scores[:, 0]
        for t in range(1, words.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.moves, 1) + scores[:, t]
        return (torch.logsumexp(total, 1) - chosen).mean()


@_named
def crf_tagger() -> Built:
    return Crf(), (torch.randint(0, 20, (ROWS, 6)), torch.randint(0, 5, (ROWS, 6))), {}


class Spiking(nn.Module):
    """Leaky neurons that fire, with a made-up gradient in place of the step's."""

    class Fire(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, potential: Tensor, slope: float) -> Tensor:
            ctx.save_for_backward(potential)
            ctx.slope = slope
            return (potential > 0).to(potential.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (potential,) = ctx.saved_tensors
            return grad / (1 + ctx.slope * potential.abs()) ** 2, None

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        potential, total = torch.zeros(len(x), 12, dtype=x.dtype), 0.0
        for now in x.unbind(1):
            potential = 0.9 * potential + self.into(now)
            spikes = self.Fire.apply(potential - 0.5, 5.0)
            potential = potential - spikes * 0.5
            total = total + self.head(spikes)
        return F.cross_entropy(total, labels)


@_named
def spiking() -> Built:
    return Spiking(), (torch.randn(ROWS, 5, 6), torch.randint(0, 3, (ROWS,))), {}


class LinearAttention(nn.Module):
    """Attention without a softmax: cumulative sums of keys times values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)) for t in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        found = torch.einsum("bthd,bthde->bthe", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        return F.mse_loss(self.out(found.flatten(2)), x)


@_named
def linear_attention() -> Built:
    return LinearAttention(), (torch.randn(ROWS, 6, 16),), {}


class Splines(nn.Module):
    """A layer of learned one-dimensional functions, each a sum of bumps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 7))
        self.weight = nn.ParameterList([torch.randn(6, 5, 7) * 0.1, torch.randn(5, 3, 7) * 0.1])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weight:
            bumps = torch.exp(-((x[..., None] - self.centres) ** 2))
            x = torch.einsum("bik,iok->bo", bumps, weight) + F.silu(x).sum(-1, keepdim=True)
        return x


@_named
def splines() -> Built:
    return Splines(), (torch.randn(ROWS, 6),), {}


class SelfDistilled(nn.Module):
    """A student, a teacher without gradients, and a running centre in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 6), nn.Linear(8, 6).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            aim = ((self.teacher(other) - self.centre) / 0.4).softmax(-1)
            self.centre.mul_(0.9).add_(self.teacher(other).mean(0), alpha=0.1)
        return -(aim * (self.student(one) / 0.5).log_softmax(-1)).sum(-1).mean()


@_named
def self_distilled() -> Built:
    return SelfDistilled(), (torch.randn(ROWS, 8), torch.randn(ROWS, 8)), {}


class Router(nn.Module):
    """A mixture of experts that picks out each expert's rows: how many there are is known only from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(1)
            found = found.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return found


@_named
def router() -> Built:
    return Router(), (torch.randn(10, 8),), {}


class Guarded(nn.Module):
    """Decisions on data: numbers that are not finite are replaced, an empty mask is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if not torch.isfinite(x).all():
            x = torch.nan_to_num(x)
        if mask.any():
            x = x.masked_fill(mask, 0.0)
        return self.second(x) / max(1, int(mask.sum()))


@_named
def guarded() -> Built:
    return Guarded(), (torch.randn(ROWS, 8), torch.rand(ROWS, 8) > 0.6), {}


class Relative(nn.Module):
    """Attention with a mask made by ``vmap`` from a function of positions, as mask libraries do it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.slope = nn.Linear(16, 48), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])

        def allowed(i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i - j < 4)

        mask = torch.vmap(torch.vmap(allowed, (None, 0)), (0, None))(places, places)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        distance = (places[:, None] - places).to(x.dtype)
        bias = torch.where(mask, -self.slope * distance, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@_named
def relative_attention() -> Built:
    return Relative(), (torch.randn(ROWS, 6, 16),), {}


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


@_named
def residual_network() -> Built:
    return SpectralResNet(), (torch.randn(ROWS, 3, 8, 8), torch.randint(0, 4, (ROWS,))), {}


class FakeQuantised(nn.Module):
    """Weights rounded to eight bits in the forward pass, the gradient passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
            rounded = torch.round(layer.weight / scale).clamp(-128, 127) * scale
            x = F.relu(F.linear(x, layer.weight + (rounded - layer.weight).detach(), layer.bias))
        return x


@_named
def fake_quantised() -> Built:
    return FakeQuantised(), (torch.randn(ROWS, 8),), {}
