"""Steps under a compiler: ranks whose graphs differ must still run the same collectives."""

from __future__ import annotations

import json

import torch

from lowering.strategies import mesh_with, random_strategy
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.graph import from_json, to_json
from shardwright.lowering.collectives import run_step
from shardwright.lowering.emit import emit
from shardwright.program import build
from shardwright.program.steps import BoundStep, Line

MASKED = BoundStep("mask", Line("axis", 2, 1))


def test_masked_values_are_no_constants():
    """Equal constants would be one value to the compiler, and the collectives that send them one collective."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module

    def both(x, y):
        return run_step(x, MASKED), run_step(y, MASKED)

    x, y = torch.tensor([1.0, torch.inf]), torch.tensor([2.0, -3.0])
    first, second = torch.compile(both, backend=backend, fullgraph=True)(x, y)
    assert torch.equal(first, torch.zeros(2)) and torch.equal(second, torch.zeros(2))
    assert torch.equal(run_step(x, MASKED), first)
    (graph,) = graphs
    one, other = next(node for node in graph.nodes if node.op == "output").args[0]
    assert _sources(one) != _sources(other)


def _sources(node) -> frozenset[str]:
    """The placeholders whose values (not only shapes) a result is computed from."""
    if node.op == "placeholder":
        return frozenset((node.name,))
    if node.target in (torch.zeros_like, torch.ones_like):
        return frozenset()
    return frozenset().union(*(_sources(before) for before in node.all_input_nodes))


def test_names_of_a_graph_are_no_source_text():
    """A placeholder's name is written into the function that FX makes; names of graphs come from files."""
    evil, mesh = "x=print('ran')", mesh_with((1,))
    graph = capture(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    graph = from_json(to_json(graph).replace('"input"', json.dumps(evil)))
    assert evil in graph.sources
    decisions = PricedDecisions(mesh)
    flow = build(graph, random_strategy(graph, mesh, 0), decisions, (0,)).flow
    module = emit(flow, decisions, lambda line: line)
    assert "ran" not in module.code
    weight, bias, x = torch.ones(2, 3), torch.ones(2), torch.ones(4, 3)
    assert torch.equal(module(weight, bias, x)[0][0], torch.full((4, 2), 4.0))
