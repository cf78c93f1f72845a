"""A recipe's problem cut out of the whole one is the one that is stated by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright import zoo
from shardwright.cluster import Mesh, meshes, parse_cluster
from shardwright.frontend import capture
from shardwright.operators import analyse
from shardwright.planner.trials import LEAST_UNHIDDEN, UNHIDDEN
from shardwright.search.baselines import BASELINES, restriction
from shardwright.search.bills import EXPECTED, LEAST
from shardwright.search.choose import Problem
from shardwright.search.formulate import Described
from shardwright.search.labels import label_loops
from shardwright.search.narrowing import narrowed
from shardwright.search.strategies import state


@pytest.fixture(scope="module")
def described() -> Described:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("moe", **dict(zoo.entry("moe").small))
    graph = capture(model, args, kwargs)
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    return Described(graph, rules, label_loops(graph, rules))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return meshes(parse_cluster("2x2xH100"), 2)[-1]


def _same(one: Problem, other: Problem) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(one.costs, other.costs, strict=True))
    assert [edge[:2] for edge in one.edges] == [edge[:2] for edge in other.edges]
    assert all(np.array_equal(a.costs, b.costs) for a, b in zip(one.edges, other.edges, strict=True))


@pytest.mark.parametrize("name", BASELINES)
def test_cut_out_is_as_stated(described: Described, mesh: Mesh, name: str) -> None:
    wide, within = state(described, mesh), restriction(name, 2)
    alone = state(described, mesh, name)
    part = narrowed(wide, within, described.labels, described.known[mesh])
    assert part is not None
    assert [list(node.options) for node in part.nodes] == [list(node.options) for node in alone.nodes]
    for pricing in (LEAST, LEAST_UNHIDDEN):
        _same(part.repriced(pricing).problem, alone.repriced(pricing).problem)
    if within.plain:
        for pricing in (EXPECTED, UNHIDDEN):
            _same(part.repriced(pricing).problem, alone.repriced(pricing).problem)
        used = [[(u.node, u.start, u.stop, u.amounts.tolist()) for u in p.problem.usages] for p in (part, alone)]
        assert used[0] == used[1]


def test_what_changes_prices_is_not_plain() -> None:
    plain = {name for name in BASELINES if restriction(name, 2).plain}
    assert set(BASELINES) - plain == {"fsdp", "zero-1", "zero-2"}
