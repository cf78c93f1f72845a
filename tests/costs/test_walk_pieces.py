"""Repeated operators looked up instead of worked out: the same step, event by event and byte by byte."""

from __future__ import annotations

import pytest

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs import walk_pieces
from shardwright.costs.memory import memory_of
from shardwright.costs.walk import walk
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.zoo.reference import resolve


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("reference", ["gpt:small,layers=4", "moe:small,layers=3", "wresnet50:width=1"])
def test_the_walk_of_repeats_is_the_walk_of_every_operator(reference, recompute, monkeypatch) -> None:
    resolved = resolve(reference, batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    mesh = mesh_of(parse_cluster("2x4xH100"))
    blocks = block_paths(graph) if recompute else ()
    stated = formulate(graph, mesh, within=restriction("fsdp", 2), recompute=blocks)
    strategy = stated.strategy(solve(stated.problem).answer)
    folded = walk(graph, strategy, mesh)
    monkeypatch.setattr(walk_pieces, "representatives", lambda graph: {op.name: op.name for op in graph.ops})
    whole = walk(graph, strategy, mesh)
    assert folded.events == whole.events
    assert folded.nodes.values == whole.nodes.values
    here, there = memory_of(folded), memory_of(whole)
    assert here.curve == there.curve and (here.peak, here.reserved) == (there.peak, there.reserved)
