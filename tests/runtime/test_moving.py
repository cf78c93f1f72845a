"""A model that trains goes over to other plans: losses, parameters and optimizer state stay those of one process."""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowering.strategies import mesh_with
from runtime.pipelines import pipeline_plan
from runtime.pool import POOL
from runtime.workers import built
from shardwright.cluster import parse_cluster
from shardwright.errors import PlanError, RunError
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.plans import Plan
from shardwright.plans.blocks import blocks_of, with_blocks
from shardwright.runtime import parallelize, survivors
from shardwright.runtime.assistant.drop_ranks import without_ranks
from shardwright.runtime.assistant.movable import Shares
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.runtime.moving import move
from shardwright.runtime.replanning import ELASTIC_VARIABLE
from shardwright.runtime.shards import whole
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.prepare import all_double

Subject = tuple[Any, tuple[Any, ...], dict[str, Any], Graph]


@functools.cache
def gpt() -> Subject:
    return built("gpt:small,layers=5,batch=8,heads=4")


def pipeline(graph: Graph, stages: int, each: int, inside: str = "alone") -> Plan:
    """Stages with as many blocks each."""
    starts = [span_of(graph, path).start for path in block_paths(graph)]
    first = [starts[number * len(starts) // stages] for number in range(1, stages)]
    borders = [0, *first, len(graph.ops)]
    cuts = [[op.name for op in graph.ops[a:b]] for a, b in pairwise(borders)]
    return pipeline_plan(graph, cuts, 2, "1f1b", each, inside=inside)


def one_mesh(
    graph: Graph, search: str, sizes: tuple[int, ...], shares: dict[str, tuple[float, ...]] | None = None
) -> Plan:
    stated = formulate(graph, mesh_with(sizes), within=restriction(search, len(sizes)))
    strategy = replace(stated.strategy(solve(stated.problem).answer), shares=shares or {})
    return Plan.of(graph, strategy, optimizer="sgd")


def step(model: Any, optimizer: torch.optim.Optimizer, subject: Subject, number: int) -> float:
    """Another batch in every step."""
    args = [torch.roll(x, number, 0) for x in subject[1]]
    args[0] = (args[0] + number) % 50
    with all_double():
        loss = model(*args, **subject[2])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def farthest(parallel: Any, model: torch.nn.Module) -> float:
    """Of this rank's parameters, relative to the largest element of each."""
    every = dict(model.named_parameters())
    apart = [
        (whole(p.detach()) - every[name]).abs().max() / every[name].abs().max()
        for name, p in parallel.named_parameters()
    ]
    return float(max(apart, default=0.0))


def on_some(graph: Graph, plan: Plan, rows: tuple[int, ...], stage: int = 0) -> Plan:
    """The plan with the first axis of a stage dealt out in these rows."""
    stages = list(plan.stages)
    stages[stage] = without_ranks(stages[stage], Shares(0, "a", rows), rows)
    return replace(plan, stages=tuple(stages))


def plans(graph: Graph) -> list[Plan]:
    """Other blocks in stages of one rank and of two; other meshes, other shares; from one kind to the other and back;
    without ranks that only look on; unequal rows for the replicas of a stage."""
    four, two, replicas = pipeline(graph, 4, 1), pipeline(graph, 2, 2, "tensor"), pipeline(graph, 2, 2, "data")
    return [
        four,
        with_blocks(four, graph, (2, 0, 2, 1)),
        with_blocks(four, graph, (1, 1, 1, 2)),
        two,
        with_blocks(two, graph, (4, 1)),
        one_mesh(graph, "megatron", (4,)),
        on_some(graph, one_mesh(graph, "megatron", (4,)), (2, 1, 0, 1)),
        one_mesh(graph, "fsdp", (4,)),
        on_some(graph, one_mesh(graph, "fsdp", (4,)), (0, 3, 3, 2)),
        one_mesh(graph, "megatron", (2, 2), {"b": (0.75, 0.25)}),
        replicas,
        on_some(graph, replicas, (1, 3), 1),
        with_blocks(on_some(graph, replicas, (3, 1)), graph, (4, 1)),
        one_mesh(graph, "data-parallel", (2, 2), {"a": (0.25, 0.75)}),
        on_some(graph, one_mesh(graph, "data-parallel", (4,)), (0, 0, 0, 8)),
    ]


def trained(rank: int, folder: str, every: list[Plan]) -> tuple[float, float, float]:
    subject = gpt()
    model, args, kwargs, graph = subject
    with all_double():
        parallel = parallelize(copy.deepcopy(model), every[0], args, kwargs, graph=graph)
    alone = copy.deepcopy(model)
    optimizer, single = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (parallel, alone))
    far = 0.0
    for number, plan in enumerate([*every, every[0], every[1]]):
        if number:
            move(parallel, optimizer, plan)
        far = max(far, abs(step(parallel, optimizer, subject, number) - step(alone, single, subject, number)))
    kept = farthest(parallel, alone)
    assert rank != 1 or not list(parallel.parameters())
    save_checkpoint(folder, 1, parallel, optimizer)
    with all_double():
        other = parallelize(copy.deepcopy(model), every[-2], args, kwargs, graph=graph)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.01)
    load_checkpoint(folder, other, resumed)
    after = abs(step(other, resumed, subject, 90) - step(parallel, optimizer, subject, 90))
    return far, kept, max(after, abs(step(other, resumed, subject, 91) - step(parallel, optimizer, subject, 91)))


def test_moves_keep_the_numbers(tmp_path: Path) -> None:
    """And a checkpoint after the last of them is resumed under another plan."""
    for losses, parameters, resumed in POOL.run(trained, str(tmp_path), plans(gpt()[3]), seconds=240):
        assert losses < 1e-9 and parameters < 1e-9 and resumed < 1e-9


def come_back(rank: int, folder: str) -> tuple[float, int]:
    """Four processes of a job whose plan is for six, which left a checkpoint behind."""
    subject = gpt()
    model, args, kwargs, graph = subject
    with all_double():
        first = parallelize(copy.deepcopy(model), pipeline(graph, 4, 1), args, kwargs, graph=graph)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
    step(first, optimizer, subject, 0)
    save_checkpoint(folder, 1, first, optimizer)
    six = replace(one_mesh(graph, "data-parallel", (6,)), cluster=parse_cluster("local:6"), search="data-parallel")
    os.environ[ELASTIC_VARIABLE] = "1"
    try:
        with all_double():
            other = parallelize(copy.deepcopy(model), six, args, kwargs, graph=graph)
    finally:
        del os.environ[ELASTIC_VARIABLE]
    resumed = torch.optim.AdamW(other.parameters(), lr=0.01)
    load_checkpoint(folder, other, resumed)
    apart = [abs(step(other, resumed, subject, n) - step(first, optimizer, subject, n)) for n in (1, 2)]
    return max(apart), other.program.strategy.devices


def test_a_job_that_comes_back_with_fewer_processes_plans_for_them(tmp_path: Path) -> None:
    assert all(apart < 1e-9 and devices == 4 for apart, devices in POOL.run(come_back, str(tmp_path), seconds=200))


def survive_and_resume(rank: int, folder: str, search: str, dead: int) -> tuple[int, float]:
    """After a checkpoint and two more steps one rank is gone, the others write what they have; the job comes back."""
    subject = gpt()
    model, args, kwargs, graph = subject
    os.environ[ELASTIC_VARIABLE] = "1"
    try:
        with all_double():
            first = parallelize(copy.deepcopy(model), one_mesh(graph, search, (2, 2)), args, kwargs, graph=graph)
        optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
        assert load_checkpoint(folder, first, optimizer) is None
        step(first, optimizer, subject, 0)
        save_checkpoint(folder, 1, first, optimizer)
        losses = {number: step(first, optimizer, subject, number) for number in (1, 2)}
        if rank != dead:
            survivors._here[0].write()
        dist.barrier()
        losses[3] = step(first, optimizer, subject, 3)
        with all_double():
            other = parallelize(copy.deepcopy(model), pipeline(graph, 4, 1), args, kwargs, graph=graph)
        resumed = torch.optim.AdamW(other.parameters(), lr=0.3)
        found = load_checkpoint(folder, other, resumed)
        assert found is not None
        return found["step"], abs(losses[found["step"]] - step(other, resumed, subject, found["step"]))
    finally:
        del os.environ[ELASTIC_VARIABLE]
        for survivor in survivors._here:
            survivor.leave()


@pytest.mark.parametrize(("search", "resumed"), [("data-parallel", 3), ("fsdp", 1)])
def test_what_the_others_have_in_memory_outlives_a_rank(tmp_path: Path, search: str, resumed: int) -> None:
    """All of it where replicas are left, under another plan; where parts are gone with the rank, the checkpoint counts."""
    answers = POOL.run(survive_and_resume, str(tmp_path), search, 2, seconds=200)
    assert all(found == resumed and apart < 1e-9 for found, apart in answers)


def refused(rank: int) -> list[str]:
    model, args, kwargs, graph = gpt()
    four = pipeline(graph, 4, 1)
    with all_double():
        parallel = parallelize(copy.deepcopy(model), four, args, kwargs, graph=graph)
    said = []
    for attempt in (
        lambda: with_blocks(four, graph, (5, 1, 0, 0)),
        lambda: move(model, None, four),
        lambda: move(parallel, None, one_mesh(graph, "fsdp", (8,))),
    ):
        with pytest.raises((PlanError, RunError)) as caught:
            attempt()
        said.append(caught.value.message)
    return [*said, str(blocks_of(four, graph))]


def test_what_cannot_be_moved_is_refused() -> None:
    for blocks, plain, fewer, dealt in POOL.run(refused):
        assert "do not share out 5 blocks between 4 stages" in blocks and "not a parallelized module" in plain
        assert "for 8 processes, and 4 are running" in fewer and dealt == "(1, 1, 1, 2)"
