"""Views are told sizes: a piece is told its own."""

from __future__ import annotations

from dataclasses import replace

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes
from shardwright.operators.rules import Window


@computes(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.view_copy.default",
    "aten.unflatten.int",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.reshape_as.default",
    "aten.view_as.default",
)
def reshape(call: Call) -> Piece:
    """A reshape to the local shape; ``squeeze`` too, so that a dim that is one long only here stays."""
    local = replace(call.op, target="aten.reshape.default", args=(call.op.args[0], call.local_shape()), kwargs=())
    return Piece(op=local)


@computes("aten.expand.default", "aten.expand_copy.default", "aten.broadcast_to.default", "aten.expand_as.default")
def expand(call: Call) -> Piece:
    return Piece(
        op=replace(call.op, target="aten.expand.default", args=(call.op.args[0], call.local_shape()), kwargs=())
    )


@computes("aten.repeat.default", "aten.tile.default")
def repeat(call: Call) -> Piece:
    """Where a dim of size one is repeated, the piece repeats it less often."""
    repeats = list(call.op.args[1])  # type: ignore[arg-type]  # a tuple of integers by its schema
    shape = call.output.shape
    repeats = [1] * (len(shape) - len(repeats)) + repeats
    source = call.tensors[call.op.inputs[0]].shape
    for dim, span in call.output_spans().items():
        inner = dim - (len(shape) - len(source))
        if inner < 0 or source[inner] == 1:
            repeats[dim] = span.size
    return Piece(op=replace(call.op, target="aten.repeat.default", args=(call.op.args[0], tuple(repeats))))


@computes("aten.slice.Tensor", "aten.slice_copy.Tensor", "aten.narrow.default", "aten.narrow_copy.default")
def slice_(call: Call) -> Piece | None:
    """A window starts with the first element wanted: what remains of the slice is its step."""
    dim = call.argument("dim", 0) % len(call.output.shape)
    needs = [call.rules.by_name[loop].inputs[0] for loop in call.ranges]
    if not any(isinstance(need, Window) for need in needs):
        return None
    step = call.argument("step", 1)
    args = (call.op.args[0], dim, 0, 9223372036854775807, step)
    return Piece(op=replace(call.op, target="aten.slice.Tensor", args=args, kwargs=()))


@computes("aten.unfold.default")
def unfold(call: Call) -> Piece | None:
    """Windows hold just the elements of the local windows, so the operator itself is right."""
    return None
