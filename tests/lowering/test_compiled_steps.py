"""Steps under a compiler: ranks whose graphs differ must still run the same collectives."""

from __future__ import annotations

import torch

from shardwright.lowering.collectives import run_step
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
