"""What the probe says autograd saves is what autograd saves: compared with a real call on the CPU, operator by operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.memory import workspace
from shardwright.graph.core import Ref
from shardwright.operators import record
from shardwright.program.footprints import OperatorCall, Strided, backward, forward, resolve

X, Y = (4, 8, 16), (4, 8, 16)
R = [Ref(str(i)) for i in range(8)]

# name, arguments, shapes of the tensor arguments (a dtype after a shape means: not followed by autograd)
CASES: list[tuple[str, tuple[Any, ...], list[Any]]] = [
    ("linear.default", (R[0], R[1], R[2]), [X, (32, 16), (32,)]),
    ("linear.default", (R[0], R[1]), [(8, 16), (32, 16)]),
    ("matmul.default", (R[0], R[1]), [X, (4, 16, 8)]),
    ("bmm.default", (R[0], R[1]), [X, (4, 16, 8)]),
    ("mm.default", (R[0], R[1]), [(8, 16), (16, 4)]),
    ("addmm.default", (R[0], R[1], R[2]), [(4,), (8, 16), (16, 4)]),
    ("einsum.default", ("bij,bjk->bik", (R[0], R[1])), [X, (4, 16, 8)]),
    ("relu.default", (R[0],), [X]),
    ("gelu.default", (R[0],), [X]),
    ("silu.default", (R[0],), [X]),
    ("tanh.default", (R[0],), [X]),
    ("sigmoid.default", (R[0],), [X]),
    ("exp.default", (R[0],), [X]),
    ("log.default", (R[0],), [X]),
    ("sqrt.default", (R[0],), [X]),
    ("rsqrt.default", (R[0],), [X]),
    ("neg.default", (R[0],), [X]),
    ("abs.default", (R[0],), [X]),
    ("pow.Tensor_Scalar", (R[0], 2), [X]),
    ("add.Tensor", (R[0], R[1]), [X, Y]),
    ("add.Tensor", (R[0], R[1]), [X, (16,)]),
    ("sub.Tensor", (R[0], R[1]), [X, Y]),
    ("mul.Tensor", (R[0], R[1]), [X, Y]),
    ("mul.Tensor", (R[0], R[1]), [X, (Y, "float32")]),
    ("mul.Tensor", (R[0], 3.0), [X]),
    ("div.Tensor", (R[0], R[1]), [X, Y]),
    ("maximum.default", (R[0], R[1]), [X, Y]),
    ("where.self", (R[0], R[1], R[2]), [(X, "bool"), X, Y]),
    ("masked_fill.Scalar", (R[0], R[1], 0.0), [X, (X, "bool")]),
    ("softmax.int", (R[0], -1), [X]),
    ("log_softmax.int", (R[0], -1), [X]),
    ("layer_norm.default", (R[0], (16,), R[1], R[2]), [X, (16,), (16,)]),
    ("rms_norm.default", (R[0], (16,), R[1]), [X, (16,)]),
    ("group_norm.default", (R[0], 4, R[1], R[2]), [(4, 8, 6, 6), (8,), (8,)]),
    ("embedding.default", (R[0], R[1]), [(32, 16), ((4, 8), "int64")]),
    ("cross_entropy_loss.default", (R[0], R[1]), [(8, 32), ((8,), "int64")]),
    ("sum.dim_IntList", (R[0], (1,)), [X]),
    ("mean.dim", (R[0], (1,)), [X]),
    ("amax.default", (R[0], (1,)), [X]),
    ("cumsum.default", (R[0], 1), [X]),
    ("topk.default", (R[0], 2), [X]),
    ("cat.default", ((R[0], R[1]), 1), [X, Y]),
    ("stack.default", ((R[0], R[1]),), [X, Y]),
    ("chunk.default", (R[0], 2, -1), [X]),
    ("split.Tensor", (R[0], 4, 1), [X]),
    ("unbind.int", (R[0], 0), [X]),
    ("transpose.int", (R[0], 1, 2), [X]),
    ("permute.default", (R[0], (2, 0, 1)), [X]),
    ("reshape.default", (R[0], (32, 16)), [X]),
    ("flatten.using_ints", (R[0], 1), [X]),
    ("unsqueeze.default", (R[0], 1), [X]),
    ("expand.default", (R[0], (4, 8, 16)), [(4, 1, 16)]),
    ("slice.Tensor", (R[0], 1, 2, 6), [X]),
    ("select.int", (R[0], 1, 2), [X]),
    ("index_select.default", (R[0], 1, R[1]), [X, ((3,), "int64")]),
    ("gather.default", (R[0], 1, R[1]), [X, (X, "int64")]),
    ("clone.default", (R[0],), [X]),
    ("contiguous.default", (R[0],), [X]),
    ("dropout.default", (R[0], 0.1, True), [X]),
    ("dropout.default", (R[0], 0.0, True), [X]),
    ("conv2d.default", (R[0], R[1], R[2], (1, 1), (1, 1)), [(2, 4, 8, 8), (6, 4, 3, 3), (6,)]),
    ("conv1d.default", (R[0], R[1]), [(2, 4, 8), (6, 4, 3)]),
    ("max_pool2d.default", (R[0], (2, 2)), [(2, 4, 8, 8)]),
    ("avg_pool2d.default", (R[0], (2, 2)), [(2, 4, 8, 8)]),
    ("adaptive_avg_pool2d.default", (R[0], (1, 1)), [(2, 4, 8, 8)]),
    ("scaled_dot_product_attention.default", (R[0], R[1], R[2], None, 0.0, True), [(2, 4, 8, 16)] * 3),
]


def _strided(given: Any) -> Strided:
    if isinstance(given[-1], str):
        return Strided.contiguous(given[0], given[1])
    return Strided.contiguous(given, "float32", True)


def _real(tensor: Strided) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    if tensor.dtype == "int64":
        return torch.zeros(tensor.shape, dtype=dtype)
    return (torch.rand(tensor.shape) + 0.5).to(dtype).requires_grad_(tensor.grad)


def _really_saved(target: str, args: tuple[Any, ...], leaves: list[torch.Tensor]) -> tuple[list[int], int]:
    """Which arguments autograd keeps, and how many bytes beside them."""
    held = {leaf.untyped_storage().data_ptr(): i for i, leaf in reversed(list(enumerate(leaves)))}
    inputs: set[int] = set()
    others: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        kept.append(tensor)
        if key in held:
            inputs.add(held[key])
        else:
            others[key] = tensor.untyped_storage().nbytes()
        return tensor

    def filled(value: Any) -> Any:
        if isinstance(value, Ref):
            return leaves[int(value.name)]
        return [filled(v) for v in value] if isinstance(value, tuple) else value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made = resolve(target)(*(filled(a) for a in args))
    assert made is not None
    return sorted(inputs), sum(others.values())


@pytest.mark.parametrize(("name", "args", "shapes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_saved_as_autograd_saves(name: str, args: tuple[Any, ...], shapes: list[Any]) -> None:
    inputs = tuple(_strided(s) for s in shapes)
    call = OperatorCall(f"aten.{name}", args, (), tuple(range(len(inputs))))
    told = forward(call, inputs, "cpu")
    assert told.known
    saved_inputs, other_bytes = _really_saved(f"aten.{name}", args, [_real(t) for t in inputs])
    assert list(told.saved_inputs) == saved_inputs
    assert sum(told.fresh[i] for i in told.saved_fresh) == other_bytes


def _ask(name: str, args: tuple[Any, ...], *inputs: Strided, device: str = "cuda") -> Any:
    return forward(OperatorCall(f"aten.{name}", args, (), tuple(range(len(inputs)))), inputs, device)


def test_a_reshape_copies_only_where_strides_demand_it() -> None:
    straight = Strided.contiguous((4, 8, 4, 16), "float32", True)
    crossed = Strided((4, 8, 4, 16), (512, 16, 128, 1), "float32", True)
    assert _ask("reshape.default", (R[0], (4, 8, 64)), straight).fresh == ()
    assert _ask("reshape.default", (R[0], (4, 8, 64)), crossed).fresh == (4 * 8 * 64 * 4,)


def test_fused_attention_keeps_no_scores() -> None:
    q = Strided.contiguous((2, 4, 512, 64), "bfloat16", True)
    args = (R[0], R[1], R[2], None, 0.0, True)
    fused = _ask("scaled_dot_product_attention.default", args, q, q, q)
    kept = sum(fused.fresh[i] for i in fused.saved_fresh)
    assert fused.saved_inputs == (0, 1, 2)
    assert q.bytes <= kept < 1.2 * q.bytes  # the output and a row statistic; scores would be 8 times as much


def test_dropout_keeps_a_byte_per_element_on_cuda_and_a_float_on_cpu() -> None:
    x = Strided.contiguous((64, 64), "float32", True)
    for device, size in (("cuda", 64 * 64), ("cpu", 4 * 64 * 64)):
        told = _ask("dropout.default", (R[0], 0.1, True), x, device=device)
        assert sum(told.fresh[i] for i in told.saved_fresh) == size


def test_rms_norm_keeps_no_float32_copies_on_cuda() -> None:
    x, w = Strided.contiguous((8, 128, 64), "bfloat16", True), Strided.contiguous((64,), "bfloat16", True)
    told = _ask("rms_norm.default", (R[0], (64,), R[1], 1e-5), x, w)
    assert told.known and told.saved_inputs == (0, 1)
    assert sum(told.fresh[i] for i in told.saved_fresh) == 8 * 128 * 4  # one float32 statistic per row


def test_backward_of_cross_entropy_holds_two_more_logits() -> None:
    logits = Strided.contiguous((8, 100), "float32", True)
    targets = Strided.contiguous((8,), "int64")
    call = OperatorCall("aten.cross_entropy_loss.default", (R[0], R[1]), (), (0, 1))
    told = backward(call, (logits, targets), (Strided.contiguous((), "float32"),), "cuda")
    assert told.fresh == (logits.bytes,)
    assert told.temporary == logits.bytes
    assert told.gradients[1] is None


def test_a_gradient_that_passes_through_is_no_new_memory() -> None:
    x = Strided.contiguous((8, 100), "float32", True)
    call = OperatorCall("aten.add.Tensor", (R[0], R[1]), (), (0, 1))
    told = backward(call, (x, x), (Strided.contiguous((8, 100), "float32"),), "cuda")
    assert told.fresh == () and [g.owner for g in told.gradients if g is not None] == [-1, -1]


def test_an_operator_nobody_can_run_without_data_keeps_everything() -> None:
    x = Strided.contiguous((8, 100), "float32", True)
    told = forward(OperatorCall("aten.no_such_operator.default", (R[0],), (), (0,)), (x,), "cuda", None, (x,))
    assert not told.known
    assert told.saved_inputs == (0,) and told.fresh == (x.bytes,) and told.saved_fresh == (0,)


def test_what_is_taken_for_granted_is_not_remembered_for_others() -> None:
    x, mask = Strided.contiguous((8, 100), "float32", True), Strided.contiguous((8,), "bool")
    call = OperatorCall("aten.index.Tensor", (R[0], (R[1],)), (), (0, 1))
    assert forward(call, (x, mask), "cpu").results == ()  # asked by somebody who does not know
    for rows in (3, 5):  # as many as the data of either select
        expected = Strided.contiguous((rows, 100), "float32", True)
        (told,) = forward(call, (x, mask), "cpu", None, (expected,)).results
        assert told is not None and told.tensor == expected


def test_libraries_take_their_share() -> None:
    hopper = mesh_of(parse_cluster("8xH200")).device
    assert workspace(hopper) == 64 * 2**20
    assert workspace(mesh_of(parse_cluster("local:1")).device) == 0
    q = Strided.contiguous((2, 8, 128, 64), "bfloat16", True)
    assert record("aten.scaled_dot_product_attention.default").reserve("cuda", [q, q, q], [q]) == (0, 2 * q.bytes)
