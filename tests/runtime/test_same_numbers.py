"""Whatever way a model is split, it computes what the eager model computes, and sends what was predicted."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowering.strategies import mesh_with, random_strategy
from program.steps import priced
from runtime.workers import built, device_mesh
from shardwright.frontend import capture
from shardwright.lowering.collectives import counting
from shardwright.runtime import parallelize
from shardwright.verification.recorded import loss_of
from shardwright.verification.verify import check


def agrees(rank: int, reference: str, sizes: tuple[int, ...], seed: int) -> None:
    model, args, kwargs, graph = built(reference)
    strategy = random_strategy(graph, mesh_with(sizes), seed)
    answer = check(model, args, kwargs, strategy, steps=2, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()


@pytest.mark.parametrize(
    ("model", "sizes", "seed"),
    [
        ("gpt:small", (2, 2), 0),
        ("gpt:small", (4,), 1),
        ("alexnet:small", (2, 2), 2),
        ("llama:small", (4,), 3),
        ("rnnlm:small", (2, 2), 4),
    ],
)
def test_random_strategies(pool, model, sizes, seed):
    pool.run(agrees, model, sizes, seed, seconds=100)


@functools.lru_cache
def convolutions() -> tuple[Any, ...]:
    """Images so small that the kernels' rows and columns are loops too."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 6, 3, 2, 1), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Conv2d(6, 5, 3, 2, 1)]
    model, args = torch.nn.Sequential(*layers).double(), (torch.randn(4, 3, 8, 8, dtype=torch.float64),)
    return model, args, capture(model, args)


def windows_agree(rank: int, sizes: tuple[int, ...], first: tuple[str, ...], second: tuple[str, ...]) -> None:
    model, args, graph = convolutions()
    strategy = random_strategy(graph, mesh_with(sizes), 0)
    names = [op.name for op in graph.ops if op.target.startswith("aten.conv2d")]
    strategy = replace(strategy, splits={**strategy.splits, names[0]: first, names[1]: second})
    answer = check(model, args, {}, strategy, steps=2, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()
        assert any(item.what == "gradient" and item.name == "input #1 at step 2" for item in answer.comparisons)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("y0", "y1"), ("r0", "y1")), (("y1", "n"), ("r0", "r1")), (("c", "y0"), ("y1", "r0"))],
)
def test_windows_of_two_dims(pool, first, second):
    pool.run(windows_agree, (2, 2), first, second)


def sends_what_was_predicted(rank: int, reference: str, sizes: tuple[int, ...], seed: int) -> None:
    model, args, kwargs, graph = built(reference)
    mesh = mesh_with(sizes)
    strategy = random_strategy(graph, mesh, seed)
    parallel = parallelize(model, strategy, mesh=device_mesh(sizes), graph=graph, keep=True)
    with counting() as performed:
        loss_of(parallel(*args, **kwargs)).backward()
    axis_of = {group: name for name, group in parallel.groups.items()}
    sent = {(kind, axis_of[group]): (n, performed.bytes[kind, group]) for (kind, group), n in performed.steps.items()}
    predicted = priced(graph, strategy, mesh).communication
    if rank == 0:  # predictions are about the largest shard, which rank 0 holds
        halos = ("halo", "halo_reduce")  # a border rank sends to one side only; predictions are about inner ranks
        assert {k: v[0] for k, v in sent.items()} == {k: v[0] for k, v in predicted.items()}
        assert {k: v for k, v in sent.items() if k[0] not in halos} == {
            k: v for k, v in predicted.items() if k[0] not in halos
        }


@pytest.mark.parametrize(("model", "sizes", "seed"), [("gpt:small", (2, 2), 0), ("alexnet:small", (4,), 1)])
def test_predicted_communication(pool, model, sizes, seed):
    pool.run(sends_what_was_predicted, model, sizes, seed, seconds=100)
