"""Pruning renames what stays; what goes leaves nothing behind under its old name."""

from __future__ import annotations

from shardwright.frontend.prune import pruned
from shardwright.graph import Graph, Input, Op, Ref, Tensor


def test_a_dead_tensor_does_not_take_a_live_ones_new_name():
    x = Tensor("x", (4, 8), "float32")
    live = Tensor("traced", (4, 8), "float32")
    dead = Tensor("add", (16,), "float32")
    range_ = Tensor("arange", (16,), "float32")
    ops = (
        Op("traced", "aten.add.Tensor", (Ref("x"), Ref("x")), (), ("traced",)),
        Op("arange", "aten.arange.default", (16,), (), ("arange",)),
        Op("add", "aten.add.Tensor", (Ref("arange"), 0), (), ("add",)),
    )
    tensors = {tensor.name: tensor for tensor in (x, live, range_, dead)}
    kept = pruned(Graph(tensors, ops, inputs=(Input("x"),), outputs=(Ref("traced"),)))
    assert [op.name for op in kept.ops] == ["add"]
    assert {name: tensor.shape for name, tensor in kept.tensors.items()} == {"x": (4, 8), "add": (4, 8)}
