"""A graph is recognised by what it computes, in whatever order its independent operators were traced."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from shardwright.frontend import capture
from shardwright.graph import Graph, fingerprint, from_json, to_json
from shardwright.graph.computation import computation


class Walking(nn.Module):
    """Walks through names in some order, as a set of strings does it."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"})

    def forward(self, x: Tensor) -> Tensor:
        found = {name: torch.tanh(self.layers[name](x)) for name in self.names}
        return found["a"] - found["b"]


def graph_of(names: str) -> Graph:
    return capture(Walking(names), (torch.zeros(2, 4),))


def test_the_order_of_tracing_does_not_matter() -> None:
    one, other = graph_of("ab"), graph_of("ba")
    assert fingerprint(one) != fingerprint(other)
    assert computation(one) == computation(other) == computation(from_json(to_json(one)))


def test_what_is_computed_does() -> None:
    graph = graph_of("ab")
    swapped = dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(op, args=op.args[::-1]) if "sub" in op.target else op for op in graph.ops)
    )
    frozen = dataclasses.replace(
        graph, parameters=tuple(dataclasses.replace(p, trainable=False) for p in graph.parameters)
    )
    more = capture(nn.Sequential(Walking("ab"), nn.Tanh()), (torch.zeros(2, 4),))
    assert len({computation(g) for g in (graph, swapped, frozen, more)}) == 4
