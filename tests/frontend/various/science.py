"""Models of physics, molecules, speech and clicks: complex weights, messages, recurrences of states, sparse tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.frontend.various.registry import ROWS, Built, named
from torch import Tensor, nn


class FourierLayer(nn.Module):
    """The lowest frequencies times complex weights, beside a pointwise layer (Li et al., 2021)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.pointwise = modes, nn.Conv2d(width, width, 1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        spectrum, m = torch.fft.rfft2(x), self.modes
        made = torch.zeros_like(spectrum)
        made[:, :, :m, :m] = torch.einsum("nixy,ioxy->noxy", spectrum[:, :, :m, :m], self.weights[0])
        made[:, :, -m:, :m] = torch.einsum("nixy,ioxy->noxy", spectrum[:, :, -m:, :m], self.weights[1])
        return F.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + self.pointwise(x))


class FourierOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(3, 4), nn.Linear(4, 1)
        self.layers = nn.Sequential(FourierLayer(4, 3), FourierLayer(4, 3))

    def forward(self, field: Tensor, target: Tensor) -> Tensor:
        places = torch.meshgrid(*[torch.linspace(0, 1, extent) for extent in field.shape[1:]], indexing="ij")
        x = torch.cat([field[..., None], torch.stack(places, -1).expand(len(field), -1, -1, -1)], -1)
        found = self.project(self.layers(self.lift(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))[..., 0]
        wrong = (found - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
        return wrong.mean()


@named
def fourier_operator() -> Built:
    return FourierOperator(), (torch.randn(ROWS, 8, 8), torch.randn(ROWS, 8, 8)), {}


class StateSpace(nn.Module):
    """A diagonal complex state space as one long convolution through a Fourier transform (Gu et al., 2022)."""

    def __init__(self, width: int = 6, states: int = 4) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.log(0.5 * torch.ones(width, states)))
        self.frequency = nn.Parameter(torch.pi * torch.arange(states).expand(width, states).clone())
        self.out = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat))
        self.step, self.skip = nn.Parameter(torch.linspace(-4, -2, width)), nn.Parameter(torch.ones(width))
        self.mix = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        length, step = x.shape[1], self.step.exp()
        rate = -self.decay.exp() + 1j * self.frequency
        powers = torch.exp((rate * step[:, None])[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", self.out * (torch.exp(rate * step[:, None]) - 1) / rate, powers).real
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length].transpose(1, 2) + self.skip * x
        return F.glu(self.mix(F.gelu(y)), -1)


@named
def state_space() -> Built:
    return nn.Sequential(StateSpace(), nn.LayerNorm(6), StateSpace()), (torch.randn(ROWS, 10, 6),), {}


class ConvolvedGraph(nn.Module):
    """Messages weighted by degrees (Kipf and Welling, 2017), then by attention over each node's edges (two hops)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.score = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(16, 1)

    def forward(self, nodes: Tensor, edges: Tensor, label: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(len(nodes), dtype=nodes.dtype).scatter_add(
            0, target, torch.ones_like(target, dtype=nodes.dtype)
        )
        weight = degree.clamp(min=1).rsqrt()
        x = self.first(nodes)
        messages = x[source] * (weight[source] * weight[target])[:, None]
        x = F.relu(torch.zeros_like(x).index_add(0, target, messages))
        score = F.leaky_relu(self.score(torch.cat([x[source], x[target]], 1)))[:, 0]
        largest = torch.full_like(degree, -1e9).scatter_reduce(0, target, score, "amax")
        share = (score - largest[target]).exp()
        total = torch.zeros_like(degree).index_add(0, target, share)
        x = self.second(x)
        x = torch.zeros_like(x).index_add(0, target, x[source] * (share / total[target])[:, None])
        return F.cross_entropy(x, label)


@named
def convolved_graph() -> Built:
    return ConvolvedGraph(), (torch.randn(12, 6), torch.randint(0, 12, (2, 30)), torch.randint(0, 3, (12,))), {}


class Equivariant(nn.Module):
    """Atoms that push each other along the lines between them (Satorras et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU())
        self.push, self.update = nn.Linear(8, 1, bias=False), nn.Linear(12, 4)

    def forward(self, kinds: Tensor, places: Tensor, moved: Tensor) -> Tensor:
        rows, atoms = kinds.shape[:2]
        apart = 1 - torch.eye(atoms)[None, :, :, None]
        for _ in range(2):
            between = places[:, :, None] - places[:, None]
            distance = between.pow(2).sum(-1, keepdim=True)
            pairs = [kinds[:, :, None].expand(rows, atoms, atoms, 4), kinds[:, None].expand(rows, atoms, atoms, 4)]
            message = self.message(torch.cat([*pairs, distance], -1)) * apart
            places = places + (between / (distance + 1) * self.push(message)).sum(2) / (atoms - 1)
            kinds = kinds + self.update(torch.cat([kinds, message.sum(2)], -1))
        return F.mse_loss(places, moved) + kinds.pow(2).mean()


@named
def equivariant() -> Built:
    return Equivariant(), (torch.randn(ROWS, 5, 4), torch.randn(ROWS, 5, 3), torch.randn(ROWS, 5, 3)), {}


class DeepOperator(nn.Module):
    """A branch reads a function at sensors, a trunk a place; their product is the answer there (Lu et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))
        self.trunk = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 8))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, sensors: Tensor, places: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(torch.einsum("nk,pk->np", self.branch(sensors), self.trunk(places)) + self.bias, target)


@named
def deep_operator() -> Built:
    return DeepOperator(), (torch.randn(ROWS, 10), torch.rand(7, 2), torch.randn(ROWS, 7)), {}


class Transducer(nn.Module):
    """Speech and the words so far, joined at every pair of places, and the sum over all ways through (Graves, 2012)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.words = nn.LSTM(6, 8, batch_first=True), nn.Embedding(9, 8)
        self.predictor, self.joint = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, sound: Tensor, words: Tensor) -> Tensor:
        heard, _ = self.encoder(sound)
        said, _ = self.predictor(self.words(F.pad(words, (1, 0))))
        scores = self.joint(torch.tanh(heard[:, :, None] + said[:, None])).log_softmax(-1)
        blank = scores[..., 0]
        emit = scores[:, :, :-1].gather(-1, words[:, None, :, None].expand(-1, scores.shape[1], -1, 1))[..., 0]
        column = F.pad(emit[:, 0].cumsum(1), (1, 0))  # all ways through the first frame
        for frame in range(1, scores.shape[1]):
            above = column + blank[:, frame - 1]
            following = [above[:, 0]]
            for word in range(1, above.shape[1]):
                following.append(torch.logaddexp(above[:, word], following[-1] + emit[:, frame, word - 1]))
            column = torch.stack(following, 1)
        return -(column[:, -1] + blank[:, -1, -1]).mean()


@named
def transducer() -> Built:
    return Transducer(), (torch.randn(ROWS, 5, 6), torch.randint(1, 9, (ROWS, 3))), {}


class Factorised(nn.Module):
    """Weighted bags of several lengths, given by offsets; pairs of fields as the square of a sum (Rendle, 2010)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors = nn.EmbeddingBag(200, 1, mode="sum"), nn.EmbeddingBag(200, 6, mode="sum")
        self.deep = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 1))

    def forward(self, kinds: Tensor, offsets: Tensor, weights: Tensor, clicked: Tensor) -> Tensor:
        total = self.factors(kinds, offsets, weights)
        squares = F.embedding_bag(kinds, self.factors.weight**2, offsets, mode="sum", per_sample_weights=weights**2)
        score = (
            self.linear(kinds, offsets, weights) + 0.5 * (total**2 - squares).sum(1, keepdim=True) + self.deep(total)
        )
        return F.binary_cross_entropy_with_logits(score[:, 0], clicked)


@named
def factorised() -> Built:
    offsets, weights = torch.tensor([0, 3, 4, 9]), torch.rand(12)
    return Factorised(), (torch.randint(0, 200, (12,)), offsets, weights, torch.randint(0, 2, (4,)).float()), {}


class Preconditioned(nn.Module):
    """A solver that is trained through: a learned symmetric matrix, its factor, a solution, the logarithm of its volume."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.noise = nn.Linear(3, 6), nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = torch.tanh(self.features(x))
        kernel = features @ features.transpose(1, 2) + self.noise.exp() * torch.eye(x.shape[1])
        factor = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y[..., None], factor)[..., 0]
        return (0.5 * (y * solved).sum(1) + factor.diagonal(dim1=1, dim2=2).log().sum(1)).mean()


@named
def gaussian_process() -> Built:
    return Preconditioned(), (torch.randn(ROWS, 5, 3), torch.randn(ROWS, 5)), {}
