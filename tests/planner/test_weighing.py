"""Weighing streams: no strategy lies below the bound on the step, and slow links raise it above computation alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from shardwright.cluster import Cluster, Link, Mesh, meshes, parse_cluster
from shardwright.costs.gradient_addition import least_adding
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.planner.outcomes import bounds
from shardwright.planner.planning import describe_graph
from shardwright.planner.trials import LEAST_UNHIDDEN, Trials, predict
from shardwright.planner.weighing import _grid, weighed

SLOW = Link("a slow link", 5e-6, 2e9)


def slowly(text: str) -> Cluster:
    return replace(parse_cluster(text), network=SLOW)


def layers(count: int, rows: int = 4096, width: int = 1024, around: bool = False) -> Graph:
    """Linear layers one after the other; ``around``: all but the first are added to what they read."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = x + layer(x) if around and number else layer(x)
            return x.sum()

    with torch.device("meta"):
        return capture(Layers(), (torch.empty(rows, width),), {})


def steps_of(graph: Graph, mesh: Mesh, trials: Trials, every: int = 1) -> list[float]:
    """The simulated step of every strategy, or of one in so many."""
    stated = trials.stated(mesh, "auto")
    steps, choices = [], itertools.product(*(range(len(node.options)) for node in stated.nodes))
    for choice in itertools.islice(choices, 0, None, every):
        try:
            steps.append(predict(graph, stated.strategy(np.array(choice)), mesh, "adamw").step_seconds)
        except ShardwrightError:  # no program of it can be run
            continue
    return steps


@pytest.mark.parametrize(("count", "rows"), [(1, 512), (1, 65536), (2, 4096), (2, 65536)])
def test_below_every_strategy_by_brute_force(count: int, rows: int) -> None:
    graph = layers(count, rows)
    for mesh in meshes(slowly("2x1xH100"), 1):
        trials = Trials(describe_graph(graph))
        steps = steps_of(graph, mesh, trials)
        assert len(steps) > 20
        bound = weighed(trials, mesh, "auto", least_adding(graph, mesh))
        assert trials.floor(mesh, "auto", LEAST_UNHIDDEN) <= bound <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize("rows", [512, 65536])
def test_below_strategies_that_add_up_gradients(rows: int) -> None:
    graph = layers(2, rows, around=True)
    for mesh in meshes(slowly("2x1xH100"), 1):
        trials, adding = Trials(describe_graph(graph)), least_adding(graph, mesh)
        assert adding > 0
        bound = bounds(trials, [mesh], "auto", 1.0)
        assert bound.step >= trials.floor(mesh, "auto", LEAST_UNHIDDEN) + adding
        assert bound.step <= min(steps_of(graph, mesh, trials, 11)) * (1 + 1e-9)


def test_traffic_that_computation_cannot_hide_counts() -> None:
    """Data parallelism over a slow link: computation alone says that twice the devices take half the time."""
    graph = layers(8, 1024, 4096)
    plan = plan_graph(graph, slowly("2x4xH100"), Options(fewer_devices=False, baselines=()))
    trials = Trials(describe_graph(graph))
    plain = min(trials.floor(mesh, "auto", LEAST_UNHIDDEN) for mesh in meshes(slowly("2x4xH100"), 3))
    assert plan.proof.step_bound > 1.2 * plain
    assert plan.proof.step_bound <= plan.prediction.step_seconds


def test_nothing_is_weighed_where_links_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(2, 65536)
    trials = Trials(describe_graph(graph))
    asked = []
    stated = Trials.stated
    monkeypatch.setattr(Trials, "stated", lambda self, *key: (asked.append(key), stated(self, *key))[1])
    for mesh in meshes(parse_cluster("4xH100"), 1):
        assert weighed(trials, mesh, "auto") == trials.floor(mesh, "auto", LEAST_UNHIDDEN)
    assert not any(pricing.links for _, _, *given in asked for pricing in given)


def test_weights_add_up_to_one() -> None:
    for streams in (2, 3, 4):
        assert np.allclose(_grid(streams).sum(axis=1), 1.0)
        assert _grid(streams).min() == 0.0
