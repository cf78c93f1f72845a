"""What a training loop does with a model on one mesh, it does with stages: other rows and lengths, evaluation, gradients of
inputs, passes that are held back, rows per rank, whole weights. On two processes, against one."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.nn import functional

from runtime.pipelines import halves, pipeline_plan
from runtime.pool import PAIR
from runtime.workers import captured
from shardwright.errors import RunError
from shardwright.plans import Plan
from shardwright.runtime import parallelize
from shardwright.runtime.rows import sampler
from shardwright.runtime.shards import whole
from shardwright.runtime.whole_state import whole_state
from shardwright.schedules import Schedule

KINDS = ("accumulation", "gpipe", "1f1b", "zb-h1", "interleaved-1f1b")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Model(torch.nn.Module):
    """Vectors in, classes out; the mean loss is over the labels that count, a skip reads the vectors again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.third, self.norm, self.head = torch.nn.Linear(8, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.third(self.second(self.first(x).tanh()).relu())
        logits = self.head(self.norm(hidden + x))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(rows: int, length: int = 3, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (rows, length), generator=generator)
    labels[0, 0] = -100
    return torch.randn(rows, length, 6, dtype=torch.float64, generator=generator), labels


@functools.cache
def example() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model().double()
    return model, captured(model, batch(6))


def planned(kind: str) -> Plan:
    graph = example()[1]
    if kind == "accumulation":
        order = Schedule.parse("0F0 0B0 0F1 0B1 0F2 0B2")
        return pipeline_plan(graph, [[op.name for op in graph.ops]], 3, order, 2, inside="data")
    if kind == "interleaved-1f1b":
        return pipeline_plan(graph, halves(graph, 4), 2, kind, devices=2)
    return pipeline_plan(graph, halves(graph, 2), 3, kind)


def modules(kind: str, **options: Any) -> tuple[Any, Any]:
    model, graph = example()
    return parallelize(copy.deepcopy(model), planned(kind), graph=graph, **options), copy.deepcopy(model)


def same(ours: Any, theirs: Any) -> None:
    """Outputs, and whatever gradients this rank has."""
    for name, parameter in ours.named_parameters():
        wanted = theirs.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(whole(parameter.grad), wanted, **TOLERANCE)


def step(ours: Any, theirs: Any, *args: torch.Tensor, scale: float = 1.0) -> None:
    """One pass of both, with gradients of what is given."""
    results, inputs = [], []
    for module in (ours, theirs):
        module.zero_grad()
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        results.append(module(*given))
        (results[-1]["loss"] * scale).backward()
        inputs.append(given[0].grad)
    for name, mine in results[0].items():
        torch.testing.assert_close(mine, results[1][name], **TOLERANCE)
    torch.testing.assert_close(inputs[0], inputs[1], **TOLERANCE)
    same(ours, theirs)


def calls(rank: int, kind: str) -> int:
    ours, theirs = modules(kind)
    step(ours, theirs, *batch(6))
    step(ours, theirs, *batch(6, seed=2), scale=0.25)
    step(ours, theirs, *batch(5))  # the last rows of an epoch
    step(ours, theirs, *batch(1))  # fewer than there are micro-batches
    step(ours, theirs, *batch(6, length=4))
    for module in (ours, theirs):
        module.eval()
    for rows in (6, 4):
        x, labels = batch(rows, seed=3)
        with torch.no_grad():
            torch.testing.assert_close(ours(x)["logits"], theirs(x)["logits"], **TOLERANCE)
            torch.testing.assert_close(ours(x, labels)["loss"], theirs(x, labels)["loss"], **TOLERANCE)
    for module in (ours, theirs):
        module.train()
        module.zero_grad()
    with ours.no_sync():  # held back by one kind of call, taken along by another
        for seed in (4, 5):
            ours(*batch(5, seed=seed))["loss"].backward()
    ours(*batch(6, seed=6))["loss"].backward()
    for seed, rows in ((4, 5), (5, 5), (6, 6)):
        theirs(*batch(rows, seed=seed))["loss"].backward()
    same(ours, theirs)
    step(ours, theirs, *batch(6))
    return len(ours._programs)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind_have_the_numbers_of_one_process(kind: str) -> None:
    made = PAIR.run(calls, kind)
    assert made[0] == made[1] == 8  # planned, 5 and 1 rows, another length, four evaluations


def reads_rows(rank: int, kind: str) -> None:
    ours, theirs = modules(kind, inputs="rows")
    x, labels = batch(13)
    for number, rows in enumerate(sampler(range(13), planned(kind))):
        ours.zero_grad()
        theirs.zero_grad()
        ours(x[rows], labels[rows])["loss"].backward()
        own = slice(6 * number, 6 * (number + 1))
        theirs(x[own], labels[own])["loss"].backward()
        same(ours, theirs)


@pytest.mark.parametrize("kind", ["accumulation", "1f1b"])
def test_every_rank_reads_its_rows(kind: str) -> None:
    PAIR.run(reads_rows, kind)


class Scaled(torch.nn.Module):
    """Its results are in proportion to the mean of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x)) * x.mean()).mean()


def through_the_whole_batch(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(6, 4)
    graph = captured(model, (x,))
    ours = parallelize(copy.deepcopy(model), pipeline_plan(graph, halves(graph, 2), 3, "1f1b"), graph=graph)
    torch.testing.assert_close(ours(x), model(x))
    with pytest.raises(RunError, match=r"The gradient of x goes through what is computed of the whole batch"):
        ours(x.clone().requires_grad_())


def test_a_gradient_through_the_whole_batch_is_refused() -> None:
    PAIR.run(through_the_whole_batch)


def weights(rank: int) -> None:
    ours, theirs = modules("1f1b")
    found = whole_state(ours.state_dict())
    assert found.keys() == theirs.state_dict().keys() and len(ours.state_dict()) < len(found)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert bool(whole_state(ours.state_dict(), everywhere=False)) == (rank == 0)


def test_whole_weights_are_those_of_all_stages() -> None:
    PAIR.run(weights)
