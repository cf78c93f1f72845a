"""Complex parameters: gradients and updates are those of one process however they are cut, the last dim unevenly too."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from lowering.strategies import mesh_with
from runtime.workers import captured, device_mesh
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole
from shardwright.verification.forced import forced_strategies
from shardwright.verification.judging import dtype_of
from shardwright.verification.prepare import widened


class Fourier(nn.Module):
    """A layer that weights the lowest modes of its signal, as Fourier neural operators do."""

    def __init__(self, channels: int = 4, modes: int = 5) -> None:
        super().__init__()
        self.modes = modes
        self.into, self.out = nn.Conv1d(2, channels, 1), nn.Conv1d(channels, 1, 1)
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex64) * 0.1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        spectrum = torch.fft.rfft(x)
        mixed = torch.einsum("bcm,com->bom", spectrum[..., : self.modes], self.weight)
        kept = torch.zeros_like(spectrum)
        kept[..., : self.modes] = mixed
        kept[..., 0] = mixed[..., 0].conj()
        return F.mse_loss(self.out(F.gelu(x + torch.fft.irfft(kept, n=x.shape[-1]))), target)


def trained(rank: int) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    model, args, _ = widened(Fourier(), (torch.randn(4, 2, 16), torch.randn(4, 1, 16)), {})
    assert model.weight.dtype == torch.complex128 and dtype_of(model) == torch.float64
    graph = captured(model, args)
    cuts = []
    for title, strategy in forced_strategies(graph, mesh_with((2,))):
        reference = copy.deepcopy(model)
        parallel = parallelize(copy.deepcopy(model), strategy, mesh=device_mesh((2,)), graph=graph, keep=True)
        both = (reference, parallel)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in both]
        for _ in range(3):
            for one, optimizer in zip(both, optimizers, strict=True):
                optimizer.zero_grad()
                one(*args).backward()
                optimizer.step()
            gradient = whole(parallel.weight.grad)
            torch.testing.assert_close(gradient, reference.weight.grad, rtol=1e-9, atol=1e-12, msg=title)
            torch.testing.assert_close(whole(parallel.weight.detach()), reference.weight.detach(), msg=title)
        placement = parallel.weight.placements[0]
        cuts.append(placement.dim if isinstance(placement, Shard) else -1)
    return cuts


def test_gradients_and_updates_are_those_of_one_process(pair):
    for cuts in pair.run(trained):
        assert {-1, 0, 2} <= set(cuts)
