"""A rank that differs, or does not come, is named on every rank within a bounded time."""

from __future__ import annotations

import time

import pytest
import torch

from lowering.strategies import mesh_with, random_strategy
from runtime.workers import device_mesh
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.runtime import parallelize
from shardwright.runtime.agreement import agree, check_finite


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


def wrong_shape(rank: int) -> str:
    model, graph, strategy = model_and_strategy()
    parallel = parallelize(model, strategy, mesh=device_mesh((4,)), graph=graph)
    return refusal(parallel, torch.ones(7, 8))


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
        (wrong_shape, "float32[7, 8]"),
        (not_finite, "gradient of b is not finite on rank 2"),
    ],
)
def test_differing_rank_is_named_everywhere(pool, what, expected):
    assert all(expected in message for message in pool.run(what))


def test_absent_rank_is_named_in_time(pool):
    answers = pool.run(absent)
    assert all("Rank 0 has not arrived" in message for message, _ in answers[1:])
    assert all(seconds < 10 for _, seconds in answers)
