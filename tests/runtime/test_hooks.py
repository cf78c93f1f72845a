"""Hooks: those on parameters and on the parallelized module fire as on one device, those that cannot are refused."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch

from lowering.strategies import mesh_with, random_strategy
from runtime.test_training import fsdp_like
from runtime.workers import device_mesh
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole


class Tied(torch.nn.Module):
    """One weight is read twice, so that its gradient comes in two shares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
        self.out = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(x))))).square().mean()


@functools.lru_cache
def example():
    torch.manual_seed(0)
    model, x = Tied().double(), torch.randn(8, 16, dtype=torch.float64)
    return model, x, capture(model, (x,))


def watched(model, x, steps: int = 3):
    """What hooks on every parameter see, halving one gradient and updating another parameter in the hook itself."""
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, whole(gradient).clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, whole(p.grad).clone())))
    model.inner.weight.register_hook(lambda gradient: gradient / 2)

    def update(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model.out.weight.register_post_accumulate_grad_hook(update)
    for _ in range(steps):
        model(x).backward()
    return seen, {name: (whole(p.detach()), p.grad) for name, p in model.named_parameters()}


def fires_on_parameters(rank: int) -> None:
    model, x, graph = example()
    expected, state = watched(copy.deepcopy(model), x)
    by_name = lambda seen: {name: [g for n, g in seen if n == name] for name, _ in seen}
    for strategy in (fsdp_like(graph, mesh_with((4,))), *(random_strategy(graph, mesh_with((4,)), s) for s in (0, 1))):
        original = copy.deepcopy(model)
        early = []  # registered on the model that is taken over
        original.out.bias.register_hook(early.append)
        seen, found = watched(parallelize(original, strategy, mesh=device_mesh((4,)), graph=graph), x)
        assert len(early) == 3 and len(seen) == len(expected)
        for name, gradients in by_name(expected).items():
            for mine, true in zip(by_name(seen)[name], gradients, strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-12)
        for name, (value, gradient) in state.items():
            torch.testing.assert_close(found[name][0], value, rtol=1e-9, atol=1e-12)
            assert (found[name][1] is None) == (gradient is None)


def fires_on_the_module(rank: int) -> None:
    model, x, graph = example()
    parallel = parallelize(model, fsdp_like(graph, mesh_with((4,))), mesh=device_mesh((4,)), graph=graph, keep=True)
    called = []
    parallel.register_forward_pre_hook(lambda *_: called.append("before"))
    parallel.register_forward_hook(lambda *_: called.append("after"))
    parallel.register_full_backward_hook(lambda *_: called.append("backward"))
    given = x.clone().requires_grad_()
    parallel(given).backward()
    assert called == ["before", "after", "backward"]


def refused(rank: int) -> None:
    model, x, graph = example()
    strategy, mesh = fsdp_like(graph, mesh_with((4,))), device_mesh((4,))
    parallel = parallelize(model, strategy, mesh=mesh, graph=graph, keep=True)
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        with pytest.raises(RunError, match="submodule inner is never called"):
            getattr(parallel.inner, f"register_{kind}_hook")(print)
    with pytest.raises(RunError, match="submodule inner does not run by itself"):
        parallel.inner(x)
    twin = copy.deepcopy(model)
    twin.inner.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="forward hooks of inner ran once"):
        parallelize(twin, strategy, mesh=mesh, graph=graph, keep=True)
    twin.out.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RunError, match="out has backward hooks"):
        parallelize(twin, strategy, mesh=mesh, graph=graph, keep=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model, strategy, mesh=mesh, graph=graph, keep=True)
    handle = parallel.out.bias.register_hook(lambda gradient: torch.zeros(3))
    with pytest.raises(RunError, match="A hook of a parameter"):
        parallel(x).backward()
    handle.remove()


@pytest.mark.parametrize("what", [fires_on_parameters, fires_on_the_module, refused])
def test_hooks(pool, what):
    pool.run(what, seconds=150)
