"""The sentence about a plan says what its strategy does, in the field's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwright
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.plans import Plan
from shardwright.plans.proof_text import proof_text, quality_text
from shardwright.reports.in_words import beside_recipes, use_of_devices, what_it_does

from .conftest import captured_small


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured_small()


def planned(graph: Graph, search: str, **asked) -> Plan:
    return plan_graph(graph, shardwright.parse_cluster("4xH100"), Options(search, (), max_axes=1, **asked))


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("data-parallel", "Splits the batch 4 ways; every device holds all weights."),
        ("fsdp", "Splits the batch 4 ways; all weights rest in shards, gathered for forward and again for backward."),
        ("zero-2", "Splits the batch 4 ways; all weights rest in shards, gathered once per step."),
        ("zero-1", "Splits the batch 4 ways; all weights rest in shards, gathered once per step, their gradients"),
    ],
)
def test_recipes_are_told_by_their_own_words(graph, search, said):
    assert what_it_does(planned(graph, search), graph).startswith(said)


def test_tensor_parallel_weights_stay_cut(graph):
    said = what_it_does(planned(graph, "megatron"), graph)
    assert said.startswith("Cuts features 4 ways; "), said
    assert "weights stay cut" in said and "gathered" not in said


def test_a_module_that_is_cut_otherwise_is_named(graph):
    head = next(op.name for op in graph.ops if op.module == "head")
    said = what_it_does(planned(graph, "auto", pins=[f"{head}=j"], fewer_devices=False), graph)
    assert "cuts features in head" in said, said


def test_recomputed_blocks_and_rate(graph):
    plan = planned(graph, "fsdp", recompute="blocks")
    assert "recomputes 2 blocks" in what_it_does(plan, graph)
    said = use_of_devices(plan, graph)
    tokens = 1.0 * graph.tensors[graph.inputs[0].tensor].elements / plan.prediction.step_seconds
    assert f"{tokens:,.0f} tokens a second" in said or "million tokens a second" in said
    assert "MFU" in said and "67 Tflop/s float32 a device" in said


def test_a_proof_looser_than_twice_is_not_boasted_with(graph):
    plan = planned(graph, "fsdp")
    slow = replace(plan, prediction=replace(plan.prediction, step_seconds=3 * plan.proof.step_bound))
    assert "above)" in proof_text(plan) and quality_text(plan).startswith("within")
    assert "(this one is 3.0 times that: a loose bound)" in proof_text(slow)
    assert quality_text(slow) == "only loosely bounded"


def test_the_fastest_recipe_is_told_beside_the_plan(graph):
    plan = plan_graph(graph, shardwright.parse_cluster("4xH100"), Options(max_axes=1, fewer_devices=False))
    recipes = {row.name: row.prediction.step_seconds for row in plan.candidates[1:] if row.prediction.fits}
    assert {"zero-1", "zero-2", "fsdp", "data-parallel", "megatron"} <= set(recipes)
    name = min(recipes, key=recipes.__getitem__)
    assert name in beside_recipes(plan)
    assert beside_recipes(replace(plan, candidates=plan.candidates[:1])) == ""
