"""What parallelize gives passes for the model it was made from: attributes, methods, modules, copies."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lowering.strategies import mesh_with, random_strategy
from runtime.test_training import fsdp_like
from runtime.workers import device_mesh
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole


class Model(torch.nn.Module):
    """With a configuration, a method, a property, a list of blocks, and a module that is called as an attribute of ours."""

    kind = "decoder"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=16)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(2)
        )
        self.norm = torch.nn.BatchNorm1d(16)
        self.graph = torch.nn.Linear(16, 4)

    @property
    def width(self) -> int:
        return self.config.width

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.graph(self.norm(x)).square().mean()


@functools.lru_cache
def example():
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(8, 16, dtype=torch.float64)
    return model, x, capture(model, (x,))


def strategies(graph):
    mesh = mesh_with((4,))
    return fsdp_like(graph, mesh), *(random_strategy(graph, mesh, seed) for seed in range(3))


def looks_alike(rank: int) -> None:
    model, x, graph = example()
    parallel = parallelize(model, strategies(graph)[0], mesh=device_mesh((4,)), graph=graph, keep=True)
    assert parallel.config is model.config and parallel.width == 16 and parallel.kind == "decoder"
    assert parallel.count() == model.count()
    assert [name for name, _ in parallel.named_modules()] == [name for name, _ in model.named_modules()]
    assert len(parallel.blocks) == 2 and parallel.blocks[1][0].in_features == 16
    assert parallel.norm.eps == model.norm.eps
    with pytest.raises(AttributeError):
        parallel.nothing_of_the_kind  # noqa: B018
    with pytest.raises(RunError, match=r"blocks\.0\.1 does not run by itself"):
        parallel.blocks[0][1](x)
    with pytest.raises(RunError, match="cannot be pickled"):
        pickle.dumps(parallel)


def is_copied(rank: int) -> None:
    """A copy trains by itself, and an average of the weights is that of one process."""
    model, x, graph = example()
    for strategy in strategies(graph):
        ours, theirs = (
            parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph, keep=True),
            copy.deepcopy(model),
        )
        averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (ours, theirs)]
        plain = [AveragedModel(m) for m in (ours, theirs)]
        twin = copy.deepcopy(ours)
        for module, *followers in zip((ours, theirs), averages, plain, strict=True):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                module(x).backward()
                optimizer.step()
                for follower in followers:
                    follower.update_parameters(module)
        for mine, true in (
            (ours, theirs),
            (averages[0].module, averages[1].module),
            (plain[0].module, plain[1].module),
        ):
            for name, parameter in true.state_dict().items():
                torch.testing.assert_close(whole(mine.state_dict()[name]), parameter, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(averages[0](x).detach(), averages[1](x).detach(), rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(twin.get_parameter(name).detach()), parameter)
        twin(x).backward()


@pytest.mark.parametrize("what", [looks_alike, is_copied])
def test_passes_for_the_original(pool, what):
    pool.run(what, seconds=200)
