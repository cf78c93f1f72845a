"""How many devices are worth it, how large a batch fits, what a token costs: rows that agree with the plans behind them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.planner.sizing import (
    batch_and_tokens,
    by_batch,
    by_cluster,
    by_devices,
    like_with_like,
    resized,
    sizes_between,
    worth_it,
)
from shardwright.zoo.reference import resolve

QUICK = Options(search="data-parallel", baselines=(), recompute="none")


def small(batch: int = 8) -> Graph:
    resolved = resolve("gpt:small,layers=1", batch=batch)
    return capture(resolved.model, resolved.args, resolved.kwargs)


def test_more_devices_are_never_slower_and_idle_ones_are_not_worth_it() -> None:
    graph = small()
    rows = by_devices(graph, parse_cluster("4xH100"), [4, 1, 2, 8], QUICK)
    assert [row.devices for row in rows] == [1, 2, 4, 8]
    assert all(a.seconds >= b.seconds for a, b in itertools.pairwise(rows))
    alone = plan_graph(graph, parse_cluster("1xH100"), QUICK)
    assert rows[0].seconds == alone.prediction.step_seconds
    best = worth_it(rows)  # a tiny model computes for less time than one message takes
    assert best is not None and best.used == best.devices
    assert worth_it([row for row in rows if row.used < row.devices]) is None


def test_the_largest_batch_fits_and_the_next_one_tried_does_not() -> None:
    limit = 1.5 * plan_graph(small(8), parse_cluster("2xH100"), QUICK).prediction.memory_bytes
    options = replace(QUICK, memory_limit=limit)
    rows = by_batch(small, parse_cluster("2xH100"), options, start=64)
    fits = [row.batch for row in rows if row.plan is not None]
    fails = [row.batch for row in rows if row.plan is None]
    assert fits and fails and max(fits) < min(fails)
    assert min(fails) - max(fits) <= max(1, max(fits) // 8)
    assert all(row.refusal for row in rows if row.plan is None)


def test_a_token_costs_the_seconds_of_all_devices() -> None:
    graph = small()
    batch, tokens = batch_and_tokens(graph)
    rows = by_cluster(graph, [parse_cluster("1xH100"), parse_cluster("1xA100-80GB")], QUICK)
    assert (batch, tokens) == (8, 8 * graph.tensors[graph.inputs[0].tensor or ""].shape[1])
    for row in rows:
        assert row.plan is not None
        assert row.device_seconds_per_token == pytest.approx(row.plan.prediction.step_seconds / tokens)


def test_sizes_and_clusters_that_mean_nothing_are_refused() -> None:
    assert sizes_between("8..100") == [8, 16, 32, 64]
    for text in ("", "8..4", "x", "0..8", "8..", "4,-2"):
        with pytest.raises(ShardwrightError, match="names no numbers of devices"):
            sizes_between(text)
    assert resized(parse_cluster("8xH100"), 32).size == 32
    assert resized(parse_cluster("8xH100"), 2).name == "2xH100"
    with pytest.raises(ShardwrightError, match="do not fill nodes"):
        resized(parse_cluster("8xH100"), 12)


def test_devices_are_compared_without_the_host_where_it_was_not_measured_beside_all() -> None:
    measured, listed = parse_cluster("1xH200"), parse_cluster("1xH100")
    rows = by_cluster(small(), [measured, listed], QUICK)
    assert rows[0].seconds <= rows[1].seconds  # the H200 is the H100 with faster memory
    assert like_with_like([measured, measured]) == (measured, measured)
    assert like_with_like([listed]) == (listed,)
