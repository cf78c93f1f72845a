"""Each rank reads its rows: together they are the batch of one process, also the last, smaller one."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shardwright
from runtime.test_programs import same_gradients
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.runtime.rows import Sampler, data_axes

ROWS = 8


class Model(torch.nn.Module):
    """A batch norm sees all rows of a batch, and a table that has as many rows as a rank is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        hidden = self.last(torch.relu(self.norm(self.first(x)))) @ table[:, :3].T.new_ones(3, 3)
        return torch.nn.functional.cross_entropy(hidden + table.sum(), y)


@functools.lru_cache
def example() -> Any:
    torch.manual_seed(0)
    model = Model().double()
    data = TensorDataset(torch.randn(21, 6, dtype=torch.float64), torch.randint(0, 3, (21,)))
    table = torch.randn(2, 3, dtype=torch.float64)
    return model, data, table, capture(model, (data.tensors[0][:ROWS], data.tensors[1][:ROWS], table))


@functools.lru_cache
def plan_of(search: str) -> Any:
    options = Options(search=search, baselines=(), fewer_devices=False)
    return plan_graph(example()[3], parse_cluster("local:4"), options)


@pytest.mark.parametrize("count", [8, 21, 9, 11])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_row_is_read(count: int, parts: int) -> None:
    samplers = [Sampler(count, ROWS, parts, part, shuffle=True, seed=3) for part in range(parts)]
    whole = list(Sampler(count, ROWS, 1, 0, shuffle=True, seed=3))
    for batch, *dealt in zip(whole, *samplers, strict=True):
        if len(batch) < parts:
            assert all(part == batch for part in dealt)
        else:
            assert [row for part in dealt for row in part] == batch
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert sorted(row for batch in whole for row in batch) == list(range(count))
    first = list(samplers[0])
    samplers[0].set_epoch(0, start=1)
    assert list(samplers[0]) == first[1:]
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != first


def reads_rows(rank: int, search: str) -> None:
    model, data, table, graph = example()
    plan = plan_of(search)
    axes = tuple(name for name, _ in plan.stages[0].strategy.axes)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", plan.stages[0].strategy.sizes, mesh_dim_names=axes)
    ours, theirs = parallelize(model, plan, mesh=mesh, graph=graph, keep=True, inputs="rows"), copy.deepcopy(model)
    rows = shardwright.sampler(data, plan)
    read = 0
    for mine, whole in zip(DataLoader(data, batch_sampler=rows), DataLoader(data, batch_size=ROWS), strict=True):
        read += len(mine[0])
        results = [module(*batch, table) for module, batch in ((ours, mine), (theirs, whole))]
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
        for module, result in zip((ours, theirs), results, strict=True):
            module.zero_grad()
            result.backward()
        same_gradients(ours, theirs, f"{len(whole[0])} rows")
    parts = 4 if data_axes(graph, plan.stages[0].strategy) else 1
    assert read < 21 / parts + 4
    count = 1 + rank  # rows as nobody would deal them out: put together all the same
    begin = sum(range(1, count)) if parts > 1 else 0
    given = slice(begin, begin + count) if parts > 1 else slice(0, 10)
    x, y = data.tensors
    found = ours(x[given], y[given], table)
    torch.testing.assert_close(found, theirs(x[:10], y[:10], table), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.norm.running_mean, theirs.norm.running_mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("search", ["data-parallel", "megatron"])
def test_rows_make_the_batch_of_one_process(pool, search):
    pool.run(reads_rows, search, seconds=200)
