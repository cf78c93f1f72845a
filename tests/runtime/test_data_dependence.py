"""Models that look at their data, on several processes: the same numbers, and one refusal on all ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from lowering.strategies import mesh_with, random_strategy
from runtime.workers import captured, device_mesh
from shardwright.cluster import parse_cluster
from shardwright.errors import AssumptionBroken
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.verification.prepare import all_double, widened
from shardwright.verification.verify import check


@functools.lru_cache
def built(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    from tests.frontend.various import build

    model, args, kwargs = widened(*build(name))
    with all_double():
        return model, args, kwargs, captured(model, args, kwargs)


def agrees(rank: int, name: str, seed: int) -> None:
    model, args, kwargs, graph = built(name)
    strategy = random_strategy(graph, mesh_with((4,)), seed)
    answer = check(model, args, kwargs, strategy, steps=2, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()


@pytest.mark.parametrize(
    ("name", "seed"), [("router", 0), ("guarded", 1), ("spiking", 2), ("hypernetwork", 3), ("self_distilled", 4)]
)
def test_same_numbers(pool, name, seed):
    pool.run(agrees, name, seed, seconds=100)


def refused_on_every_rank(rank: int) -> None:
    model, (x, mask), _, graph = built("guarded")
    strategy = random_strategy(graph, mesh_with((4,)), 1)
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph, keep=True)
    with pytest.raises(AssumptionBroken, match=r"trainings.py:\d+ the model looks at its data"):
        parallel(x, torch.zeros_like(mask))
    parallel(x, mask)  # and the next batch like the example is computed


def test_a_batch_that_decides_otherwise(pool):
    pool.run(refused_on_every_rank, seconds=100)


class Walking(torch.nn.Module):
    """Walks through names in another order on every rank, as models do that walk through a set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in "ab"})
        self.order = "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {name: torch.tanh(self.layers[name](x)) for name in self.order}
        return found["a"] - 2 * found["b"]


def traced_in_another_order(rank: int) -> None:
    torch.manual_seed(0)
    model, args = Walking().double(), (torch.randn(8, 8, dtype=torch.float64),)
    first = capture(model, args)
    planned = plan_graph(first, parse_cluster("local:4"), Options(search="fsdp", baselines=(), fewer_devices=False))
    strategy = random_strategy(first, mesh_with((4,)), 0)
    for way, others in ((planned, (0, 1, 2, 3)), (strategy, (1, 3))):  # rank 0 decides where no plan does
        model.order = "ba" if rank in others else "ab"
        answer = check(model, args, {}, way, steps=2, graph=capture(model, args))
        if rank == 0:
            assert answer is not None and answer.agrees, answer.as_dict()


def test_ranks_that_trace_in_another_order(pool):
    pool.run(traced_in_another_order, seconds=100)


class Shuffled(torch.nn.Module):
    """ViT-MAE: an input that is only sorted. No gradient comes back to it, also not one of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        order = noise.argsort(dim=1)[..., None].expand_as(x)
        return self.linear(x).gather(1, order) * torch.arange(6, dtype=x.dtype)[:, None]


def shuffled(rank: int) -> None:
    torch.manual_seed(0)
    model, x, noise = Shuffled().double(), torch.randn(4, 6, 8).double(), torch.rand(4, 6).double()
    graph = capture(model, (x, noise))
    strategy = random_strategy(graph, mesh_with((4,)), 0)
    answer = check(model, (x, noise), {}, strategy, steps=2, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()


def test_an_input_that_is_only_sorted(pool):
    pool.run(shuffled, seconds=100)


class Keypoints(torch.nn.Module):
    """SuperPoint: as many rows as a mask selects, which nobody can select without data."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(x))
        return torch.cat(
            [self.after(row[chosen]) for row, chosen in zip(hidden, mask, strict=True) if len(row[chosen])]
        )


def planned_by_the_first(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Keypoints().double(), torch.randn(4, 6, 8).double()
    mask = (torch.arange(6) % 2 == 0).expand(4, 6).clone()
    graph = capture(model, (x, mask))
    assert any("aten.index.Tensor" in op.target for op in graph.ops), [op.target for op in graph.ops]
    box = [None]
    if rank == 0:  # the search asks the same of operators as the program does, and knows less
        options = Options(search="fsdp", baselines=(), fewer_devices=False)
        box = [plan_graph(graph, parse_cluster("local:4"), options)]
    torch.distributed.broadcast_object_list(box)
    answer = check(model, (x, mask), {}, box[0], steps=2, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()


def test_what_is_selected_has_its_gradient_on_every_rank(pool):
    pool.run(planned_by_the_first, seconds=100)


class Balanced(torch.nn.Module):
    """LongCat-Flash: decides on a number that training changes by and by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.share = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.share
        return y.square().sum() if self.share > 0.9999 else y.sum()


def decided_as_in_the_example(rank: int) -> None:
    torch.manual_seed(0)
    model, args = Balanced().double(), (torch.randn(4, 8, dtype=torch.float64),)
    graph = capture(model, args)
    answer = check(model, args, {}, random_strategy(graph, mesh_with((4,)), 0), steps=3, graph=graph)
    if rank == 0:
        assert answer is not None and answer.agrees, answer.as_dict()


def test_updates_leave_what_was_decided(pool):
    pool.run(decided_as_in_the_example, seconds=100)
