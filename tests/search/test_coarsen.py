"""Coarsening: the groups are those one expects, expanding keeps the price, and the recursion over it loses nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.search.choose import evaluate, solve
from shardwright.search.coarsen import coarsen, pointwise_groups
from shardwright.search.formulate import Formulation, describe_graph, formulate
from shardwright.search.recursive import recursive
from shardwright.zoo.reference import resolve

MESH = mesh_of(parse_cluster("2x4xH100"))


def _stated(reference: str) -> Formulation:
    resolved = resolve(reference, batch=8)
    return formulate(capture(resolved.model, resolved.args, resolved.kwargs), MESH)


@pytest.fixture(scope="module")
def rnn() -> Formulation:
    return _stated("rnn:small")


@pytest.fixture(scope="module")
def cnn() -> Formulation:
    return _stated("wresnet50:small")


def _of(graph: Graph, names: tuple[str, ...]) -> list[str]:
    targets = {op.name: op.target.split(".")[1] for op in graph.ops}
    return [targets[name] for name in names]


def test_unrolled_time_steps_decide_together(rnn: Formulation) -> None:
    """Four time steps of two cells: each product of a cell is one decision for all steps, as is its part of the cell."""
    groups = coarsen(rnn).groups
    products = [names for names in groups if set(_of(rnn.graph, names)) == {"matmul"}]
    assert [len(names) for names in products] == [4, 4, 4, 4]
    readers = {p.tensor: {op.name for op in rnn.graph.consumers[p.tensor]} for p in rnn.graph.parameters}
    for names in products:  # one weight per group: steps share it, cells do not
        assert sum(set(names) == read for read in readers.values()) == 1


def test_pointwise_operators_of_a_cell_are_one_group(rnn: Formulation) -> None:
    """The sum of both products with the bias; then the gates, the new memory and the new hidden state."""
    groups = coarsen(rnn).groups
    gates = [names for names in groups if "sigmoid" in _of(rnn.graph, names)]
    assert len(gates) == 2
    for names in gates:
        cell = sorted(_of(rnn.graph, names))
        assert cell == sorted(4 * ["sigmoid", "mul", "sigmoid", "tanh", "mul", "add", "sigmoid", "tanh", "mul"])
    biases = [names for names in groups if set(_of(rnn.graph, names)) == {"add"}]
    assert [len(names) for names in biases] == [8, 8]


def test_of_a_residual_network_sums_and_the_activations_after_them_are_grouped(cnn: Formulation) -> None:
    """Normalisations stand between all other pointwise operators, so nothing else has a pointwise neighbour."""
    chains = pointwise_groups(cnn.graph, cnn.rules)
    assert chains
    for names in chains:
        kinds = _of(cnn.graph, names)
        assert kinds == ["add", "relu"] * (len(kinds) // 2)
        shapes = {cnn.graph.tensors[op.outputs[0]].shape for op in cnn.graph.ops if op.name in names and op.outputs[0]}
        assert len(shapes) == 1


def test_a_plain_chain_of_convolutions_has_nothing_to_group() -> None:
    stated = _stated("alexnet:small")
    assert pointwise_groups(stated.graph, stated.rules) == []
    assert len(coarsen(stated).problem.costs) == len(stated.problem.costs)


@pytest.mark.parametrize("reference", ["rnn", "cnn"])
def test_expanding_keeps_the_price_and_the_memory(reference: str, request: pytest.FixtureRequest) -> None:
    given: Formulation = request.getfixturevalue(reference)
    stated = formulate(given.graph, MESH, memory_limit=1e18)
    coarse = coarsen(stated)
    assert len(coarse.problem.costs) < len(stated.problem.costs)
    random = np.random.default_rng(0)
    for _ in range(20):
        choice = random.integers(coarse.problem.sizes)
        mine, fine = evaluate(coarse.problem, choice), evaluate(stated.problem, coarse.expand(choice))
        assert mine.cost == pytest.approx(fine.cost, rel=1e-9)
        assert mine.peak == pytest.approx(fine.peak, rel=1e-9)


@pytest.mark.parametrize("reference", ["rnn", "cnn"])
def test_coarsening_does_not_forbid_the_optimum_of_an_axis(reference: str, request: pytest.FixtureRequest) -> None:
    """Each step of the recursion, and the recursion as a whole, costs the same with pointwise operators grouped."""
    stated: Formulation = request.getfixturevalue(reference)
    for axis in MESH.axes:
        alone = formulate(stated.graph, replace(MESH, axes=(axis,)))
        assert solve(coarsen(alone).problem).cost == pytest.approx(solve(alone.problem).cost, rel=1e-9)
    costs = []
    for coarse in (True, False):
        found = recursive(describe_graph(stated.graph), MESH, coarse=coarse)
        costs.append(evaluate(stated.problem, stated.choice(found)).cost)
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
