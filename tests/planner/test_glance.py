"""A glance at two short graphs tells what simulating every event of the deep one would."""

from __future__ import annotations

import pytest
import torch

from shardwright import zoo
from shardwright.cluster import mesh_of, meshes, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, predict
from shardwright.planner.glance import SLACK, glance
from shardwright.planner.planning import describe_graph
from shardwright.search.strategies import find_strategy


def _gpt(layers: int) -> Graph:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=layers, width=4096, heads=32, seq=512, vocab=4096, batch=64)
        return capture(model, args, kwargs)


@pytest.fixture(scope="module")
def deep() -> Graph:
    return _gpt(32)


@pytest.mark.parametrize("cluster", ["8xH100", "2x4xA100-80GB"])
@pytest.mark.parametrize("name", ["auto", "fsdp", "zero-2", "megatron", "data-parallel"])
def test_it_agrees_with_the_simulation_of_every_event(deep: Graph, cluster: str, name: str) -> None:
    mesh = mesh_of(parse_cluster(cluster))
    strategy = find_strategy(describe_graph(deep), mesh, name).strategy
    whole = predict(deep, strategy, mesh, "adamw")
    short = glance(deep, strategy, mesh, "adamw", mesh.device.usable_memory)
    assert short is not None
    for field in ("step_seconds", "memory_bytes", "communication_bytes"):
        assert getattr(short, field) == pytest.approx(getattr(whole, field), rel=SLACK), field


def test_a_shallow_model_is_simulated_as_it_is() -> None:
    graph, mesh = _gpt(4), mesh_of(parse_cluster("8xH100"))
    strategy = find_strategy(describe_graph(graph), mesh, "fsdp").strategy
    assert glance(graph, strategy, mesh, "adamw", 1e12) is None


def test_what_a_plan_predicts_is_never_a_glance(deep: Graph) -> None:
    cluster = parse_cluster("8xH100")
    made = plan_graph(deep, cluster, Options(baselines=("fsdp",), fewer_devices=False))
    mesh = next(mesh for mesh in meshes(cluster, 2) if mesh.names == made.strategy.axes)
    assert predict(deep, made.strategy, mesh, "adamw") == made.prediction
    assert made.candidates[0].prediction == made.prediction
