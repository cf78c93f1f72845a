"""Models of sequences: recurrent, scanned, filtered, attending; speech, text and spikes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.frontend.various.registry import ROWS, Built, named
from torch import Tensor, nn


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


@named
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


@named
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


@named
def fourier_mixer() -> Built:
    return FourierMixer(), (torch.randn(ROWS, 8, 16), torch.randint(0, 3, (ROWS,))), {}


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


@named
def conformer() -> Built:
    return Conformer(), (torch.randn(ROWS, 24, 20), torch.randint(1, 11, (ROWS, 4))), {}


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


@named
def wavenet() -> Built:
    return WaveNet(), (torch.randint(0, 16, (ROWS, 12)),), {}


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


@named
def crf_tagger() -> Built:
    return Crf(), (torch.randint(0, 20, (ROWS, 6)), torch.randint(0, 5, (ROWS, 6))), {}


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


@named
def linear_attention() -> Built:
    return LinearAttention(), (torch.randn(ROWS, 6, 16),), {}


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


@named
def relative_attention() -> Built:
    return Relative(), (torch.randn(ROWS, 6, 16),), {}


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


@named
def spiking() -> Built:
    return Spiking(), (torch.randn(ROWS, 5, 6), torch.randint(0, 3, (ROWS,))), {}
