"""A rank that calls the model while others do something else: all are told, in time, what is wrong and what to do."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from lowering.strategies import mesh_with
from runtime.pipelines import halves, pipeline_plan
from runtime.test_training import fsdp_like
from runtime.workers import device_mesh
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.program.steps import Line
from shardwright.runtime import handshake, parallelize


def parallel(kind: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)), torch.randn(8, 6)
    graph = capture(model, (x,))
    if kind == "stages":
        return parallelize(model, pipeline_plan(graph, halves(graph, 2), 2, "1f1b"), (x,), graph=graph), x
    strategy = fsdp_like(graph, mesh_with((2,)))
    return parallelize(model, strategy, (x,), mesh=device_mesh((2,)), graph=graph), x


def evaluated(module: Any, x: torch.Tensor) -> None:
    module.eval()
    with torch.no_grad():
        module(x).sum().item()
    module.train()


def trained(module: Any, x: torch.Tensor) -> None:
    module(x).sum().backward()


def alone(rank: int, kind: str, before: str) -> tuple[str, str, float]:
    """Rank 0 evaluates; what all ranks did ``before`` decides what it knows of such a call."""
    module, x = parallel(kind)
    if before != "nothing":
        trained(module, x)
    if before == "evaluation":
        evaluated(module, x)
        trained(module, x)
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        if rank == 0:
            evaluated(module, x)
        trained(module, x)
    return caught.value.message, caught.value.remedy, time.monotonic() - started


@pytest.mark.parametrize("before", ["nothing", "training", "evaluation"])
@pytest.mark.parametrize("kind", ["mesh", "stages"])
def test_evaluation_on_rank_0_alone(pair, kind, before):
    answers = pair.run(alone, kind, before)
    for message, remedy, seconds in answers:
        assert "The ranks make different calls" in message, answers
        assert before != "nothing" or "rank 0 captures the model for a call of a new kind" in message, answers
        assert "`if rank == 0:`" in remedy
        assert seconds < 60


@pytest.mark.parametrize(
    "trouble",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28154",
    ],
)
def test_a_rank_that_has_ended_or_never_comes_is_spoken_of(monkeypatch, trouble):
    def gathering(*_: Any) -> Any:
        raise RuntimeError(trouble)

    monkeypatch.setattr(handshake, "start_gathering", gathering)
    told = handshake.Handshake([Line("group", 2, 0)], torch.tensor([0, 1]), torch.device("cpu"))
    with pytest.raises(RunError, match="calls the model without gradients, and not all others do") as caught:
        told.tell(handshake.kind(handshake.WITHOUT_GRADIENTS))
    assert trouble in caught.value.message and "`if rank == 0:`" in caught.value.remedy
