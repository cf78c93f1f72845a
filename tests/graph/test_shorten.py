"""A graph with fewer layers is the graph of a model with fewer layers."""

from __future__ import annotations

import pytest
import torch

from shardwright import zoo
from shardwright.frontend import capture
from shardwright.graph import Graph, Input, Op, Ref, Tensor
from shardwright.graph.shorten import longest_run, shortened


def _gpt(layers: int) -> Graph:
    with torch.device("meta"):
        model, args, kwargs = zoo.build("gpt", layers=layers, width=64, heads=4, seq=16, vocab=64, batch=4)
        return capture(model, args, kwargs)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_cut_to_some_layers_it_is_the_model_of_so_many(count: int) -> None:
    deep = _gpt(7)
    run = longest_run(deep)
    assert run is not None
    short, small = shortened(deep, run.count - 7 + count), _gpt(count)
    assert short is not None
    assert [(op.target, op.module) for op in short.ops] == [(op.target, op.module) for op in small.ops]
    assert [p.paths for p in short.parameters] == [p.paths for p in small.parameters]
    for ours, theirs in zip(short.ops, small.ops, strict=True):
        assert [short.tensors[n].shape for n in ours.inputs] == [small.tensors[n].shape for n in theirs.inputs]
    places = [{name: i for i, op in enumerate(g.ops) for name in op.outputs} for g in (short, small)]
    for ours, theirs in zip(short.ops, small.ops, strict=True):
        assert [places[0].get(n) for n in ours.inputs] == [places[1].get(n) for n in theirs.inputs]


def test_there_is_nothing_to_cut_from_a_short_graph() -> None:
    assert shortened(_gpt(3), 3) is None


def test_a_run_whose_middle_is_read_later_is_not_cut() -> None:
    names = [f"x{i}" for i in range(9)]
    ops = tuple(Op(f"relu{i}", "aten.relu.default", (Ref(names[i]),), (), (names[i + 1],)) for i in range(8))
    tensors = {name: Tensor(name, (4,), "float32") for name in names}
    chain = Graph(tensors, ops, inputs=(Input("x0"),), outputs=(Ref("x8"),))
    assert len(shortened(chain, 2).ops) == 2  # type: ignore[union-attr] # it has eight
    assert shortened(Graph(tensors, ops, inputs=(Input("x0"),), outputs=(Ref("x8"), Ref("x4"))), 2) is None
