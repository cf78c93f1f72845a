"""The planner beside the whole truth: on problems so small that every strategy can be simulated, and in cases whose winner
is known. What the planner delivers is the best there is, and what it proves lies below that, but not far."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.cli._found import fits_text
from shardwright.cluster import Cluster, meshes_and_line, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, plan_jointly
from shardwright.planner.planning import describe_graph
from shardwright.planner.trials import Trials, predict
from shardwright.plans import Plan, Prediction
from shardwright.plans.serial import from_json, to_json
from shardwright.reports.summary import race
from shardwright.search.choose import evaluate

ALL_DEVICES = Options(baselines=(), fewer_devices=False, gap=0.0)


class Mean(nn.Module):
    """The mean square of what layers make."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def captured(model: nn.Module, *shape: int) -> Graph:
    return capture(model, (torch.empty(shape, dtype=torch.bfloat16, device="meta"),), {})


def linear(rows: int, width: int, out: int) -> Graph:
    with torch.device("meta"):
        return captured(Mean(nn.Linear(width, out, bias=False)).bfloat16(), rows, width)


def everything(graph: Graph, cluster: Cluster) -> list[Prediction]:
    """Every strategy of the whole space, simulated."""
    trials, found = Trials(describe_graph(graph)), []
    for mesh in meshes_and_line(cluster):
        stated = trials.stated(mesh, "auto")
        counts = [range(len(node.options)) for node in stated.nodes]
        assert prod(map(len, counts)) < 2_000, "too many to try them all"
        for choice in product(*counts):
            if evaluate(stated.problem, np.array(choice)).cost < float("inf"):
                found.append(predict(graph, stated.strategy(choice), mesh, "adamw"))
    return found


@pytest.fixture(scope="module", params=[(4096, 4096, 4096), (64, 8192, 4096)], ids=["even", "flat"])
def tried(request: pytest.FixtureRequest) -> tuple[Graph, Cluster, list[Prediction]]:
    graph, cluster = linear(*request.param), parse_cluster("2xH100")
    return graph, cluster, everything(graph, cluster)


def test_the_best_of_all_strategies_is_found_and_what_is_proved_lies_closely_below(
    tried: tuple[Graph, Cluster, list[Prediction]],
) -> None:
    graph, cluster, every = tried
    assert len(every) > 100 and all(p.fits for p in every)
    plan = plan_graph(graph, cluster, ALL_DEVICES)
    assert plan.prediction.step_seconds == min(p.step_seconds for p in every)
    closely_below(plan, every)


def test_what_is_proved_of_the_step_does_not_follow_the_plan(
    tried: tuple[Graph, Cluster, list[Prediction]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliver the slowest candidate instead of the fastest: the bounds stay below the best strategy there is."""
    graph, cluster, every = tried
    monkeypatch.setattr(Trials, "best", lambda _, some, search: max(some, key=lambda f: f.prediction.step_seconds))
    plan = plan_graph(graph, cluster, replace(ALL_DEVICES, baselines=("data-parallel", "megatron")))
    assert plan.prediction.step_seconds > 1.05 * min(p.step_seconds for p in every)
    closely_below(plan, every)


def closely_below(plan: Plan, every: list[Prediction]) -> None:
    """What is proved holds of every strategy, and leaves no more open than what a launch and a queue may take."""
    step, summed = min(p.step_seconds for p in every), min(p.sum_seconds for p in every)
    assert 0.95 * step <= plan.proof.step_bound <= step
    assert 0.97 * summed <= plan.proof.sum_bound <= summed
    assert not any(note.startswith("no bound") for note in plan.notes)


class Words(nn.Module):
    """Words, normed, and the loss over the next ones."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x).flatten(0, 1).float(), labels.flatten())


@pytest.fixture(scope="module")
def words() -> Graph:
    with torch.device("meta"):
        tokens = torch.empty(32, 64, dtype=torch.long)
        return capture(Words(8192, 512).bfloat16(), (tokens, tokens.clone()), {})


def test_a_recipe_that_is_faster_than_what_sums_lead_to_is_delivered() -> None:
    """The best sum, and what lies near it, overlaps worse than FSDP: found unasked, though nobody asked to see a recipe."""
    with torch.device("meta"):
        tokens = torch.empty(64, 256, dtype=torch.long)
        wide = capture(Words(1024, 2048).bfloat16(), (tokens, tokens.clone()), {})
    cluster = parse_cluster("4xH200")
    plan = plan_graph(wide, cluster, ALL_DEVICES)
    assert "the simulated winner is the fsdp strategy" in plan.notes
    recipe = plan_graph(wide, cluster, replace(ALL_DEVICES, search="fsdp"))
    assert plan.prediction.step_seconds == recipe.prediction.step_seconds


def test_gathered_parameters_are_kept_where_that_is_faster(words: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room to keep them, and gathering them again would not hide."""
    cluster = parse_cluster("4xA100-40GB")
    plan = plan_graph(words, cluster, ALL_DEVICES)
    monkeypatch.setattr(Trials, "keeping", lambda *_: iter(()))
    again = plan_graph(words, cluster, ALL_DEVICES)
    assert plan.prediction.step_seconds < 0.99 * again.prediction.step_seconds


def test_one_axis_over_all_devices_is_the_plan_where_it_is_faster() -> None:
    """Nobody asks for fewer axes: what they would find is found."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        graph = captured(Mean(layer).bfloat16(), 32, 64, 512)
    cluster = parse_cluster("2x2xA100-40GB")
    found, line = (plan_graph(graph, cluster, replace(ALL_DEVICES, max_axes=most)) for most in (2, 1))
    assert found.stages[0].strategy.axes == line.stages[0].strategy.axes == (("gpu", 4),)
    assert found.prediction.step_seconds == line.prediction.step_seconds
    assert found.proof.step_bound <= line.proof.step_bound


def waist() -> Graph:
    """Two towers of three wide layers with little between them: what one stage sends the next."""
    wide, narrow = 4096, 128
    tower = lambda first, last: (
        *(nn.Linear(first, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()),
        nn.Linear(wide, last),
    )
    with torch.device("meta"):
        model = Mean(*tower(wide, narrow), nn.ReLU(), *tower(narrow, wide), nn.ReLU()).bfloat16()
        return captured(model, 16384, wide)


def over(links: float) -> Plan:
    """The faster of one mesh and stages, on links so many times as fast."""
    plain = parse_cluster("2xH100")
    [node] = plain.nodes
    link = replace(node.link, bandwidth=links * node.link.bandwidth)
    cluster = replace(plain, nodes=(replace(node, link=link),))
    plan, joint = plan_jointly(waist(), cluster, Options(baselines=()))
    assert joint is not None
    others = [c.prediction.step_seconds for c in plan.candidates if c.prediction is not None]
    assert plan.prediction.step_seconds == min(others)
    assert sorted(others)[1] > 1.1 * plan.prediction.step_seconds
    return plan


def test_two_stages_are_the_plan_where_links_are_slow() -> None:
    assert len(over(0.01).stages) == 2


@pytest.fixture(scope="module")
def flat() -> Plan:
    return over(1.0)


def test_one_mesh_is_the_plan_where_links_are_fast(flat: Plan) -> None:
    assert flat.whole


def test_rows_that_were_not_simulated_say_so(flat: Plan) -> None:
    """Sums leave out what overlaps and what programs keep: nobody knows whether such a pipeline fits."""
    rows = {c.name: c for c in flat.candidates if c.prediction is not None}
    assert rows["auto"].simulated and fits_text(rows["auto"]) == "yes"
    summed = [c for name, c in rows.items() if name != "auto"]
    assert summed and not any(c.simulated for c in summed)
    assert {fits_text(c) for c in summed} == {"unknown: by sums, not simulated"}
    assert "by sums: not simulated, so it may not fit" in race(flat)
    assert from_json(to_json(flat), "plan").candidates == flat.candidates
