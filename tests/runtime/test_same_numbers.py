"""Whatever way a model is split, it computes what the eager model computes, and sends what was predicted."""

from __future__ import annotations

import pytest

from lowering.strategies import mesh_with, random_strategy
from runtime.workers import built, device_mesh
from shardwright.costs.walk import walk
from shardwright.lowering.collectives import counting
from shardwright.runtime import parallelize
from shardwright.runtime.compare import loss_of
from shardwright.runtime.verify import check


def agrees(rank: int, reference: str, sizes: tuple[int, ...], seed: int) -> None:
    model, args, kwargs, graph = built(reference)
    strategy = random_strategy(graph, mesh_with(sizes), seed)
    answer = check(model, args, kwargs, strategy, steps=2, mesh=device_mesh(sizes), graph=graph)
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


def sends_what_was_predicted(rank: int, reference: str, sizes: tuple[int, ...], seed: int) -> None:
    model, args, kwargs, graph = built(reference)
    mesh = mesh_with(sizes)
    strategy = random_strategy(graph, mesh, seed)
    parallel = parallelize(model, strategy, mesh=device_mesh(sizes), graph=graph)
    with counting() as performed:
        loss_of(parallel(*args, **kwargs)).backward()
    axis_of = {group: name for name, group in parallel.groups.items()}
    sent = {(kind, axis_of[group]): (n, performed.bytes[kind, group]) for (kind, group), n in performed.steps.items()}
    predicted = walk(graph, strategy, mesh).communication
    if rank == 0:  # predictions are about the largest shard, which rank 0 holds
        halos = ("halo", "halo_reduce")  # a border rank sends to one side only; predictions are about inner ranks
        assert {k: v[0] for k, v in sent.items()} == {k: v[0] for k, v in predicted.items()}
        assert {k: v for k, v in sent.items() if k[0] not in halos} == {
            k: v for k, v in predicted.items() if k[0] not in halos
        }


@pytest.mark.parametrize(("model", "sizes", "seed"), [("gpt:small", (2, 2), 0), ("alexnet:small", (4,), 1)])
def test_predicted_communication(pool, model, sizes, seed):
    pool.run(sends_what_was_predicted, model, sizes, seed, seconds=100)
