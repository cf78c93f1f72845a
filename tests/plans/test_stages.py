"""Pipelines in plan files: nothing is lost, plans of one stage are as they were, what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import parse_cluster
from shardwright.errors import PlanError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner import plan_graph
from shardwright.plans import Plan, Stage, StagePrediction, from_json, to_json
from shardwright.program import Written
from shardwright.schedules import Schedule, gpipe


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return capture(model, (torch.empty(16, 32, device="meta"),))


@pytest.fixture(scope="module")
def plain(graph: Graph) -> Plan:
    return plan_graph(graph, parse_cluster("2xH100"))


@pytest.fixture(scope="module")
def made(graph: Graph, plain: Plan) -> Plan:
    def stage(operators: tuple[str, ...], ranks: tuple[int, ...]) -> Stage:
        splits = dict.fromkeys(operators, ("i0",))
        strategy = Strategy((("gpu", 2),), splits, {"x": (Shard(0),), "w": (Replicate(),)})
        return Stage(operators, ranks, strategy, Written(), StagePrediction(1.0, 0.25, 0.0, 1e6))

    names = tuple(op.name for op in graph.ops)
    stages = (stage(names[:2], (0, 1)), stage(names[2:], (2, 3)))
    return replace(
        plain, strategy=stages[0].strategy, decisions=Written(), stages=stages, microbatches=4, schedule=gpipe(2, 4)
    )


def test_a_pipeline_survives_its_file(made: Plan, graph: Graph) -> None:
    again = from_json(to_json(made))
    assert again == made
    assert again.devices == 4
    assert "2 stages, 4 micro-batches" in repr(again)
    again.check(graph)


def test_a_plan_of_one_stage_says_nothing_of_pipelines(plain: Plan) -> None:
    data = json.loads(to_json(plain))
    assert not {"stages", "schedule", "microbatches"} & data.keys()
    assert from_json(to_json(plain)).stages == ()


def test_the_schedule_is_one_readable_line_per_device(made: Plan) -> None:
    assert json.loads(to_json(made))["schedule"][0].startswith("0F0 0F1 0F2 0F3 0B")


def _damaged(made: Plan, **changes: object) -> str:
    return json.dumps(json.loads(to_json(made)) | changes)


def test_what_does_not_belong_together_is_refused(made: Plan, graph: Graph) -> None:
    with pytest.raises(PlanError, match="2 stages and 3 micro-batches"):
        from_json(_damaged(made, microbatches=3))
    with pytest.raises(PlanError, match="no schedule"):
        from_json(_damaged(made, schedule=[]))
    with pytest.raises(PlanError, match="damaged: stage 1 does not do the backward pass"):
        from_json(_damaged(made, schedule=["0F0 0B0", "1F0"]))
    with pytest.raises(PlanError, match="no stage"):
        from_json(_damaged(made, stages=[], schedule=[], splits={"a": ["i0", None]}, mesh=[["a", 2], ["b", 1]]))
    first, second = made.stages
    with pytest.raises(PlanError, match=r"ranks of the plan's stages are \[0, 1, 3, 4\]"):
        from_json(to_json(replace(made, stages=(first, replace(second, ranks=(3, 4))))))
    with pytest.raises(PlanError, match="mesh of 2 devices"):
        from_json(to_json(replace(made, stages=(first, replace(second, ranks=(2, 3, 4))))))
    interleaved = Schedule.parse("0F0 1F0 1B0 0B0")
    with pytest.raises(PlanError, match="another stage of its device"):
        from_json(to_json(replace(made, microbatches=1, schedule=interleaved)))
    lost = replace(made, stages=(first, replace(second, operators=second.operators[1:])))
    lacking = second.operators[0] if len(second.operators) > 1 else ""
    with pytest.raises(PlanError, match=f"{lacking!r} is in no stage" if lacking else "is in no stage"):
        lost.check(graph)
    turned = replace(
        made, stages=(replace(first, operators=second.operators), replace(second, operators=first.operators))
    )
    with pytest.raises(PlanError, match="which the later stage 1 makes"):
        turned.check(graph)
