"""Replicas along two mesh axes: sums leg by leg give the numbers of one device, in buckets of any size."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from program.steps import priced
from runtime.workers import device_mesh
from shardwright.cluster import Axis, Mesh, mesh_of, parse_cluster
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.lowering.collectives import counting
from shardwright.operators.strategy import Strategy
from shardwright.program import Sizes
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.search.options import Restriction

SIZES = (2, 2)
BUCKETS = {"one each": Sizes(first_bucket=1, bucket=1), "few": Sizes(first_bucket=300, bucket=900), "default": Sizes()}


class Odd(torch.nn.Module):
    """Parameters of odd sizes, so that hardly a bucket divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(19, 7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.randn(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        return (hidden @ self.tokens.weight.t()).logsumexp(-1).mean()


@functools.lru_cache
def mesh() -> Mesh:
    """This machine's links without their latency, so that even a bucket of a few bytes is worth taking apart."""
    found = mesh_of(parse_cluster("local:4"), SIZES)
    axes = tuple(Axis("ab"[i], axis.size, 1e-15, axis.bandwidth) for i, axis in enumerate(found.axes))
    return Mesh(axes, found.device)


def slow(where: Mesh) -> Mesh:
    """The same links between devices so slow that everything is worth cutting."""
    rates = tuple((dtype, 1.0) for dtype, _ in where.device.peak_flops)
    return Mesh(where.axes, replace(where.device, peak_flops=rates))


@functools.lru_cache
def example(dtype: torch.dtype = torch.float64, cut: bool = False) -> tuple[Any, torch.Tensor, Any, Strategy]:
    """The model, its input, its graph and a strategy: batch on both axes; ``cut``: parameters sharded on the fast one."""
    torch.manual_seed(0)
    model, tokens = Odd().to(dtype), torch.randint(19, (8, 3))
    graph = capture(model, (tokens,))
    by_batch = restriction("data-parallel", 2)
    if cut:
        by_batch = Restriction("hybrid", by_batch.loop, lambda _, layout: layout == (Replicate(), Shard(0)))
    stated = formulate(graph, slow(mesh()), within=by_batch)
    return model, tokens, graph, stated.strategy(solve(stated.problem).answer)


def split(model: Any, graph: Any, strategy: Strategy, bucket: str, **options: Any) -> Any:
    decisions = PricedDecisions(mesh(), BUCKETS[bucket])
    return parallelize(
        copy.deepcopy(model), strategy, mesh=device_mesh(SIZES), graph=graph, decisions=decisions, **options
    )


def trains_alike(rank: int, bucket: str, cut: bool) -> None:
    model, tokens, graph, strategy = example(cut=cut)
    reference, parallel = copy.deepcopy(model), split(model, graph, strategy, bucket)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, parallel)]
    for step in range(4):  # the last two without letting go of the gradients
        reference(tokens).backward()
        parallel(tokens).backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                whole(parallel.get_parameter(name).grad), parameter.grad, rtol=1e-10, atol=1e-13, msg=name
            )
        for optimizer in optimizers:
            optimizer.step()
            if step < 2:
                optimizer.zero_grad()


def accumulates(rank: int, bucket: str) -> None:
    model, tokens, graph, strategy = example()
    reference = copy.deepcopy(model)
    for shift in range(3):
        reference((tokens + shift) % 19).backward()
    parallel = split(model, graph, strategy, bucket)
    for hold in (True, False):
        parallel.zero_grad()
        for shift in range(3):
            parallel.gradients.hold = hold and shift < 2
            parallel((tokens + shift) % 19).backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(
                whole(parallel.get_parameter(name).grad), parameter.grad, rtol=1e-10, atol=1e-13, msg=name
            )


def reduces_in_bfloat16(rank: int) -> None:
    model, tokens, graph, strategy = example(torch.float32)
    reference = copy.deepcopy(model)
    reference(tokens).backward()
    parallel = split(model, graph, strategy, "few", reduce_dtype=torch.bfloat16)
    for _ in range(2):
        parallel.zero_grad()
        with counting() as performed:
            parallel(tokens).backward()
        for name, parameter in reference.named_parameters():
            found = parallel.get_parameter(name).grad
            assert found.dtype == torch.float32
            error = (whole(found) - parameter.grad).abs().max()
            assert 0 < error < 0.02 * parameter.grad.abs().max(), name
    scattered = sum(n for (kind, _), n in performed.bytes.items() if kind == "reduce_scatter")
    elements = sum(p.numel() for p in model.parameters())
    assert 2 * elements <= scattered < 2 * elements + 2 * 20  # two bytes an element, and what was padded


def sends_what_was_predicted(rank: int, bucket: str, cut: bool) -> None:
    model, tokens, graph, strategy = example(cut=cut)
    parallel = split(model, graph, strategy, bucket)
    predicted = priced(graph, strategy, mesh(), sizes=BUCKETS[bucket])
    axis_of = {group: name for name, group in parallel.groups.items()}
    for _ in range(3):
        parallel.zero_grad()
        with counting() as performed:
            parallel(tokens).backward()
        sent = {
            (kind, axis_of[group]): (count, performed.bytes[kind, group])
            for (kind, group), count in performed.steps.items()
        }
        if rank == 0:
            assert sent == predicted.communication
    if not cut:
        assert predicted.communication["reduce_scatter", "b"] == predicted.communication["all_gather", "b"]
        expected = {"one each": 8, "few": 3, "default": 1}[bucket]
        assert len(predicted.program.buckets) == predicted.communication["reduce_scatter", "b"][0] == expected


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "sharded on one axis"])
@pytest.mark.parametrize("bucket", list(BUCKETS))
def test_the_numbers_of_one_device(pool, bucket, cut):
    pool.run(trains_alike, bucket, cut)


@pytest.mark.parametrize("bucket", list(BUCKETS))
def test_accumulation(pool, bucket):
    pool.run(accumulates, bucket)


def test_reduction_in_bfloat16(pool):
    pool.run(reduces_in_bfloat16)


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "sharded on one axis"])
@pytest.mark.parametrize("bucket", list(BUCKETS))
def test_predicted_collectives_are_performed(pool, bucket, cut):
    pool.run(sends_what_was_predicted, bucket, cut)
