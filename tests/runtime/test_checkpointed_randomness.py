"""A checkpoint holds where the random numbers were: a resumed job drops what it would have dropped without the stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowering.strategies import mesh_with, random_strategy
from runtime.pipelines import pipeline_plan
from runtime.test_training import fsdp_like
from runtime.workers import device_mesh
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint

KINDS = ("data", "cut", "stages")


class Dropping(torch.nn.Module):
    """Drops more in its second half than in its first, which ranks with stages of their own draw for differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.some, self.many = torch.nn.Dropout(0.3), torch.nn.Dropout(0.6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.some(self.first(x))
        return self.many(self.many(self.last(x)) * 2).square().mean()


def started(kind: str) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Dropping().double(), torch.randn(8, 6, dtype=torch.float64)
    graph = capture(model, (x,))
    if kind == "stages":
        names = [op.name for op in graph.ops]
        parallel = parallelize(model, pipeline_plan(graph, [names[:2], names[2:]], 2, "1f1b"), (x,), graph=graph)
    else:
        strategy = fsdp_like(graph, mesh_with((2,))) if kind == "data" else random_strategy(graph, mesh_with((2,)), 4)
        parallel = parallelize(model, strategy, mesh=device_mesh((2,)), graph=graph)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.01), x


def trained(parallel: Any, optimizer: Any, x: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = parallel(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def without_a_stop(rank: int, kind: str, folder: str) -> tuple[list[float], torch.Tensor]:
    parallel, optimizer, x = started(kind)
    trained(parallel, optimizer, x)
    save_checkpoint(folder, 3, parallel, optimizer)
    return trained(parallel, optimizer, x), torch.rand(3)


def resumed(rank: int, kind: str, folder: str) -> tuple[list[float], torch.Tensor]:
    """In a job that has drawn other numbers before."""
    parallel, optimizer, x = started(kind)
    torch.manual_seed(7)
    trained(parallel, optimizer, x)
    assert load_checkpoint(folder, parallel, optimizer) == {"step": 3}
    return trained(parallel, optimizer, x), torch.rand(3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_elements_are_dropped_after_a_stop(pair, tmp_path: Path, kind: str) -> None:
    expected = pair.run(without_a_stop, kind, str(tmp_path))
    assert len(set(expected[0][0])) == 3, "it drops other elements in every step"
    for found, wanted in zip(pair.run(resumed, kind, str(tmp_path)), expected, strict=True):
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])
