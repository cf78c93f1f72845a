"""Operators that cannot be described, each with the reason. They are run whole on every rank, which is always correct."""

from __future__ import annotations

from typing import Any

from shardwright.errors import GraphError
from shardwright.frontend.group_text import calls_inside
from shardwright.graph import Op
from shardwright.operators.record import known

BACKWARD = "it only occurs in backward graphs, which PyTorch derives from the pieces of the forward operator"
DATA = "the size of its result depends on the data"
MEMORY = "its meaning depends on how its input lies in memory, which a shard changes"
STATE = "it writes into its inputs; captured graphs hold its functional form"
BAGS = "bags end where the data says, and its further outputs are there for its backward only"
ORDER = "which element goes where depends on the order of all elements before it"

WHOLE = "all ranks ask about the whole tensor, so that all of them go on or stop together"

_REASONS = {
    "aten._adaptive_avg_pool2d_backward.default": BACKWARD,
    "aten.avg_pool2d_backward.default": BACKWARD,
    "aten.convolution_backward.default": BACKWARD,
    "aten.embedding_dense_backward.default": BACKWARD,
    "aten.max_pool2d_with_indices_backward.default": BACKWARD,
    "aten.native_group_norm_backward.default": BACKWARD,
    "aten.native_layer_norm_backward.default": BACKWARD,
    "aten._native_batch_norm_legit.default": STATE,
    "aten.resize_.default": STATE,
    "aten.nonzero.default": DATA,
    "aten.nonzero_static.default": ORDER,
    "aten.masked_select.default": DATA,
    "aten.unique.default": DATA,
    "aten._unique2.default": DATA,
    "aten.unique_consecutive.default": DATA,
    "aten.repeat_interleave.Tensor": DATA,
    "aten.repeat_interleave.self_Tensor": DATA,
    "aten.bincount.default": DATA,
    "aten.masked_scatter.default": ORDER,
    "aten.randperm.default": "a permutation of all elements is drawn at once",
    "aten.multinomial.default": "it draws from one stream of random numbers, row after row",
    "aten.empty_strided.default": MEMORY,
    "aten.as_strided.default": MEMORY,
    "aten.as_strided_copy.default": MEMORY,
    "aten._embedding_bag.default": BAGS,
    "aten._embedding_bag_forward_only.default": BAGS,
    "aten.embedding_bag.padding_idx": BAGS,
    "shardwright.assumed.default": WHOLE,
    "shardwright.unknown_extents.default": DATA,
    "aten._pdist_forward.default": "its result is a triangle of pairs laid out flat: no dim of it belongs to one row",
    "aten.pdist.default": "its result is a triangle of pairs laid out flat: no dim of it belongs to one row",
}

for _target, _why in _REASONS.items():
    known(_target, whole=_why, recordable=_why != DATA)

known("aten.multinomial", python={"multinomial": "picked"})
known("aten.sym_size", "aten.sym_numel", any_strides=True)  # how many rows a mask selects: no element is read


def _performed(op: Op) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    if len(op.args) != 2 or not isinstance(op.args[0], str) or not isinstance(op.args[1], tuple):
        raise GraphError(f"the group {op.name!r} does not say what it performs.", "Capture the model again.")
    return calls_inside(op.args[0], len(op.args[1]))


known("shardwright.assumed", "shardwright.ctc_loss", "shardwright.unknown_extents", in_files=True)
known("shardwright.unknown_extents", performs=_performed)
