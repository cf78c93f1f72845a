"""Dropout: one pattern where the tensor is whole, independent patterns where it is cut, reproducible either way."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from lowering.strategies import mesh_with
from runtime.workers import device_mesh
from shardwright.frontend import capture
from shardwright.operators.strategy import Strategy
from shardwright.runtime import parallelize


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * self.scale, 0.5, True)


def patterns(rank: int, cut: tuple[bool, bool], seed: int) -> torch.Tensor:
    x = torch.ones(8, 64)
    model = Dropping()
    graph = capture(model, (x,))
    mesh = mesh_with((2, 2))
    loops = tuple("i0" if wanted else None for wanted in cut)
    layout = tuple(Shard(0) if wanted else Replicate() for wanted in cut)
    resting = {name: layout if graph.tensors[name].shape else (Replicate(), Replicate()) for name in graph.sources}
    strategy = Strategy(mesh.names, {op.name: loops for op in graph.ops}, resting)
    parallel = parallelize(model, strategy, mesh=device_mesh((2, 2)), graph=graph, keep=True, outputs="local")
    torch.manual_seed(seed)
    return parallel(x).detach(), torch.rand(3)


class DroppingTwice(Dropping):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), super().forward(x)


def patterns_on_two_axes(rank: int) -> list[torch.Tensor]:
    """Two dropouts whose pieces have one shape, the first cut along the first axis, the second along the second."""
    x, model = torch.ones(8, 64), DroppingTwice()
    graph = capture(model, (x,))
    cuts = [("i0", None)] * 2 + [(None, "i0")] * 2
    whole = (Replicate(), Replicate())
    splits = {op.name: cut for op, cut in zip(graph.ops, cuts, strict=True)}
    strategy = Strategy(mesh_with((2, 2)).names, splits, dict.fromkeys(graph.sources, whole))
    parallel = parallelize(model, strategy, mesh=device_mesh((2, 2)), graph=graph, keep=True, outputs="local")
    torch.manual_seed(3)
    return [pattern.detach() for pattern in parallel(x)]


def test_equal_pieces_cut_along_other_axes_draw_for_their_own_place(pool):
    found = pool.run(patterns_on_two_axes)
    for which, alike, unlike in ((0, (0, 1), (0, 2)), (1, (0, 2), (0, 1))):
        assert torch.equal(*(found[rank][which] for rank in alike))
        assert not torch.equal(*(found[rank][which] for rank in unlike))


def one_device(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.nn.functional.dropout(torch.ones(8, 64), 0.5, True)


def test_whole_tensor_draws_as_one_device(pool):
    found = pool.run(patterns, (False, False), 3)
    assert all(torch.equal(pattern, one_device(3)) for pattern, _ in found)


def test_cut_tensor_draws_independently(pool):
    found = pool.run(patterns, (True, True), 3)
    shards = [pattern for pattern, _ in found]
    assert all(shard.shape == (2, 64) for shard in shards)
    assert all(not torch.equal(shards[0], other) for other in shards[1:])
    kept = torch.cat(shards)
    assert set(kept.unique().tolist()) == {0.0, 2.0} and 0.35 < (kept > 0).float().mean() < 0.65
    assert all(torch.equal(found[0][1], after) for _, after in found), "the ranks' generators fell out of step"


def test_cut_along_one_axis_only(pool):
    found = pool.run(patterns, (True, False), 3)
    shards = [pattern for pattern, _ in found]
    assert torch.equal(shards[0], shards[1]) and torch.equal(shards[2], shards[3])
    assert not torch.equal(shards[0], shards[2])


def test_seed_reproduces(pool):
    first, again, other = (pool.run(patterns, (True, True), seed) for seed in (3, 3, 4))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
