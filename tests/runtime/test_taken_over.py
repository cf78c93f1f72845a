"""An optimizer made before parallelize(), the commonest order in scripts: it trains the split model, state and all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lowering.strategies import mesh_with
from runtime.pipelines import halves, pipeline_plan
from runtime.test_norms import Frozen, example
from runtime.test_training import fsdp_like
from runtime.workers import device_mesh
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.materialise import parameters_on_meta
from shardwright.runtime.shards import whole


def split(kind: str, model: torch.nn.Module, args: Any, graph: Any, **options: Any) -> Any:
    if kind == "stages":
        return parallelize(model, pipeline_plan(graph, halves(graph, 2), 2, "1f1b"), args, graph=graph, **options)
    return parallelize(model, fsdp_like(graph, mesh_with((2,))), args, mesh=device_mesh((2,)), graph=graph, **options)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With groups, a schedule to come, and parameters by their names."""
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if p.ndim > 1}
    others = {name: p for name, p in named.items() if name not in matrices}
    groups = [{"params": list(matrices.items()), "weight_decay": 0.1}, {"params": list(others.items()), "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.05)


def made_before(rank: int, kind: str, steps_before: int) -> None:
    model, args, graph = example(True, torch.float64)
    reference = copy.deepcopy(model)
    mine, theirs = optimizer_of(model), optimizer_of(reference)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in (mine, theirs)]
    for step in range(steps_before + 3):
        if step == steps_before:
            model = split(kind, model, args, graph)
            held = {id(p) for group in mine.param_groups for p in group["params"]}
            assert held == {id(p) for p in model.parameters()}
            names = {name for group in mine.param_groups for name in group["param_names"]}
            assert names == {name for name, _ in model.named_parameters()} - ({"head.weight"} - names)
        for module, optimizer, schedule in zip((model, reference), (mine, theirs), schedules, strict=True):
            optimizer.zero_grad()
            module(*args).backward()
            optimizer.step()
            schedule.step()
    weights = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(whole(parameter.detach()), weights[name].detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", ["mesh", "stages"])
def test_it_goes_on_with_the_shards(pair, kind, steps_before):
    pair.run(made_before, kind, steps_before)


def other_uses(rank: int, kind: str) -> None:
    """What no optimizer holds is refused when it is used; what was kept, or lies on meta, is not."""
    model, args, graph = example(False)
    mine, name = list(model.parameters()), repr(model.head.weight)
    kept = split(kind, model, args, graph, keep=True)
    kept(*args).backward()
    torch.optim.SGD(mine, lr=0.1).step()
    assert repr(model.head.weight) == name
    parallel = split(kind, model, args, graph)
    for use in (
        lambda: torch.optim.SGD(mine, lr=0.1),
        lambda: torch.nn.utils.clip_grad_norm_(mine, 1.0),
        lambda: sum(p.sum() for p in mine),
    ):
        with pytest.raises(RunError, match=r"A parameter is used that parallelize\(\) has taken over"):
            use()
    assert "has taken over" in repr(mine[0])
    parallel(*args).backward()
    with parameters_on_meta():
        bare, args, graph = example(False)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    parallel = split(kind, bare, args, graph)
    before = [whole(p.detach()).clone() for p in parallel.parameters()]
    parallel(*args).backward()
    optimizer.step()
    assert not all(torch.equal(whole(p.detach()), old) for p, old in zip(parallel.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["mesh", "stages"])
def test_other_uses_of_what_was_taken_over_are_refused(pair, kind):
    pair.run(other_uses, kind)


def nothing_here(rank: int) -> int:
    """Of a rank that holds nothing that is trained the optimizer has nothing left, and steps all the same."""
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(8, 6)
    graph = capture(model, (x,))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    names = [op.name for op in graph.ops]
    plan = pipeline_plan(graph, [names[:1], names[1:]], 2, "1f1b")
    parallel = parallelize(model, plan, (x,), graph=graph)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(parallel(x))
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]
    return len(optimizer.param_groups[0]["params"])


def test_a_rank_without_any_of_its_parameters(pair):
    assert pair.run(nothing_here) == [0, 2]
