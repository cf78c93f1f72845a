"""A plan of a known kind is recognised as that; what else it decides is listed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardwright.cluster import parse_cluster
from shardwright.exchange.recognising import recognise
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline
from shardwright.plans import Plan
from shardwright.zoo.reference import resolve


@cache
def graph() -> Graph:
    found = resolve("llama:layers=4,width=64,heads=4,kv_heads=2,inner=128,vocab=256,batch=8,seq=16")
    return capture(found.model, found.args, found.kwargs)


@cache
def planned(search: str, recompute: str = "none") -> Plan:
    options = Options(search=search, baselines=(), fewer_devices=False, recompute=recompute)
    return plan_graph(graph(), parse_cluster("4xH100"), options)


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("data-parallel", "replicate 4, micro-batches of 2, 8 rows a step"),
        ("fsdp", "shard 4 (parameters), micro-batches of 2, 8 rows a step"),
        ("zero-2", "shard 4 (gradients), micro-batches of 2, 8 rows a step"),
        ("zero-1", "shard 4 (optimizer), micro-batches of 2, 8 rows a step"),
    ],
)
def test_a_plan_by_name_is_recognised(search, said):
    found = recognise(planned(search), graph())
    assert found.configuration.summary() == f"{said}, float32, adamw"
    assert found.lost == ()
    assert found.configuration.length == 16


def test_recomputed_blocks():
    whole = recognise(planned("fsdp", "blocks"), graph()).configuration
    assert (whole.recompute, whole.recomputed_share) == ("blocks", 1.0)
    assert recognise(planned("fsdp", "light"), graph()).configuration.recompute == "light"
    plan = planned("fsdp", "blocks")
    (stage,) = plan.stages
    half = replace(stage, strategy=replace(stage.strategy, recomputed=stage.strategy.recomputed[:2]))
    assert recognise(replace(plan, stages=(half,)), graph()).configuration.recomputed_share == 0.5


def test_weights_that_are_cut_by_features():
    found = recognise(planned("megatron-sp"), graph())
    c = found.configuration
    assert (c.tensor, c.data, c.sequence) in {(4, 1, True), (2, 2, True)}
    assert {
        ("blocks.*.attention.query", "columns"),
        ("blocks.*.attention.output", "rows"),
        ("blocks.*.feed.down", "rows"),
    } <= set(c.modules)


def test_what_no_configuration_says_is_listed():
    plan = planned("fsdp")
    (stage,) = plan.stages
    (name, size), *_ = stage.strategy.axes
    shares = {name: (0.4, 0.2, 0.2, 0.2)}
    own = replace(stage, strategy=replace(stage.strategy, shares=shares))
    lost = recognise(replace(plan, stages=(own,)), graph()).lost
    assert [r.value for r in lost] == ["40%, 20%, 20%, 20%"]
    assert size == 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipeline_is_recognised(schedule):
    options = Options(search="fsdp", baselines=(), recompute="none")
    asked = Pipelining(2, 4, schedule, ("blocks.2",))
    found = recognise(plan_pipeline(graph(), parse_cluster("4xH100"), asked, options), graph())
    c = found.configuration
    assert (c.pipeline, c.schedule, c.cuts, c.shard, c.microbatches) == (2, schedule, ("blocks.2",), 2, 4)
    assert found.lost == ()


def test_a_cut_inside_a_block_is_lost():
    options = Options(search="fsdp", baselines=(), recompute="none")
    asked = Pipelining(2, 4, "1f1b", ("blocks.2.feed",))
    found = recognise(plan_pipeline(graph(), parse_cluster("4xH100"), asked, options), graph())
    assert [r.key for r in found.lost] == ["cut before stage 1"]
    assert found.configuration.cuts in {("blocks.2",), ("blocks.3",)}
