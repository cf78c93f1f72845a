"""Repeated operators looked up instead of worked out: the same step, event by event and byte by byte."""

from __future__ import annotations

import pytest

from program.steps import priced
from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.memory import memory
from shardwright.frontend import capture
from shardwright.graph.repeats import block_paths
from shardwright.program import pieces
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.zoo.reference import resolve


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("reference", ["gpt:small,layers=4", "moe:small,layers=3", "wresnet50:width=1"])
def test_the_program_of_repeats_is_the_program_of_every_operator(reference, recompute, monkeypatch) -> None:
    resolved = resolve(reference, batch=8)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    mesh = mesh_of(parse_cluster("2x4xH100"))
    blocks = block_paths(graph) if recompute else ()
    stated = formulate(graph, mesh, within=restriction("fsdp", 2), recompute=blocks)
    strategy = stated.strategy(solve(stated.problem).answer)
    folded = priced(graph, strategy, mesh)
    monkeypatch.setattr(pieces, "representatives", lambda graph: {op.name: op.name for op in graph.ops})
    whole = priced(graph, strategy, mesh)
    assert [e[1:] for e in folded.events] == [e[1:] for e in whole.events]
    assert folded.program.instructions == whole.program.instructions
    assert folded.program.flow.values == whole.program.flow.values
    here, there = memory(folded.program, mesh.device), memory(whole.program, mesh.device)
    assert here.curve == there.curve and (here.peak, here.reserved) == (there.peak, there.reserved)
