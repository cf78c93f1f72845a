"""A recipe cuts what it says it cuts, on any hardware: on a fast device tiny operators would rather stay whole."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.cluster import meshes, parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, describe_graph, plan_graph
from shardwright.search.baselines import BASELINES, TWINS
from shardwright.search.choose import solve
from shardwright.search.strategies import least_compute, state
from shardwright.zoo.reference import resolve

PRODUCTS = ("linear", "scaled_dot_product_attention")


@pytest.fixture(scope="module")
def tiny():
    built = resolve("gpt:small", batch=8, seq=16, device="meta")
    return capture(built.model, built.args, built.kwargs)


def splits(graph, search, cluster="2xH200"):
    plan = plan_graph(graph, parse_cluster(cluster), Options(search, (), fewer_devices=False))
    return {op: plan.stages[0].strategy.splits[op.name] for op in graph.ops}


@pytest.mark.parametrize("search", ["data-parallel", "fsdp", "zero-1", "zero-2"])
def test_recipes_for_batches_cut_every_operator_that_has_a_batch(tiny, search):
    whole = [op.target for op, split in splits(tiny, search).items() if split == (None,)]
    assert sorted(whole) == ["aten.arange.default", "aten.embedding.default"]  # positions, which have no batch


@pytest.mark.parametrize("search", ["megatron", "megatron-sp", "mesh-tensorflow"])
@pytest.mark.parametrize("cluster", ["2xH200", "2x2xH200"])
def test_tensor_parallelism_cuts_every_product_by_features_on_the_last_axis(tiny, search, cluster):
    for op, split in splits(tiny, search, cluster).items():
        if op.target.split(".")[1] in PRODUCTS:
            assert split[-1] in ("j", "k", "h"), (op.name, split)
            assert all(name in ("n0", "b") for name in split[:-1]), (op.name, split)


def test_a_pin_goes_before_the_recipe(tiny):
    options = Options("data-parallel", (), pins=("gelu=none",), fewer_devices=False)
    plan = plan_graph(tiny, parse_cluster("2xH200"), options)
    assert plan.stages[0].strategy.splits["gelu"] == (None,)
    assert plan.stages[0].strategy.splits["gelu_1"] != (None,)


def test_a_recipe_is_stated_alike_whether_operators_are_timed_already_or_not(tiny):
    """The search over everything times every split of an operator once; recipes look their own up."""
    known = describe_graph(tiny)
    mesh = meshes(parse_cluster("2x2xH200"), 2)[-1]
    state(known, mesh)
    for name in BASELINES:
        ours, alone = state(known, mesh, name), state(describe_graph(tiny), mesh, name)
        assert [node.options for node in ours.nodes] == [node.options for node in alone.nodes]
        assert all(map(np.array_equal, ours.problem.costs, alone.problem.costs))
        assert 0 < least_compute(known, mesh, name) <= solve(ours.problem).cost


def test_a_twin_has_the_strategies_of_its_original(tiny):
    described, mesh = describe_graph(tiny), meshes(parse_cluster("2x2xH200"), 2)[-1]
    assert TWINS == ("mesh-tensorflow",)
    ours, original = state(described, mesh, "mesh-tensorflow"), state(described, mesh, "megatron")
    assert [node.options for node in ours.nodes] == [node.options for node in original.nodes]
    for mine, theirs in zip(ours.problem.edges, original.problem.edges, strict=True):
        assert np.array_equal(mine.costs, theirs.costs)
