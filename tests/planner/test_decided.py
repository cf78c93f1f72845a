"""A plan says what its program is: an edited price changes no instruction of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright import zoo
from shardwright.cluster import Mesh
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import PlanError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.plans import Plan
from shardwright.plans.serial import from_json, to_json
from shardwright.program import Program, build


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=2, width=256, heads=4, seq=64, vocab=512, batch=16)
        return capture(model, args, kwargs)


def slower(mesh: Mesh, latency: float, rate: float) -> Mesh:
    """Other links: what is the cheapest route there need not be the cheapest here."""
    axes = [replace(axis, latency=axis.latency * latency, bandwidth=axis.bandwidth * rate) for axis in mesh.axes]
    return replace(mesh, axes=tuple(axes))


def program(graph: Graph, plan: Plan, mesh: Mesh) -> Program:
    decisions = replace(plan.stages[0].decisions, otherwise=PricedDecisions(mesh))
    return build(graph, plan.stages[0].strategy, decisions, plan.meshes[0].coordinates(plan.devices - 2), device="cuda")


@pytest.mark.parametrize("search", ["fsdp", "megatron", "data-parallel"])
def test_an_edited_price_changes_no_instruction(graph: Graph, search: str) -> None:
    from shardwright.cluster import parse_cluster

    made = plan_graph(graph, parse_cluster("2x4xH100"), Options(search=search, baselines=(), fewer_devices=False))
    loaded = from_json(to_json(made))
    assert loaded.stages[0].decisions == made.stages[0].decisions
    before = program(graph, made, made.meshes[0])
    for mesh in (slower(made.meshes[0], 2.0, 1.0), slower(made.meshes[0], 1e6, 1.0), slower(made.meshes[0], 0.0, 1e-3)):
        assert program(graph, loaded, mesh).instructions == before.instructions
    # Nothing was left to the prices: without them the program is the same.
    place = loaded.meshes[0].coordinates(loaded.devices - 2)
    alone = build(graph, loaded.stages[0].strategy, loaded.stages[0].decisions, place, device="cuda")
    assert alone.instructions == before.instructions


def test_what_was_not_decided_is_said(graph: Graph) -> None:
    from shardwright.cluster import parse_cluster

    made = plan_graph(graph, parse_cluster("2x4xH100"), Options(search="fsdp", baselines=(), fewer_devices=False))
    with pytest.raises(PlanError, match="no route"):
        build(graph, made.stages[0].strategy, replace(made.stages[0].decisions, routes={}), device="cuda")
