"""Stages that do the same up to names are priced once, and the step is the one of all of them priced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright import zoo
from shardwright.cluster import parse_cluster
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_pipeline
from shardwright.plans import Plan
from shardwright.program.pipeline import Pipeline
from shardwright.simulator.alike import doing
from shardwright.simulator.links import Links
from shardwright.simulator.stages import price_stages
from shardwright.simulator.timeline import Timeline, simulated


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return capture(*zoo.build("gpt", layers=8, width=32, heads=2, seq=16, vocab=32, batch=8))


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    asked = Pipelining(4, 4, "1f1b", cuts=["blocks.2", "blocks.4", "blocks.6"])
    options = Options("fsdp", baselines=(), recompute="blocks")
    return plan_pipeline(graph, parse_cluster("2x4xH100"), asked, options)


def pipeline(plan: Plan, graph: Graph) -> Pipeline:
    return Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule)


def kinds(plan: Plan, pipe: Pipeline) -> list[object]:
    return [(mesh, doing(pipe, number)) for number, mesh in enumerate(plan.meshes)]


def test_stages_of_equal_blocks_are_priced_once_and_take_what_all_of_them_take(plan: Plan, graph: Graph) -> None:
    pipe = pipeline(plan, graph)
    alike = kinds(plan, pipe)
    assert [alike.index(kind) for kind in alike] == [0, 1, 1, 3]  # the first embeds, the last has the loss

    def played(same: list[object]) -> Timeline:
        decisions = [PricedDecisions(mesh) for mesh in plan.meshes]
        times = price_stages(pipe, plan.meshes, decisions, "adamw", kinds=same)
        assert (times[1, 2] is times[2, 2]) == bool(same)
        return simulated(times, Links(pipe, plan.cluster))

    shared, each = played(alike), played([])
    for quantity in ("seconds", "memory", "stages", "exposed_seconds", "sum_seconds", "communication_bytes"):
        assert getattr(shared, quantity) == getattr(each, quantity), quantity
    assert plan.prediction.step_seconds == each.seconds


@pytest.mark.parametrize("changed", ["splits", "resting", "regathered", "recomputed"])
def test_stages_that_are_split_or_kept_otherwise_are_not_alike(plan: Plan, graph: Graph, changed: str) -> None:
    stage = plan.stages[2]
    strategy, name = stage.strategy, next(iter(stage.strategy.regathered))
    other = {
        "splits": {**strategy.splits, stage.operators[0]: (None,) * len(strategy.axes)},
        "resting": {**strategy.resting, name: ()},
        "regathered": strategy.regathered - {name},
        "recomputed": strategy.recomputed[1:],
    }[changed]
    stages = [
        one if one is not stage else replace(one, strategy=replace(strategy, **{changed: other})) for one in plan.stages
    ]
    pipe = replace(pipeline(plan, graph), stages=tuple(stages))
    assert doing(pipe, 1) != doing(pipe, 2)
