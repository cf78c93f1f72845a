"""Pipelines in plan files: nothing is lost, one mesh is a stage among others, what does not fit is refused."""

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
from shardwright.plans import Plan, Proof, Stage, StagePrediction, from_json, to_json
from shardwright.program import FixedDecisions
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
        return Stage(operators, ranks, strategy, FixedDecisions(), StagePrediction(1.0, 0.25, 0.0, 1e6))

    names = tuple(op.name for op in graph.ops)
    stages = (stage(names[:2], (0, 1)), stage(names[2:], (2, 3)))
    return replace(plain, stages=stages, schedule=gpipe(2, 4))


def test_a_pipeline_survives_its_file(made: Plan, graph: Graph) -> None:
    again = from_json(to_json(made))
    assert again == made
    assert again.devices == 4
    assert "2 stages, 4 micro-batches" in repr(again)
    again.check(graph)


def test_one_mesh_is_one_stage_that_takes_the_batch_in_one_go(plain: Plan, graph: Graph) -> None:
    data = json.loads(to_json(plain))
    assert data["schedule"] == ["0F0 0B0"]
    (stage,) = data["stages"]
    assert stage["operators"] == [op.name for op in graph.ops] and stage["ranks"] == list(range(plain.devices))
    assert plain.whole and plain.microbatches == 1


def test_what_is_not_trained_has_no_backward_pass() -> None:
    model = torch.nn.Linear(32, 64).eval()
    graph = capture(model, (torch.empty(16, 32),))
    assert str(plan_graph(graph, parse_cluster("2xH100")).schedule) == "0F0"


def without_bounds(plan: Plan) -> Proof:
    """Earlier formats told in words what bounds are about."""
    return Proof(cost=plan.proof.cost, seconds=plan.proof.seconds)


@pytest.mark.parametrize("number", [1, 2])
def test_files_of_earlier_formats_are_upgraded(plain: Plan, number: int) -> None:
    """One mesh had its strategy at the top, and neither stages nor a schedule."""
    data = json.loads(to_json(plain)) | {"format": f"shardwright-plan-{number}"}
    (stage,) = data.pop("stages")
    del data["schedule"], stage["operators"], stage["ranks"], stage["prediction"]
    assert from_json(json.dumps(data | stage)) == replace(plain, proof=without_bounds(plain))


def test_a_file_of_format_two_with_stages_named_its_micro_batches(made: Plan) -> None:
    data = json.loads(to_json(made)) | {"format": "shardwright-plan-2", "microbatches": 4, "mesh": [["gpu", 2]]}
    assert from_json(json.dumps(data)) == replace(made, proof=without_bounds(made))


def test_a_file_cannot_ask_for_more_ranks_than_anybody_has(plain: Plan) -> None:
    """Of an earlier format the mesh says how many there are."""
    data = json.loads(to_json(plain)) | {"format": "shardwright-plan-2"}
    (stage,) = data.pop("stages")
    del data["schedule"], stage["operators"], stage["ranks"], stage["prediction"]
    with pytest.raises(PlanError):
        from_json(json.dumps(data | stage | {"mesh": [["gpu", 10**12]]}))


def test_the_schedule_is_one_readable_line_per_device(made: Plan) -> None:
    assert json.loads(to_json(made))["schedule"][0].startswith("0F0 0F1 0F2 0F3 0B")


def _damaged(made: Plan, **changes: object) -> str:
    return json.dumps(json.loads(to_json(made)) | changes)


def test_what_does_not_belong_together_is_refused(made: Plan, graph: Graph) -> None:
    with pytest.raises(PlanError, match="2 stages, its schedule 1"):
        from_json(_damaged(made, schedule=["0F0 0B0"]))
    with pytest.raises(PlanError, match="a schedule without any action"):
        from_json(_damaged(made, schedule=[]))
    with pytest.raises(PlanError, match="damaged: stage 1 does not do the backward pass"):
        from_json(_damaged(made, schedule=["0F0 0B0", "1F0"]))
    with pytest.raises(PlanError, match="0 stages, its schedule 2"):
        from_json(_damaged(made, stages=[]))
    first, second = made.stages
    with pytest.raises(PlanError, match=r"\[0, 1, 3, 4\]: they go from 0 on"):
        from_json(to_json(replace(made, stages=(first, replace(second, ranks=(3, 4))))))
    with pytest.raises(PlanError, match=r"\[0, 1, 1, 2\]: each must be there once"):
        replace(made, stages=(first, replace(second, ranks=(1, 2))))
    with pytest.raises(PlanError, match="mesh of 2 devices"):
        replace(made, stages=(first, replace(second, ranks=(2, 3, 4))))
    with pytest.raises(PlanError, match="another stage of its device"):
        replace(made, schedule=Schedule.parse("0F0 1F0 1B0 0B0"))
    lost = replace(made, stages=(first, replace(second, operators=second.operators[1:])))
    lacking = second.operators[0] if len(second.operators) > 1 else ""
    with pytest.raises(PlanError, match=f"{lacking!r} is in no stage" if lacking else "is in no stage"):
        lost.check(graph)
    turned = replace(
        made, stages=(replace(first, operators=second.operators), replace(second, operators=first.operators))
    )
    with pytest.raises(PlanError, match="which the later stage 1 makes"):
        turned.check(graph)
