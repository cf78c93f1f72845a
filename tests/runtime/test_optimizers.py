"""Optimizers and what loops do around them: the parameters of one process after a few steps, under every usual recipe."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from lowering.strategies import mesh_with
from runtime.workers import device_mesh
from shardwright.frontend import capture
from shardwright.operators.strategy import Strategy
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate

RECIPES = ("data-parallel", "megatron", "fsdp")


class Net(torch.nn.Module):
    """A feed-forward layer of a Transformer, and sizes that four ranks cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(12), torch.nn.Linear(12, 18), torch.nn.Linear(18, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))).square().mean()


@functools.lru_cache
def example() -> tuple[Net, torch.Tensor, Any]:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 12, dtype=torch.float64)
    return model, x, capture(model, (x,))


@functools.lru_cache
def strategy_of(search: str) -> Strategy:
    stated = formulate(example()[2], mesh_with((4,)), within=restriction(search, 1))
    return stated.strategy(solve(stated.problem).answer)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of an interpolation between gradient and momentum."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(torch.sign(momentum.lerp(p.grad, 0.1)), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


Optimizers = Callable[[torch.nn.Module], list[torch.optim.Optimizer]]


def muon(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]


def groups(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    decayed = {"params": [model.up.weight, model.down.weight], "weight_decay": 0.1}
    rest = {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.2}
    return [torch.optim.SGD([decayed, rest], lr=0.1, momentum=0.9, nesterov=True)]


KINDS: dict[str, Optimizers] = {
    "sgd in groups": groups,
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.05)],
    "lion": lambda model: [Lion(model.parameters(), lr=0.05)],
    "muon": muon,
}


def same(ours: torch.nn.Module, theirs: torch.nn.Module, about: str) -> None:
    for name, parameter in ours.named_parameters():  # with stages, those of this rank
        mine, wanted = whole(parameter.detach()), theirs.get_parameter(name).detach()
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12, msg=f"{about}: {name}")


def updates(rank: int, kind: str) -> None:
    model, x, graph = example()
    theirs = copy.deepcopy(model)
    split = {s: parallelize(model, strategy_of(s), mesh=device_mesh((4,)), graph=graph, keep=True) for s in RECIPES}
    for module in (theirs, *split.values()):
        optimizers = KINDS[kind](module)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4) for optimizer in optimizers]
        for _ in range(3):
            module.zero_grad()
            module(x).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            for one in (*optimizers, *schedules):
                one.step()
        for optimizer in optimizers:
            for p in optimizer.param_groups[0]["params"]:
                for value in optimizer.state[p].values():  # state of a parameter's shape rests as the parameter does
                    cut = isinstance(p, DTensor) and isinstance(value, torch.Tensor) and value.shape == p.shape
                    assert not cut or value.placements == p.placements
    for search, module in split.items():
        same(module, theirs, f"{kind} under {search}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_one_process(pool: Any, kind: str) -> None:
    pool.run(updates, kind, seconds=120)


def scales(rank: int) -> None:
    """A gradient that is not finite on one rank alone skips the step on all of them, and the scale shrinks alike."""
    model, x, graph = example()
    theirs = copy.deepcopy(model)
    for search in RECIPES:
        ours = parallelize(model, strategy_of(search), mesh=device_mesh((4,)), graph=graph, keep=True)
        theirs.load_state_dict(model.state_dict())
        found = []
        for module in (theirs, ours):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(module(x)).backward()
                gradient = module.up.weight.grad
                if step == 1:  # the last rows, which the last rank holds where they are cut
                    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    if module is theirs or local.shape == gradient.shape or rank == 3:
                        local[-1] = torch.inf
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            found.append(scaler.get_scale())
        assert found == [2.0**10, 2.0**10], (search, found)
        same(ours, theirs, f"scaled under {search}")


def thaws(rank: int) -> None:
    """Frozen and thawed between steps, with an optimizer that stays: momentum goes on where it was left."""
    model, x, graph = example()
    theirs = copy.deepcopy(model)
    ours = parallelize(model, strategy_of("fsdp"), mesh=device_mesh((4,)), graph=graph, keep=True)
    for module in (theirs, ours):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(4):
            module.up.requires_grad_(step not in (1, 2))
            optimizer.zero_grad()
            module(x).backward()
            optimizer.step()
    same(ours, theirs, "thawed")


@pytest.mark.parametrize("what", [scales, thaws])
def test_loops(pool: Any, what: Callable[..., None]) -> None:
    pool.run(what, seconds=120)


def adapts(rank: int) -> None:
    """LoRA by peft: the base is frozen and rests as it is, adapters are trained."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Net(), config).double()
    x = torch.randn(8, 12, dtype=torch.float64)
    graph = capture(model, (x,))
    stated = formulate(graph, mesh_with((4,)), within=restriction("fsdp", 1))
    strategy = stated.strategy(solve(stated.problem).answer)
    ours = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph, keep=True)
    for module in (model, ours):
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).backward()
            optimizer.step()
    same(ours, model, "adapted")
    assert 0 < sum(p.requires_grad for p in ours.parameters()) < len(list(ours.parameters()))


def test_adapters(pool: Any) -> None:
    pytest.importorskip("peft")
    pool.run(adapts, seconds=120)
