"""Pins on every way to a plan: they hold, they are refused, or that way is not taken."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_graph, plan_jointly, plan_pipeline
from shardwright.planner.joint import find_pipelines

EIGHT = parse_cluster("8xH200")
PLAIN = {"baselines": (), "time_limit": 1.0}


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


def _rests(graph: Graph, plan: object, path: str) -> tuple:
    name = next(p.tensor for p in graph.parameters if path in p.paths)
    return plan.stages[0].strategy.resting[name]  # type: ignore[attr-defined, no-any-return]


def test_a_pin_of_two_axes_holds_whichever_search_answers(graph: Graph) -> None:
    options = Options(pins=("second.weight=S0,R",), forbidden=("first*@inner",), **PLAIN)
    plan = plan_graph(graph, EIGHT, options)
    assert _rests(graph, plan, "second.weight") == (Shard(0), Replicate())
    assert not isinstance(_rests(graph, plan, "first.weight")[1], Shard)
    assert plan.asked.pins == options.pins


def test_an_input_pinned_on_two_axes_holds(graph: Graph) -> None:
    name = next(i.tensor for i in graph.inputs if i.tensor)
    plan = plan_graph(graph, EIGHT, Options(pins=(f"{name}=S0,R",), **PLAIN))
    assert plan.stages[0].strategy.resting[name] == (Shard(0), Replicate())


def test_pins_that_contradict_each_other_are_refused(graph: Graph) -> None:
    with pytest.raises(ShardwrightError, match="contradicts itself"):
        plan_graph(graph, EIGHT, Options(pins=("second.weight=S0,R", "second.weight=R,S0"), **PLAIN))


@pytest.mark.parametrize("asked", [{"pins": ("nothing=S0",)}, {"forbidden": ("nothing@gpu",)}])
@pytest.mark.parametrize("way", ["one mesh", "stages of one device", "stages", "searched"])
def test_what_matches_nothing_is_refused_on_every_way(graph: Graph, asked: dict, way: str) -> None:
    options = Options(**asked, **PLAIN)
    with pytest.raises(ShardwrightError, match=r"nothing.*matches no parameter"):
        if way == "one mesh":
            plan_graph(graph, EIGHT, options)
        elif way == "searched":
            plan_jointly(graph, EIGHT, options)
        else:
            cluster = parse_cluster("2xH200") if "one device" in way else EIGHT
            plan_pipeline(graph, cluster, Pipelining(2, 4, "1f1b"), options)


def test_stages_are_asked_what_speaks_of_them_alone(graph: Graph) -> None:
    four = parse_cluster("4xH200")
    plan = plan_pipeline(graph, four, Pipelining(2, 4, "1f1b"), Options(pins=("second.weight=S0",), **PLAIN))
    name = next(p.tensor for p in graph.parameters if "second.weight" in p.paths)
    assert [stage.strategy.resting[name] for stage in plan.stages if name in stage.strategy.resting] == [(Shard(0),)]
    with pytest.raises(ShardwrightError, match="stage of one device"):
        two = parse_cluster("2xH200")
        plan_pipeline(graph, two, Pipelining(2, 4, "1f1b"), Options(pins=("second.weight=S0",), **PLAIN))


def test_pipelines_are_not_searched_under_pins(graph: Graph) -> None:
    options = Options(pins=("second.weight=S0",), **PLAIN)
    with pytest.raises(Infeasible, match="not searched under pins"):
        find_pipelines(graph, EIGHT, options)
    plan, joint = plan_jointly(graph, EIGHT, options)
    assert joint is None and plan.whole
    assert any("not searched under pins" in note for note in plan.notes)


def test_a_strategy_by_name_is_that_on_all_devices(graph: Graph) -> None:
    plan = plan_graph(graph, parse_cluster("2xH200"), Options(search="fsdp", **PLAIN))
    assert plan.stages[0].strategy.devices == 2
    assert any(isinstance(p, Shard) for p in _rests(graph, plan, "first.weight"))
