"""Models whose way of training is unusual: two losses, frozen parts, flows, solvers, weights made by networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.frontend.various.registry import ROWS, Built, named
from torch import Tensor, nn


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


@named
def gan() -> Built:
    return Gan(), (torch.randn(ROWS, 16), torch.randn(ROWS, 8)), {}


class Lora(nn.Module):
    """A frozen linear layer and a trained low-rank correction."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x @ self.a.T) @ self.b.T * 2.0


@named
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


@named
def multi_task() -> Built:
    values = torch.randn(ROWS)
    values[1] = float("nan")
    return MultiTask(), (torch.randn(ROWS, 10), torch.randint(0, 4, (ROWS,)), values), {}


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


@named
def normalising_flow() -> Built:
    return Flow(), (torch.randn(ROWS, 6),), {}


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


@named
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


@named
def hypernetwork() -> Built:
    return Hypernetwork(), (torch.randn(ROWS, 6), torch.randn(ROWS, 7, 5)), {}


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 9)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, mean, log_deviation = self.head(torch.tanh(self.body(x))).chunk(3, -1)
        scaled = (y[:, None] - mean) * torch.exp(-log_deviation)
        return -torch.logsumexp(share.log_softmax(-1) - log_deviation - 0.5 * scaled**2, -1).mean()


@named
def mixture_density() -> Built:
    return MixtureDensity(), (torch.randn(ROWS, 4), torch.randn(ROWS)), {}


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


@named
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


@named
def self_distilled() -> Built:
    return SelfDistilled(), (torch.randn(ROWS, 8), torch.randn(ROWS, 8)), {}


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


@named
def guarded() -> Built:
    return Guarded(), (torch.randn(ROWS, 8), torch.rand(ROWS, 8) > 0.6), {}


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


@named
def fake_quantised() -> Built:
    return FakeQuantised(), (torch.randn(ROWS, 8),), {}
