"""Whoever searches: one judge, one record, one place where plans are made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate

import shardwright.planner
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner import Options, Pipelining, plan_pipeline
from shardwright.planner.delivering import deliver
from shardwright.planner.judging import judge
from shardwright.planner.proposals import Laid, LaidOut, on_one_mesh
from shardwright.plans import Prediction, Stage
from shardwright.program import build
from shardwright.program.boundary import arriving
from shardwright.program.pipeline import Pipeline
from shardwright.schedules import known_schedule
from shardwright.verification.forced_pipelines import forced_pipeline

NOTHING = Laid((), known_schedule("1f1b", 1, 1))


def proposed(name: str, *, unhidden: float = 0.0, bound: float = 0.0, memory: float = 0.0) -> LaidOut:
    expected = Prediction(1.0, 1.0, memory, 0.0, 0.0, True)
    return LaidOut(name=name, shape=(("gpu", 2),), expected=expected, unhidden=unhidden, bound=bound, layout=NOTHING)


def test_only_one_module_of_the_planner_makes_plans() -> None:
    makers = set()
    for path in Path(shardwright.planner.__file__).parent.glob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        makers |= {path.name for name in calls if isinstance(name, ast.Name) and name.id == "Plan"}
    assert makers == {"delivering.py"}


def test_what_cannot_be_faster_is_not_simulated() -> None:
    """Seconds are 3, 2 and 9; what fits and is faster is what has to be beaten from then on."""
    seconds = {"first": 3.0, "smaller": 2.0, "hidden": 9.0, "last": 1.0}
    asked = []

    def simulated(one: LaidOut) -> LaidOut:
        asked.append(one.name)
        told = replace(one.expected, step_seconds=seconds[one.name], fits=one.name != "smaller")
        return replace(one, prediction=told)

    def proposals() -> Iterator[LaidOut]:
        yield proposed("first")
        yield proposed("large", memory=11.0)
        yield proposed("smaller", unhidden=2.9)
        yield proposed("slow", unhidden=3.0)
        yield proposed("hidden", unhidden=2.5, bound=2.9)
        yield proposed("end", bound=3.1)
        raise AssertionError("asked for what comes after the end")

    found = list(judge(proposals(), simulated, room=10.0))
    assert [one.name for one in found] == ["first", "large", "smaller", "hidden"]
    assert asked == ["first", "smaller", "hidden"]
    assert found[1].prediction is None and not found[1].fits and found[1].seconds == inf
    assert list(judge([proposed("last", unhidden=1.0)], simulated, beat=1.0)) == []


def test_rows_say_whether_something_was_simulated() -> None:
    one = proposed("one")
    assert one.row().simulated is False and one.row().prediction == one.expected
    told = replace(one, prediction=replace(one.expected, step_seconds=2.0))
    assert told.row("other").simulated and told.row("other").name == "other"
    refused = replace(one, refusal=LoweringError("it cannot be run."))
    assert (refused.row().prediction, refused.row().note) == (None, "it cannot be run.")


@pytest.fixture(scope="module")
def graph() -> Graph:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x))).square().mean()

    with torch.device("meta"):
        return capture(Two(), (torch.empty(512, 64),))


def both_axes(number: int, stage: Stage) -> Stage:
    """The same on a second mesh axis too, along which nothing is cut."""
    one = stage.strategy
    strategy = replace(
        one,
        axes=(("outer", 2), ("inner", 2)),
        splits={name: (*split, None) for name, split in one.splits.items()},
        resting={name: (*layout, Replicate()) for name, layout in one.resting.items()},
        kept={name: (*layout, Replicate()) for name, layout in one.kept.items()},
    )
    return replace(stage, ranks=tuple(range(4 * number, 4 * number + 4)), strategy=strategy)


def test_running_a_stage_asks_no_price(graph: Graph) -> None:
    """Decisions of pipelines that were searched had no routes for gradients that go back to the stage before."""
    by_hand, why = forced_pipeline(graph, 4)
    assert by_hand is not None, why
    laid = Laid(tuple(both_axes(*one) for one in enumerate(by_hand.stages)), by_hand.schedule)
    proposal = LaidOut(name="by hand", shape=(), expected=by_hand.prediction, layout=laid)
    plan = deliver(graph, parse_cluster("8xH100"), Options(), proposal)
    cut = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule)
    sent_back = 0
    for parts in cut.parts.values():
        for stage, part in zip(plan.stages, parts, strict=True):
            flow = build(part.graph, stage.strategy, stage.decisions, device="cuda").flow
            for name in part.wanted:
                _, back = arriving(flow, stage.decisions, name, stage.strategy.resting[name])
                sent_back += len(back)
    assert sent_back
    assert plan.prediction.step_seconds > 0 and all(stage.prediction is not None for stage in plan.stages)


def test_what_was_simulated_is_not_simulated_again(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = parse_cluster("1xH100")
    whole = {name: (Replicate(),) for name in graph.sources}
    strategy = Strategy(mesh_of(cluster).names, {op.name: (None,) for op in graph.ops}, whole)
    said = Prediction(1.0, 2.0, 3.0, 4.0, 5.0, True)
    monkeypatch.setattr("shardwright.planner.delivering._simulated", None)
    proposal = LaidOut(name="", shape=(), expected=said, layout=on_one_mesh(graph, strategy), prediction=said)
    plan = deliver(graph, cluster, Options(batch_norm="per-piece"), proposal)
    assert plan.prediction == said
    assert plan.batch_norm == "whole"  # of one micro-batch; verify refuses plans of others


def test_a_stage_has_the_memory_of_its_own_devices() -> None:
    """A stage on a large device was held to the memory of the smallest in the cluster."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = torch.nn.Linear(1024, 56_000), torch.nn.Linear(56_000, 56_000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.large(torch.relu(self.small(x))).square().mean()

    with torch.device("meta"):
        graph = capture(Wide(), (torch.empty(8, 1024),))
    cluster = parse_cluster("1xA100-40GB+1xH100")
    plan = plan_pipeline(graph, cluster, Pipelining(2, 2, "1f1b", ("large",)), Options(baselines=()))
    needed = [stage.prediction.memory_bytes for stage in plan.stages if stage.prediction is not None]
    assert needed[0] < 40e9 < needed[1] < 80e9 and plan.prediction.fits
