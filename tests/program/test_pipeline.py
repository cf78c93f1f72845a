"""The steps of all ranks of a pipeline: parcels meet, nobody waits for ever, only what is needed travels."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from runtime.pipelines import halves, pipeline_plan
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.program.passes import split_backward
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.transfers import Holding, parcels
from shardwright.program.validate import validate_program
from shardwright.schedules import RECIPES, Schedule, known_schedule


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    return capture(model, (torch.empty(8, 8),))


def _pipeline(graph: Graph, stages: int, count: int, schedule: str | Schedule, devices: int | None = None) -> Pipeline:
    plan = pipeline_plan(graph, halves(graph, stages), count, schedule, devices=devices)
    return Pipeline.of(graph, plan.stages, count, plan.schedule)


@pytest.mark.parametrize("name", RECIPES)
def test_every_known_schedule_can_be_run(graph: Graph, name: str) -> None:
    for count in (1, 3, 8):
        devices = 4 // (RECIPES[name].stages_per_device or 2)
        check(_pipeline(graph, 4, count, known_schedule(name, 4, count, devices)))


def test_ranks_that_would_wait_for_each_other_are_refused(graph: Graph) -> None:
    circle = Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1F0 1B0 1B1")
    with pytest.raises(LoweringError, match=r"Rank \d would wait for ever before"):
        check(_pipeline(graph, 2, 2, circle))


def test_last_stage_forwards_may_be_out_of_order(graph: Graph) -> None:
    check(_pipeline(graph, 2, 2, Schedule.parse("0F0 0F1 0B0 0B1 | 1F1 1F0 1B0 1B1")))


def test_only_the_needed_pieces_travel_each_once() -> None:
    have, want = Holding((Shard(0),), (2,), (2,)), Holding((Replicate(), Shard(0)), (2, 4), (2, 4))
    found = parcels((8, 3), have, want)
    assert [(p.source, p.target, p.take) for p in found[:4]] == [
        (0, 0, ((0, 2), (0, 3))),
        (0, 1, ((2, 4), (0, 3))),
        (1, 2, ((0, 2), (0, 3))),
        (1, 3, ((2, 4), (0, 3))),
    ]
    assert len(found) == 8
    same = parcels((8, 3), have, have)
    assert [(p.source, p.target) for p in same] == [(0, 0), (1, 1)]


def test_a_split_backward_pass_is_sound_and_has_its_weights_last(graph: Graph) -> None:
    pipeline = _pipeline(graph, 2, 2, "zb-h1")
    plan = pipeline_plan(graph, halves(graph, 2), 2, "zb-h1")
    decisions = PricedDecisions(plan.meshes[1])
    whole = pipeline.program(1, 4, 1, decisions)
    wanted = [whole.flow.rest[name] for name in pipeline.parts[4][1].wanted]
    split = split_backward(whole, wanted)
    validate_program(split)
    first, rest = ([str(split.instructions[n].kind) for n in split.sections[kind]] for kind in "IW")
    assert "weight" not in first
    assert rest.count("weight") == 4
    assert first.count("input") == 4
    assert sorted(map(str, (i.kind for i in whole.instructions))) == sorted(
        map(str, (i.kind for i in split.instructions))
    )


def test_the_list_of_a_rank_holds_every_pass_once_and_everything_before_its_use(graph: Graph) -> None:
    plan = pipeline_plan(graph, halves(graph, 2), 2, "zb-h1")
    pipeline = _pipeline(graph, 2, 2, "zb-h1")
    decisions = PricedDecisions(plan.meshes[1])
    lines = [line.instruction for line in pipeline.step(1, [decisions, decisions]).lines()]
    kinds = [str(line.kind) for line in lines]
    assert kinds.count("receive") == kinds.count("send") == 2
    assert kinds.count("weight") == kinds.count("input") == 2 * 4
    assert kinds.count("update") == 1
    assert kinds[-1] == "update"
    assert {(line.stage, line.microbatch) for line in lines} == {(1, 0), (1, 1), (1, 2)}
    for number, line in enumerate(lines):
        assert all(earlier < number for earlier in line.after)
    first = next(i for i, line in enumerate(lines) if str(line.kind) == "operator")
    assert kinds[lines[first].after[0]] == "receive"
