"""Engines' profiles and the tables of primitives: read whole, faithful to their rows, and felt by a simulated step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.cluster import parse_cluster, preset
from shardwright.cluster.as_engine import as_engine
from shardwright.cluster.engine import engine, engine_names
from shardwright.cluster.primitives import primitives
from shardwright.costs.compute import kernel_seconds
from shardwright.costs.engines import attention_seconds
from shardwright.errors import ClusterError
from shardwright.frontend import capture
from shardwright.operators.work import product
from shardwright.planner import Options, plan_graph
from shardwright.simulator import simulate_plan
from shardwright.zoo.reference import resolve

A100 = preset("A100-80GB")[0].device


@pytest.mark.parametrize("name", engine_names())
def test_every_profile_says_where_it_comes_from_and_prices_products(name: str) -> None:
    profile = engine(name)
    assert profile.source and profile.fitted and profile.paces
    for device, pace in profile.paces:
        assert min(pace.products, pace.memory, pace.attention) > 0 and max(pace.products, pace.memory) <= 1
        run_by = replace(preset({"A100": "A100-80GB"}.get(device, device))[0].device, engine=profile)
        sizes = (np.array([float(n)]) for n in (4096, 4096, 4096, 1))
        seconds = kernel_seconds(product("bfloat16", *sizes, "matmul/forward"), run_by)
        assert 1.0 < seconds[0] / (2 * 4096**3 / run_by.peak("bfloat16")) < 2.5


@pytest.mark.parametrize("device", ["A100-80GB", "H100", "H200", "B200"])
def test_collectives_take_what_their_table_says_and_more_bytes_never_less(device: str) -> None:
    table = primitives(device)
    assert table is not None and "rows" in table.source
    for (kind, size), rows in table.collectives.items():
        for amount, seconds in rows:
            assert table.collective(kind, size, float(amount)) == pytest.approx(float(seconds))
        large = [table.collective(kind, size, 2.0**power) for power in range(26, 32)]
        assert large == sorted(large)
    assert table.collective("all_reduce", 4, 2**24) < table.collective("all_reduce", 6, 2**24)
    assert table.collective("all_reduce", 6, 2**24) < table.collective("all_reduce", 8, 2**24)
    assert table.collective("all_reduce", 1, 2**24) == 0.0


def test_attention_that_is_not_fused_costs_the_passes_over_its_scores() -> None:
    shape = np.array([[64.0, 2048, 2048, 128]])
    unfused = replace(A100, engine=engine("megatron-2021"))
    fused = replace(A100, engine=replace(engine("megatron-2021"), fused_attention=True))
    dry = replace(A100, engine=replace(engine("megatron-2021"), dropout=False))
    for backward in (False, True):
        slow, wet, quick = (attention_seconds(device, shape, 2, True, backward)[0] for device in (unfused, dry, fused))
        assert quick < wet < slow


def test_what_nobody_published_has_no_price() -> None:
    with pytest.raises(ClusterError, match="no profile"):
        engine("nobody")
    with pytest.raises(ClusterError, match="published"):
        as_engine(parse_cluster("8xV100"), "megatron-2021")
    with pytest.raises(ClusterError, match="no run"):
        as_engine(parse_cluster("8xH100"), "megatron-2021")


def test_a_simulated_step_feels_what_an_engine_does() -> None:
    model = resolve("gpt:layers=2,width=1024,heads=16,vocab=8192,seq=1024", batch=16, dtype="bfloat16")
    graph = capture(model.model, model.args, model.kwargs)
    options = Options(search="data-parallel", baselines=(), recompute="none", fewer_devices=False)
    plan = plan_graph(graph, parse_cluster("2xA100-80GB"), options)
    cluster = as_engine(plan.cluster, "megatron-2021")
    assert cluster.calibration.startswith("A100-80GB: megatron-2021 (")

    def seconds(**changes: object) -> float:
        device = replace(cluster.device, engine=replace(engine("megatron-2021"), **changes))
        nodes = tuple(replace(node, device=device) for node in cluster.nodes)
        return simulate_plan(replace(plan, cluster=replace(cluster, nodes=nodes)), graph).seconds

    usual = seconds()
    assert usual == pytest.approx(simulate_plan(replace(plan, cluster=cluster), graph).seconds)
    assert seconds(blocking=True) > usual
    assert seconds(fused_attention=True) < usual
    assert seconds(overlap=False, reduction=4) > usual
    assert seconds(reduction=8) > seconds(reduction=4) * 0.999
