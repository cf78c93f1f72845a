"""What every rank holds is seen: shards are put together, and a copy that differs on one rank is named."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from runtime.workers import device_mesh
from shardwright.verification.gathering import distance, gathered


def share(rank: int):
    mesh = device_mesh((2, 2))
    whole = torch.arange(12.0).view(6, 2)
    cut = DTensor.from_local(whole.chunk(2)[rank // 2].clone(), mesh, (Shard(0), Replicate()), run_check=False)
    copied = torch.ones(3) + (0.5 if rank == 3 else 0.0)
    stale = DTensor.from_local(whole.chunk(2)[rank // 2] + (1.0 if rank == 1 else 0.0), mesh, cut.placements)
    tensors = {"cut": cut, "copied": copied, "stale": stale, "empty": torch.ones(0), "bits": torch.ones(2).bool()}
    if rank != 2:
        tensors["missing"] = torch.ones(1)
    found = gathered(tensors, together=True)
    return found.tensors["cut"], found.spreads


def test_every_rank_is_seen(pool):
    (cut, spreads), *_ = pool.run(share, seconds=200)
    assert torch.equal(cut, torch.arange(12.0).view(6, 2))
    assert spreads["cut"] == (0.0, 0) and spreads["bits"] == (0.0, 0) and spreads["empty"] == (0.0, 0)
    assert spreads["copied"] == (0.5, 3) and spreads["stale"] == (1.0, 1)
    assert spreads["missing"] == (math.inf, 2)


def test_alone_nothing_is_sent():
    found = gathered({"w": torch.ones(2)}, together=False)
    assert torch.equal(found.tensors["w"], torch.ones(2)) and found.spreads == {}


def test_a_tensor_without_numbers_is_not_missed():
    assert distance(torch.ones(3, 0), None) == distance(None, torch.ones(0)) == distance(None, None) == 0.0
    assert distance(torch.ones(1), None) == distance(None, torch.zeros(1)) == math.inf
    assert distance(torch.ones(2), torch.ones(3)) == distance(torch.ones(2), torch.ones(2, 0)) == math.inf
