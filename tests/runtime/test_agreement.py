"""A rank that differs, or does not come, is named on every rank within a bounded time."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from lowering.strategies import mesh_with, random_strategy
from runtime.pipelines import halves, pipeline_plan
from runtime.workers import device_mesh
from shardwright.errors import PlanError, RunError
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.agreement import agree, check_finite, together


def model_and_strategy(seed: int = 0, width: int = 8):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    graph = capture(model, (torch.zeros(8, width),))
    return model, graph, random_strategy(graph, mesh_with((4,)), 1)


def refusal(function, *args) -> str:
    with pytest.raises(RunError) as caught:
        function(*args)
    return caught.value.message


def other_weights(rank: int) -> str:
    model, graph, strategy = model_and_strategy(seed=5 if rank == 2 else 0)
    return refusal(lambda: parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph))


def other_model(rank: int) -> str:
    model, graph, strategy = model_and_strategy(width=6 if rank == 3 else 8)
    return refusal(lambda: parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph))


def other_batch(rank: int) -> str:
    model, graph, strategy = model_and_strategy()
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph)
    x = torch.ones(8, 8)
    x[0, 0] += 1e-6 if rank == 1 else 0
    return refusal(parallel, x)


def later_batch(rank: int) -> str:
    """The first batches are alike; then one rank augments one row of an image for itself, in one of two large inputs."""
    model, graph, strategy = model_and_strategy(width=600)
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph)
    for step in range(4):
        x = torch.full((8, 600), float(step))
        parallel(x).sum().backward()
    x[3] += torch.randn(600, generator=torch.Generator().manual_seed(0)) if rank == 3 else 0
    return refusal(parallel, x)


def later_batch_of_a_pipeline(rank: int) -> str:
    """Every rank of a pipeline is given the whole batch; one of the last stage augments its labels for itself."""
    model, graph, _ = model_and_strategy()
    plan = pipeline_plan(graph, halves(graph, 2), 2, "1f1b", each=2)
    parallel = parallelize(model, plan, (torch.zeros(8, 8),), graph=graph)
    for step in range(2):
        x = torch.full((8, 8), float(step))
        parallel(x).sum().backward()
    x[1, 2] += 0.1 if rank == 2 else 0
    return refusal(parallel, x)


def later_rows(rank: int) -> str:
    """On two axes, where the batch is given in parts: ranks of one part must bring the same, others need not."""
    _, graph, _ = model_and_strategy()
    mesh = mesh_with((2, 2))
    strategy = next(
        found
        for seed in range(100)
        if (found := random_strategy(graph, mesh, seed)).resting[graph.inputs[0].tensor] == (Shard(0), Replicate())
    )
    parallel = parallelize(model_and_strategy()[0], strategy, mesh=device_mesh((2, 2)), graph=graph, inputs="local")
    part = torch.full((4, 8), float(rank // 2))
    for _ in range(3):
        parallel(part)
    part[1, 1] += 1e-3 if rank == 1 else 0
    return refusal(parallel, part)


def another_state(rank: int) -> str:
    """One rank draws a number more than the others, which would drop other elements of whole tensors from then on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    x = torch.ones(8, 8)
    graph = capture(model, (x,))
    parallel = parallelize(model, random_strategy(graph, mesh_with((4,)), 1), mesh=device_mesh((4,)), graph=graph)
    parallel(x), parallel(x)
    torch.rand(1 if rank == 2 else 0)
    return refusal(parallel, x)


def seldom(rank: int) -> str:
    """Compared every third call, when asked so: a batch between two comparisons is noticed at the next one."""
    model, graph, strategy = model_and_strategy()
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph, compare_batches=3)
    for step in range(5):
        parallel(torch.full((8, 8), float(rank if step == 3 else 0))).sum().backward()
    return refusal(parallel, torch.zeros(8, 8))


def wrong_shape(rank: int) -> str:
    model, graph, strategy = model_and_strategy()
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph)
    return refusal(parallel, torch.ones(8, 7))  # a width that the model cannot take


def absent(rank: int) -> tuple[str, float]:
    start = time.monotonic()
    message = "" if rank == 0 else refusal(lambda: agree({"plan": "x"}, seconds=2))
    if rank == 0:
        time.sleep(3)
        agree({"plan": "x"}, seconds=2)
    return message, time.monotonic() - start


def not_finite(rank: int) -> str:
    gradient = torch.ones(3)
    gradient[1] = float("nan") if rank == 2 else 1.0
    check_finite([("a", torch.ones(2)), ("b", torch.ones(2))])
    return refusal(lambda: check_finite([("a", torch.ones(2)), ("b", gradient)]))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (other_weights, "weights: rank 2 differs"),
        (other_model, "model: rank 3 differs"),
        (other_batch, "batch: rank 1 differs"),
        (later_batch, "batch: rank 3 differs"),
        (later_batch_of_a_pipeline, "batch: rank 2 differs"),
        (later_rows, "batch: rank"),
        (seldom, "batch: ranks 1, 2, 3 differ"),
        (another_state, "random state: rank 2 differs"),
        (wrong_shape, "float32[8, 7]"),
        (not_finite, "gradient of b is not finite on rank 2"),
    ],
)
def test_differing_rank_is_named_everywhere(pool, what, expected):
    assert all(expected in message for message in pool.run(what))


def test_absent_rank_is_named_in_time(pool):
    answers = pool.run(absent)
    assert all("Rank 0 has not arrived" in message for message, _ in answers[1:])
    assert all(seconds < 120 for _, seconds in answers)  # the group itself would wait ten times as long


def stops_alone(rank: int) -> str:
    """A rank of a pipeline cannot make its stage: the others waited for it two minutes long."""
    with together("programs"):
        pass
    with pytest.raises(PlanError if rank == 1 else RunError) as caught, together("programs"):
        if rank == 1:
            raise PlanError("There is no such loop.", "Plan again.")
    return caught.value.message


def test_a_rank_that_stops_takes_the_others_along(pair):
    assert pair.run(stops_alone) == ["Rank 1 cannot go on: There is no such loop.", "There is no such loop."]
