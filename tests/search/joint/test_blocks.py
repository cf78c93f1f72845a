"""Prices of repeated blocks: strategies chosen on one problem, priced in others."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.cluster import meshes, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.search.joint.blocks import described, restated, worth_knowing
from shardwright.search.joint.parts import Priced, by_operators, sums_of
from shardwright.search.options import EVERYTHING, among
from shardwright.search.strategies import find_strategy, state
from shardwright.zoo.reference import resolve

NAMES = ("data-parallel", "megatron", "fsdp", "zero-2")


@pytest.fixture(scope="module")
def graph() -> Graph:
    resolved = resolve("gpt:layers=3,width=128,heads=4,vocab=512,seq=64", batch=8)
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.mark.parametrize("where", ["4xH100", "2x2xH100"])
@pytest.mark.parametrize("lightly", [False, True])
def test_a_strategy_costs_the_same_among_a_few_as_among_all(graph: Graph, where: str, lightly: bool) -> None:
    """Where blocks recompute, the problem of the strategies that were chosen says what that of all strategies does."""
    known, mesh = described(graph), meshes(parse_cluster(where), 2)[-1]
    found = list(worth_knowing(known, mesh, 4, "adamw", NAMES))
    assert {one.name for one in found} == {"auto", *NAMES}
    for one, few in zip(found, restated(found, known, "adamw", known.blocks, lightly), strict=True):
        stated = state(known, mesh, recompute=known.blocks, lightly=lightly, within=one.priced.stated.within)
        every = Priced.of(stated)
        if one.name == "auto":
            assert max(len(node.options) for node in few.stated.nodes) <= len(found)
        sums = [sums_of(priced, one.strategy, by_operators(priced.stated), 4) for priced in (few, every)]
        for mine, theirs in zip(*sums, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def test_among_some_strategies_there_is_nothing_else(graph: Graph) -> None:
    known, mesh = described(graph), meshes(parse_cluster("4xH100"), 2)[0]
    few = [find_strategy(known, mesh, name).strategy for name in ("fsdp", "megatron")]
    within = among(few)
    assert not within.plain and not (EVERYTHING & within).everything
    for node in state(known, mesh, within=within).nodes:
        table = {"op": "splits", "parameter": "resting", "kept": "kept"}[node.kind]
        assert set(node.options) == {getattr(one, table)[node.name] for one in few}
