"""Recomputed blocks give the same gradients and keep fewer activations."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard

from lowering.strategies import mesh_with, random_strategy
from runtime.workers import built, device_mesh
from shardwright.errors import LoweringError
from shardwright.program import blocks
from shardwright.runtime import parallelize
from shardwright.runtime.executor import TRACED_AFTER
from shardwright.runtime.shards import whole


def recomputes(rank: int) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "SHORT", 8)  # products of the small model are expensive, as large ones are
        return _recomputes()


def _recomputes() -> tuple[int, ...]:
    model, args, _, graph = built("gpt:small")
    reference = copy.deepcopy(model)
    reference(*args).backward()
    strategy = replace(random_strategy(graph, mesh_with((2, 2)), 4), regathered=frozenset())
    cut = {parameter.tensor: (Shard(0), Shard(0)) for parameter in graph.parameters}
    fsdp = replace(strategy, resting={**strategy.resting, **cut}, regathered=frozenset(cut))  # gathered ahead, thrice
    kept, both = [], ("blocks.0", "blocks.1")
    light = {"recomputed": both, "lightly": frozenset(both)}
    mixed = {"recomputed": both, "lightly": frozenset(both[1:])}
    ways = (strategy, replace(strategy, recomputed=both), replace(strategy, **light), replace(strategy, **mixed))
    for named in (*ways, replace(fsdp, recomputed=both), replace(fsdp, **light)):
        parallel = parallelize(model, named, mesh=device_mesh((2, 2)), graph=graph, keep=True)
        executor, runs = parallel._planned.executor, []
        forward = executor.forward
        executor.forward = lambda *given, forward=forward, runs=runs: runs.append(forward(*given)) or runs[-1]
        loss = parallel(*args)
        held = {parameter.to_local().data_ptr() for parameter in parallel.parameters()}
        there = {x.data_ptr(): x.nbytes for x in runs[0].slots if isinstance(x, torch.Tensor)}
        kept.append(sum(size for place, size in there.items() if place not in held))
        loss.backward()
        for _ in range(TRACED_AFTER):  # later passes run what was traced
            parallel.zero_grad()
            parallel(*args).backward()
        for name, parameter in reference.named_parameters():
            found = whole(parallel.get_parameter(name).grad)
            torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)
    with pytest.raises(LoweringError, match=r"blocks\.9"):
        parallelize(model, strategy, mesh=device_mesh((2, 2)), graph=graph, recompute=("blocks.9",), keep=True)
    return tuple(kept[:4])


def test_recomputed_blocks(pool):
    for plain, recomputed, lightly, mixed in pool.run(recomputes, seconds=100):
        assert recomputed < plain / 2
        assert recomputed < mixed < lightly < plain
