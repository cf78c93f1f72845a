"""Copies of a pipelined module: averages of its weights, and a twin that trains by itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runtime.pipelines import halves, pipeline_plan
from runtime.test_norms import example
from shardwright.errors import RunError
from shardwright.runtime import parallelize
from shardwright.runtime.shards import whole


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a copy makes a process group")


def copied(rank: int, each: int) -> None:
    model, args, graph = example(True, torch.float64)
    reference = copy.deepcopy(model)
    parallel = parallelize(model, pipeline_plan(graph, halves(graph, 2), 2, "1f1b", each), args, graph=graph)
    made, dist.new_group = dist.new_group, refused
    try:
        follow(parallel, reference, args)
        if rank == 0:  # an average that one rank keeps needs no other
            AveragedModel(parallel).update_parameters(parallel)
    finally:
        dist.new_group = made
    with pytest.raises(RunError, match="cannot be pickled"):
        pickle.dumps(parallel)


def follow(parallel: Any, reference: Any, args: Any) -> None:
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (parallel, reference)]
    plain = [AveragedModel(m) for m in (parallel, reference)]
    before, twin = copy.deepcopy(reference), copy.deepcopy(parallel)
    for module, *followers in zip((parallel, reference), averages, plain, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(*args).backward()
            clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            for follower in followers:
                follower.update_parameters(module)
    pairs = [(parallel, reference), *((mine.module, true.module) for mine, true in (averages, plain)), (twin, before)]
    for mine, true in pairs:
        weights = dict(true.named_parameters(remove_duplicate=False))
        for name, parameter in mine.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(whole(parameter.detach()), weights[name].detach(), rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(mine(*args), true(*args), rtol=1e-9, atol=1e-12)
    losses = []
    for module in (twin, before):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(module(*args))
            losses[-1].backward()
            losses.append(clip_grad_norm_(module.parameters(), 0.1))
            optimizer.step()
    torch.testing.assert_close(losses[:4], losses[4:], rtol=1e-9, atol=1e-12)


def test_on_two_processes(pair):
    pair.run(copied, 1)


def test_with_two_processes_a_stage(pool):
    pool.run(copied, 2)
