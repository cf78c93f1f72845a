"""A given plan draws its own random numbers, and is compared with dropout: one process is given what it drew."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from shardwright.frontend import capture
from shardwright.runtime import computation
from shardwright.verification.forced_pipelines import forced_pipeline
from shardwright.verification.prepare import subject
from shardwright.verification.verify import verify_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from planting import deep


@functools.lru_cache
def plan():
    """Two stages whose blocks are computed again whole."""
    made, why = forced_pipeline(subject(deep, double=True).graph, 2)
    assert made is not None, why
    stages = tuple(replace(stage, strategy=replace(stage.strategy, lightly=frozenset())) for stage in made.stages)
    return replace(made, stages=stages)


class Idle(nn.Module):
    """Whose second half of the operators reads no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().exp().square().sin().mean()


def idle():
    return Idle(), (torch.randn(6, 4),), {}


class Shared(nn.Module):
    """All rows get the same noise, so that no micro-batch can draw it for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + torch.randn(4)).tanh().mean()


def test_a_pipeline_is_forced_where_there_can_be_one():
    graph = subject(idle, double=True).graph
    made, why = forced_pipeline(graph, 4)
    assert made is not None and not why and [stage.ranks for stage in made.stages] == [(0, 1), (2, 3)]
    assert forced_pipeline(graph, 3) == (None, "3 processes are no two halves")
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert "buffer" in forced_pipeline(capture(normed, (torch.randn(6, 4),)), 2)[1]
    it = subject(lambda: (Shared(), (torch.randn(6, 4),), {}), double=True)
    assert it.shown is not None and forced_pipeline(it.shown.graph, 2, 1) == (None, "all rows share what it draws")


def stage_without_parameters(rank: int) -> bool | None:
    made, _ = forced_pipeline(subject(idle, double=True).graph, 2)
    answer = verify_rank(idle, {True: made}, 2, forced=False, planned=True)
    return None if answer is None else answer.agrees


def test_a_stage_may_have_no_parameters(pair):
    assert pair.run(stage_without_parameters)[0]


def verified(rank: int, fault: bool):
    with mock.patch.object(computation, "set_random_state", **({} if fault else {"new": computation.set_random_state})):
        answer = verify_rank(deep, {True: plan()}, 2, forced=False, planned=True)
    return None if answer is None else (answer.agrees, answer.changes, answer.compared)


def test_recomputed_dropout_of_a_given_plan_is_compared(pair):
    agrees, changes, compared = pair.run(verified, False)[0]
    assert agrees and not any("dropout" in text for text in changes)
    assert any("2 operators" in text and "random numbers" in text for text in compared)
    agrees, _, _ = pair.run(verified, True)[0]
    assert not agrees
