"""Strategies that are forced to cut do cut, every kind of loop, also where the fastest plan cuts nothing."""

from __future__ import annotations

import pytest
import torch

from shardwright.cluster import mesh_of, meshes, parse_cluster
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.program.dataflow import dataflow
from shardwright.program.validate import validate_dataflow
from shardwright.verification.forced import cut_by, forced_strategies
from shardwright.verification.ignored import ignored_value, with_ignored_labels


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(12, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits = x @ self.table.weight.T
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Pictures(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 3, padding=1)
        )


def words() -> Graph:
    tokens = torch.arange(24).view(4, 6) % 12
    return capture(Words(), (tokens, tokens.clone()))


def pictures() -> Graph:
    return capture(Pictures(), (torch.zeros(4, 3, 8, 8),))


@pytest.mark.parametrize(("graph", "kinds"), [(words, {"sequence"}), (pictures, {"halos"})])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_every_loop_of_every_operator_is_cut_by_some_strategy(graph, kinds, sizes):
    graph, mesh = graph(), mesh_of(parse_cluster(f"local:{2 ** len(sizes)}"), sizes)
    found = dict(forced_strategies(graph, mesh))
    assert {"batch", "batch, parameters sharded", "features", "reductions", *kinds} <= set(found)
    for strategy in found.values():
        for rank in range(mesh.devices):
            validate_dataflow(dataflow(graph, strategy, mesh.coordinates(rank), PricedDecisions(mesh)))
    for name, strategy in found.items():
        cut = cut_by(graph, strategy)
        assert 0 < cut.operators <= cut.of and cut.work > 0.1
        assert name.startswith("mixed") or cut.loops[name.split(",")[0]], "it cuts what it is called"
    tried = {(op.target, loop) for strategy in found.values() for op in graph.ops for loop in strategy.splits[op.name]}
    for op in graph.ops:
        rules = analyse(op, graph.tensors)
        possible = {(op.target, loop.name) for loop in rules.loops if loop.divides and loop.allows(2)}
        assert possible <= tried


def test_labels_that_nothing_else_reads_get_holes():
    graph = words()
    assert ignored_value(graph, graph.inputs[1].tensor) == -100
    assert ignored_value(graph, graph.inputs[0].tensor) is None, "tokens are looked up"
    tokens = torch.arange(24).view(4, 6) % 12
    (same, labels), _, note = with_ignored_labels(graph, (tokens, tokens.clone()), {})
    holes = (labels == -100).sum(1)
    assert torch.equal(same, tokens) and "ignored" in note and holes[:2].sum() > holes[2:].sum()
    again, _, nothing = with_ignored_labels(graph, (tokens, labels), {})
    assert torch.equal(again[1], labels) and not nothing, "a batch that has some already stays as it is"


def test_several_axes_cut_several_loops():
    mesh = meshes(parse_cluster("local:4"), max_axes=2)[-1]
    features = dict(forced_strategies(words(), mesh))["features"]
    linear = [split for name, split in features.splits.items() if "matmul" in name or "linear" in name]
    assert linear and all(len(set(split)) == 2 for split in linear)
