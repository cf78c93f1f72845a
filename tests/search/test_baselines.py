"""A recipe cuts what it says it cuts, on any hardware: on a fast device tiny operators would rather stay whole."""

from __future__ import annotations

import pytest

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.zoo.reference import resolve

PRODUCTS = ("linear", "scaled_dot_product_attention")


@pytest.fixture(scope="module")
def tiny():
    built = resolve("gpt:small", batch=8, seq=16, device="meta")
    return capture(built.model, built.args, built.kwargs)


def splits(graph, search, cluster="2xH200"):
    plan = plan_graph(graph, parse_cluster(cluster), Options(search, (), fewer_devices=False))
    return {op: plan.strategy.splits[op.name] for op in graph.ops}


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
    assert plan.strategy.splits["gelu"] == (None,)
    assert plan.strategy.splits["gelu_1"] != (None,)
