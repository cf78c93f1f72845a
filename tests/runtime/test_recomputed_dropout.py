"""A block that is computed again draws the same numbers: its gradients are those of the masks that its forward pass drew.

The model hands its masks out, so plain PyTorch on one process can compute loss and gradients with the very same ones.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowering.strategies import mesh_with
from runtime.pipelines import cut, halves, pipeline_plan, whole_strategy
from runtime.workers import device_mesh
from shardwright.frontend import capture
from shardwright.runtime import computation, parallelize
from shardwright.runtime.executor import TRACED_AFTER
from shardwright.runtime.shards import whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = F.dropout(torch.ones_like(x), 0.4)
        return x + torch.tanh(self.down(torch.tanh(self.up(self.norm(x))) * 3) * mask), mask


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        masks = []
        for block in self.blocks:
            x, mask = block(x)
            masks.append(mask)
        return (x.square().mean(), *masks)


PATHS = ("blocks.0", "blocks.1", "blocks.2")


def away(rank: int, how: str, lightly: bool, fault: bool = False) -> float:
    """How far gradients are from those of one process with the same masks, over eager passes and traced ones."""
    torch.manual_seed(0)
    model, x = Masked().double(), torch.randn(8, 6, dtype=torch.float64)
    graph = capture(model, (x,))
    again: dict[str, Any] = {"recomputed": PATHS, "lightly": frozenset(PATHS if lightly else ())}
    if how == "stages":
        plan = pipeline_plan(graph, halves(graph, 2), 2, "1f1b")
        parts = [{op.module for op in graph.ops if op.name in stage.operators} for stage in plan.stages]
        own = [tuple(path for path in PATHS if any(name.startswith(path) for name in part)) for part in parts]
        stages = [
            replace(stage, strategy=replace(stage.strategy, recomputed=paths, lightly=again["lightly"] & {*paths}))
            for stage, paths in zip(plan.stages, own, strict=True)
        ]
        parallel = parallelize(copy.deepcopy(model), replace(plan, stages=tuple(stages)), (x,), graph=graph)
    else:
        strategy = cut(graph, mesh_with((2,)), "data") if how == "cut" else whole_strategy(graph, 2)
        asked = {"mesh": device_mesh((2,)), "graph": graph}
        parallel = parallelize(copy.deepcopy(model), replace(strategy, **again), (x,), **asked)
    worst = 0.0
    torch.manual_seed(3)
    with mock.patch.object(computation, "set_random_state") if fault else nullcontext():
        for _ in range(TRACED_AFTER + 2):
            parallel.zero_grad()
            loss, *masks = parallel(x)
            loss.backward()
            masks = [mask.detach() + 0.0 for mask in masks]  # whole, on every rank
            gradients = {name: whole(p.grad) for name, p in parallel.named_parameters()}
            for name, expected in by_hand(model, x, masks).items():
                if name in gradients:
                    worst = max(worst, float((gradients[name] - expected).abs().max()))
    return worst


def by_hand(model: nn.Module, x: Tensor, masks: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of one process with these masks."""
    twin = copy.deepcopy(model)
    given = iter(masks)
    with mock.patch.object(F, "dropout", lambda ones, rate: next(given)):
        twin(x)[0].backward()
    assert next(given, None) is None
    return {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("how", ["cut", "whole", "stages"])
@pytest.mark.parametrize("lightly", [False, True])
def test_a_recomputed_block_draws_the_same_numbers(pair, how, lightly):
    assert max(pair.run(away, how, lightly)) < 1e-12


@pytest.mark.parametrize("how", ["cut", "whole", "stages"])
def test_another_mask_would_be_seen(pair, how):
    """The same with the fault in place: what the test above proves is that recomputation finds its masks again."""
    assert max(pair.run(away, how, False, True)) > 1e-3
