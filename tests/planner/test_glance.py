"""A glance at two short graphs tells what simulating every event of the deep one would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright import zoo
from shardwright.cluster import Mesh, mesh_of, meshes, parse_cluster
from shardwright.errors import Infeasible
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, planning, predict, trials
from shardwright.planner import glance as glances
from shardwright.planner.glance import SLACK, glance
from shardwright.planner.outcomes import Outcome, search_by_name
from shardwright.planner.planning import describe_graph
from shardwright.planner.trials import Trials
from shardwright.search.baselines import BASELINES, TWINS
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


def test_of_many_small_blocks_it_takes_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks fill a bucket of gradients, so a few of them would not tell what a long run takes."""
    mesh = mesh_of(parse_cluster("8xH100"))
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=80, width=1024, heads=8, seq=256, vocab=1024, batch=64)
        graph = capture(model, args, kwargs)
    described = describe_graph(graph)
    assert (
        glance(graph, find_strategy(described, mesh, "fsdp").strategy, mesh, "adamw", 1e12) is None
    )  # too few of them
    monkeypatch.setattr(glances, "MANY", 4)
    for name in ("fsdp", "megatron", "data-parallel"):
        strategy = find_strategy(described, mesh, name).strategy
        whole, short = predict(graph, strategy, mesh, "adamw"), glance(graph, strategy, mesh, "adamw", 1e12)
        assert short is not None
        for field in ("step_seconds", "memory_bytes", "communication_bytes"):
            assert getattr(short, field) == pytest.approx(getattr(whole, field), rel=SLACK), (name, field)


def test_a_shallow_model_is_simulated_as_it_is() -> None:
    graph, mesh = _gpt(4), mesh_of(parse_cluster("8xH100"))
    strategy = find_strategy(describe_graph(graph), mesh, "fsdp").strategy
    assert glance(graph, strategy, mesh, "adamw", 1e12) is None


def test_what_a_plan_predicts_is_never_a_glance(deep: Graph) -> None:
    cluster = parse_cluster("8xH100")
    made = plan_graph(deep, cluster, Options(baselines=("fsdp",), fewer_devices=False))
    mesh = next(mesh for mesh in meshes(cluster, 2) if mesh.names == made.stages[0].strategy.axes)
    assert predict(deep, made.stages[0].strategy, mesh, "adamw") == made.prediction
    assert made.candidates[0].prediction == made.prediction


def test_rows_of_slower_recipes_are_as_exact_as_a_glance_and_those_of_close_ones_as_a_plan(deep: Graph) -> None:
    cluster = parse_cluster("2x4xA100-80GB")
    names = ("fsdp", "megatron", "zero-2")
    made = plan_graph(deep, cluster, Options(baselines=names, fewer_devices=False))
    for row in made.candidates[1:]:
        assert row.prediction is not None
        close = row.prediction.step_seconds <= (1 + SLACK) * made.prediction.step_seconds
        alone = plan_graph(deep, cluster, Options(search=row.name, baselines=(), fewer_devices=False)).prediction
        assert row.prediction.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12 if close else SLACK)
        assert row.prediction.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12 if close else SLACK)


def test_every_recipe_competes_in_a_deep_model_too(deep: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def noting(trials: Trials, shapes: Sequence[Mesh], name: str, *rest: Any) -> Outcome:
        searched.append(name)
        return search_by_name(trials, shapes, name, *rest)

    monkeypatch.setattr(planning, "search_by_name", noting)
    options = Options(baselines=(), max_axes=1, fewer_devices=False)
    found = plan_graph(deep, parse_cluster("8xH100"), options).prediction.step_seconds
    assert set(BASELINES) - set(TWINS) <= set(searched)
    for name in ("all-row-greedy", "equal-chop", "no-reductions"):
        alone = plan_graph(deep, parse_cluster("8xH100"), replace(options, search=name))
        assert found <= alone.prediction.step_seconds * (1 + 1e-9), name


def test_what_just_does_not_fit_is_recomputed_and_what_fits_at_a_glance_alone_is_no_plan(
    deep: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks recomputed have figures of their own; and the peak of a deep model may lie elsewhere than a short one's."""
    cluster, options = parse_cluster("8xH100"), Options(search="zero-2", baselines=(), max_axes=1, fewer_devices=False)
    plain = plan_graph(deep, cluster, options).prediction
    limit = 0.999 * plain.memory_bytes
    tight = plan_graph(deep, cluster, replace(options, memory_limit=limit))
    assert tight.stages[0].strategy.recomputed
    assert tight.prediction.memory_bytes <= limit
    assert tight.prediction == predict(deep, tight.stages[0].strategy, mesh_of(cluster), "adamw", limit)

    def lighter(*arguments: Any) -> Any:
        found = glance(*arguments)
        return None if found is None else replace(found, memory_bytes=found.memory_bytes / 2, fits=True)

    monkeypatch.setattr(trials, "glance", lighter)
    with pytest.raises(Infeasible, match="the smallest found needs"):
        plan_graph(deep, cluster, replace(options, recompute="none", memory_limit=limit))
