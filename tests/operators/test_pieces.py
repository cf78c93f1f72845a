"""Pieces: sizes are rewritten, kernels can be traced, and the ranges of several axes come together."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import LoweringError
from shardwright.graph import Op, Ref, Tensor
from shardwright.operators import analyse, piece
from shardwright.verification.samples import UNEVEN, calls


def first(target):
    return next(calls(target, UNEVEN))


def test_sizes_of_views_become_local():
    shapes = {"x": Tensor("x", (4, 6, 8), "float32"), "y": Tensor("y", (24, 8), "float32")}
    view = Op("v", "aten.view.default", (Ref("x"), (24, 8)), (), ("y",))
    # One unit of the merged loop is six elements: ranges count units.
    assert piece(view, shapes, {"i0": (1, 3), "i1": (0, 4)}).op.args[1] == (12, 4)


def test_creation_and_offsets():
    tensors = {"y": Tensor("y", (10,), "int64")}
    arange = Op("a", "aten.arange.default", (10,), (), ("y",))
    assert piece(arange, tensors, {"i": (4, 7)}).kernel().tolist() == [4, 5, 6]
    tensors = {"x": Tensor("x", (8, 8), "float32"), "y": Tensor("y", (8, 8), "float32")}
    tril = Op("t", "aten.tril.default", (Ref("x"),), (), ("y",))
    assert piece(tril, tensors, {"i0": (2, 4), "i1": (4, 8)}).op.kwarg("diagonal") == -2


def test_an_uncut_operator_is_itself():
    sample = first("aten.linear.default")
    assert piece(sample.op, sample.tensors, {}).op is sample.op


def test_unknown_loops_are_refused():
    sample = first("aten.linear.default")
    with pytest.raises(LoweringError, match="no loop 'nope'"):
        piece(sample.op, sample.tensors, {"nope": (0, 1)})


@pytest.mark.parametrize(
    ("target", "loop"),
    [
        ("aten.embedding.default", "v"),
        ("aten.softmax.int", "i2"),
        ("aten.layer_norm.default", "i2"),
        ("aten.cross_entropy_loss.default", "c"),
        ("aten.conv2d.default", "y0"),
        ("aten.max_pool2d.default", "i2"),
        ("aten.scaled_dot_product_attention.default", "i"),
        ("aten.mean.dim", "k0"),
        ("aten.lstm.input", "k"),
        ("aten._native_batch_norm_legit_functional.default", "i0"),
    ],
)
def test_kernels_are_traced_in_one_graph(target, loop):
    sample = first(target)
    rules = analyse(sample.op, sample.tensors)
    rule = rules.by_name[loop]
    made = piece(sample.op, sample.tensors, {loop: (0, rule.extent)})  # one piece that is the whole: no cutting needed

    def exchange(x, reduce, loop):
        return x.clone()

    assert made.kernel is not None
    torch.compiler.reset()
    traced = torch.compile(lambda *inputs: made.kernel(*inputs, exchange=exchange), backend="eager", fullgraph=True)
    got = traced(*sample.inputs)
    plain = made.kernel(*sample.inputs, exchange=exchange)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, plain)), strict=True):
        assert torch.equal(a, b)


def test_a_cut_batch_norm_is_as_accurate_as_the_whole():
    """In float32, against float64: root mean square of output and input gradient, 1.03 times PyTorch's own when written."""
    torch.manual_seed(0)
    shape = (8, 32, 16, 16)
    sizes = {"x": shape, "w": shape[1:2], "b": shape[1:2], "y": shape}
    tensors = {name: Tensor(name, size, "float32") for name, size in sizes.items()}
    args = (Ref("x"), Ref("w"), Ref("b"), None, None, True, 0.1, 1e-3, False)
    cut = piece(Op("n", "aten.batch_norm.default", args, (), ("y",)), tensors, {"i0": (0, shape[0])}).kernel
    start, weights = [torch.randn(shape), torch.rand(32), torch.rand(32)], torch.randn(shape)

    def by_pieces(x, w, b):
        return cut(x, w, b, exchange=lambda x, reduce, loop: x)

    def whole(x, w, b):
        return torch.nn.functional.batch_norm(x, None, None, w, b, True, 0.1, 1e-3)

    def results(function, dtype):
        inputs = [tensor.to(dtype).clone().requires_grad_() for tensor in start]
        y = function(*inputs)
        y.backward(weights.to(dtype))
        return y.detach(), inputs[0].grad

    truth, ours = results(whole, torch.float64), results(by_pieces, torch.float32)
    for true, mine, own in zip(truth, ours, results(whole, torch.float32), strict=True):
        assert (mine - true).norm() <= 1.2 * (own - true).norm()
