"""Views: the same elements at other indices. A reshape is the linear index of the output taken apart again, and the
analysis finds which dims survive, which are merged and can be cut in equal pieces, and which cannot be cut.

Views are told sizes: a piece is told its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.operators.indices import affine
from shardwright.operators.language import TensorArgument, call, put
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import HostClass, computes, describes, known
from shardwright.operators.rules import Window
from shardwright.operators.samples import complexes, reals
from shardwright.operators.work import LocalOp, Work, kept_dims, memory_work, summed


def flat(index: Sequence[Any], shape: Sequence[int]) -> Any:
    """The linear (row-major) index of an element."""
    position = affine(0)
    for entry, extent in zip(index, shape, strict=True):
        position = position * extent + entry
    return position


def unflat(position: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """The indices of the element at a linear index."""
    index = []
    for dim in range(len(shape)):
        behind = math.prod(shape[dim + 1 :])
        index.append((position // behind % shape[dim]) if math.prod(shape) else affine(0))
    return tuple(index)


@describes(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.view_copy.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.ravel.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims",
    "aten.unsqueeze.default",
    "aten.unsqueeze_copy.default",
    "aten.atleast_1d.default",
    "aten.atleast_2d.default",
    "aten.atleast_3d.default",
    kind="view",
)
def reshape(x: TensorArgument, *, out: Any) -> Any:
    return lambda *i: x[unflat(flat(i, out[0]), x.shape)]


@describes("aten.reshape_as.default", "aten.view_as.default", kind="view")
def reshape_as(x: TensorArgument, other: TensorArgument) -> Any:
    """``other`` only lends its shape, so it is cut like the result."""
    return lambda *i: x[unflat(flat(i, other.shape), x.shape)] * call("shape", other[i])


@describes("aten.view.dtype", "aten.view_copy.dtype", kind="view")
def view_dtype(x: TensorArgument, *, out: Any) -> Any:
    """The same bytes read as another type: element by element where both are equally wide, else the last dim is whole."""
    if out[0] == x.shape:
        return lambda *i: call("bits", x[i])
    return lambda *i: call("bits", x[(*i[:-1], slice(None))])


def permuted(x: TensorArgument, order: Sequence[int]) -> Any:
    """Output dim d is input dim ``order[d]``."""
    place = {source % x.rank: d for d, source in enumerate(order)}
    return lambda *i: x[tuple(i[place[d]] for d in range(x.rank))]


@describes("aten.permute.default", "aten.permute_copy.default", kind="view")
def permute(x: TensorArgument, dims: Sequence[int]) -> Any:
    return permuted(x, dims)


@describes(
    "aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default", "aten.swapdims.default", kind="view"
)
def transpose(x: TensorArgument, dim0: int, dim1: int) -> Any:
    order = list(range(x.rank))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(x, order)


@describes("aten.t.default", "aten.t_copy.default", "aten.numpy_T.default", kind="view")
def reverse_dims(x: TensorArgument) -> Any:
    return permuted(x, range(x.rank - 1, -1, -1))


@describes("aten.mT.default", "aten.adjoint.default", "aten.mH.default", kind="view")
def matrix_transpose(x: TensorArgument) -> Any:
    return permuted(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


@describes("aten.movedim.intlist", "aten.moveaxis.intlist", kind="view")
def movedims(x: TensorArgument, source: Sequence[int], destination: Sequence[int]) -> Any:
    order: list[int] = [-1] * x.rank
    for s, d in zip(source, destination, strict=True):
        order[d % x.rank] = s % x.rank
    rest = iter(d for d in range(x.rank) if d not in {s % x.rank for s in source})
    return permuted(x, [next(rest) if o < 0 else o for o in order])


@describes("aten.movedim.int", "aten.moveaxis.int", kind="view")
def movedim(x: TensorArgument, source: int, destination: int) -> Any:
    return movedims(x, (source,), (destination,))


@describes(
    "aten.expand.default",
    "aten.expand_copy.default",
    "aten.broadcast_to.default",
    kind="view",
)
def expand(x: TensorArgument) -> Any:
    return lambda *i: x.at(i)


@describes("aten.expand_as.default", kind="view")
def expand_as(x: TensorArgument, other: TensorArgument) -> Any:
    return lambda *i: x.at(i) * call("shape", other[i])


@describes("aten.repeat.default", "aten.tile.default", kind="view")
def repeat(x: TensorArgument, *, out: Any) -> Any:
    lead = len(out[0]) - x.rank
    return lambda *i: x[tuple(i[lead + d] % extent for d, extent in enumerate(x.shape))]


@describes("aten.repeat_interleave.self_int", kind="copy")
def repeat_interleave(x: TensorArgument, repeats: int, dim: int | None) -> Any:
    if dim is None:
        return lambda i: x[unflat(i // repeats, x.shape)]
    return lambda *i: x[put(i, dim % x.rank, i[dim] // repeats)]


@describes("aten.slice.Tensor", "aten.slice_copy.Tensor", kind="view")
def slice_(x: TensorArgument, dim: int, start: int | None, end: int | None, step: int) -> Any:
    extent = x.shape[dim]
    first = min(max((start or 0) + (extent if (start or 0) < 0 else 0), 0), extent)
    return lambda *i: x[put(i, dim % x.rank, i[dim] * step + first)]


@describes("aten.narrow.default", "aten.narrow_copy.default", kind="view")
def narrow(x: TensorArgument, dim: int, start: int, length: int) -> Any:
    return slice_(x, dim, start, None, 1)


@describes("aten.select.int", "aten.select_copy.int", kind="view")
def select(x: TensorArgument, dim: int, index: int) -> Any:
    at = dim % x.rank
    return lambda *i: x[(*i[:at], index % x.shape[at], *i[at:])]


@describes(
    "aten.split.Tensor",
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    "aten.split_copy.Tensor",
    "aten.chunk.default",
    "aten.unsafe_chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.tensor_split.sections",
    "aten.tensor_split.indices",
    kind="view",
)
def split(x: TensorArgument, sizes: Any, dim: int, *, out: Any) -> Any:
    """The parts lie one behind the other in ``dim``, which therefore is needed whole; all other dims can be cut."""
    return (lambda *i: x[put(i, dim % x.rank, slice(None))] * 1,) * len(out)


@describes("aten.unbind.int", "aten.unbind_copy.int", kind="view")
def unbind(x: TensorArgument, dim: int) -> Any:
    at = dim % x.rank
    return tuple(lambda *i, n=n: x[(*i[:at], n, *i[at:])] for n in range(x.shape[at]))


@describes("aten.diagonal.default", "aten.diagonal_copy.default", kind="view")
def diagonal(x: TensorArgument, offset: int, dim1: int, dim2: int) -> Any:
    first, second = dim1 % x.rank, dim2 % x.rank

    def element(*i: Any) -> Any:
        rest = iter(i[:-1])
        return x[tuple(slice(None) if d in (first, second) else next(rest) for d in range(x.rank))]

    return element


@describes("aten.flip.default", kind="copy")
def flip(x: TensorArgument, dims: Sequence[int]) -> Any:
    flipped = {d % x.rank for d in dims}
    return lambda *i: x[tuple(slice(None) if d in flipped else entry for d, entry in enumerate(i))]


@describes("aten.roll.default", kind="copy")
def roll(x: TensorArgument, shifts: Sequence[int], dims: Sequence[int]) -> Any:
    rolled = {d % x.rank for d in dims} if dims else set(range(x.rank))
    return lambda *i: x[tuple(slice(None) if d in rolled else entry for d, entry in enumerate(i))]


@describes("aten.unfold.default", kind="view")
def unfold(x: TensorArgument, dim: int, size: int, step: int) -> Any:
    at = dim % max(x.rank, 1)
    return lambda *i: x[put(i[:-1], at, i[at] * step + i[-1])]


@describes("aten.view_as_real.default", "aten.view_as_real_copy.default", kind="view")
def view_as_real(x: TensorArgument) -> Any:
    return lambda *i: x[i[:-1]] * 1


@describes("aten.view_as_complex.default", "aten.view_as_complex_copy.default", kind="view")
def view_as_complex(x: TensorArgument) -> Any:
    return lambda *i: x[(*i, slice(None))] * 1


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
def reshape_piece(call: Call) -> Piece:
    """A reshape to the local shape; ``squeeze`` too, so that a dim that is one long only here stays."""
    local = replace(call.op, target="aten.reshape.default", args=(call.op.args[0], call.local_shape()), kwargs=())
    return Piece(op=local)


@computes("aten.expand.default", "aten.expand_copy.default", "aten.broadcast_to.default", "aten.expand_as.default")
def expand_piece(call: Call) -> Piece:
    return Piece(
        op=replace(call.op, target="aten.expand.default", args=(call.op.args[0], call.local_shape()), kwargs=())
    )


@computes("aten.repeat.default", "aten.tile.default")
def repeat_piece(call: Call) -> Piece:
    """Where a dim that every piece has whole is repeated, the piece repeats it less often."""
    repeats: list[int] = list(call.op.args[1])  # type: ignore[arg-type]  # a tuple of integers by its schema
    shape = call.output.shape
    repeats = [1] * (len(shape) - len(repeats)) + repeats
    source = call.tensors[call.op.inputs[0]].shape
    for dim, span in call.output_spans().items():
        inner = dim - (len(shape) - len(source))
        if inner < 0 or repeats[dim] > 1:
            repeats[dim] = span.size // (1 if inner < 0 else source[inner])
    return Piece(op=replace(call.op, target="aten.repeat.default", args=(call.op.args[0], tuple(repeats))))


@computes("aten.slice.Tensor", "aten.slice_copy.Tensor", "aten.narrow.default", "aten.narrow_copy.default")
def slice__piece(call: Call) -> Piece | None:
    """A window starts with the first element wanted: what remains of the slice is its step."""
    dim = call.argument("dim", 0) % len(call.output.shape)
    needs = [call.rules.by_name[loop].inputs[0] for loop in call.ranges]
    if not any(isinstance(need, Window) for need in needs):
        return None
    step = call.argument("step", 1)
    args = (call.op.args[0], dim, 0, 9223372036854775807, step)
    return Piece(op=replace(call.op, target="aten.slice.Tensor", args=args, kwargs=()))


@computes("aten.unfold.default")
def unfold_piece(call: Call) -> Piece | None:
    """Windows hold just the elements of the local windows, so the operator itself is right."""
    return None


known("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", reshapes=True)


def _cut_gradient(local: LocalOp) -> list[Work]:
    """Zeros, and what was cut out put where it was."""
    part = memory_work("clone/forward", local.dtype, 2 * local.output_bytes)
    return [memory_work("clone/forward", local.dtype, local.input_bytes(0)), part]


def _pieces_gradient(local: LocalOp) -> list[Work]:
    return [memory_work("cat/forward", local.dtype, 2 * local.input_bytes(0))]


def _repeated_gradient(local: LocalOp, whole_rows: bool = True) -> list[Work]:
    """The sum over what was repeated."""
    if local.outputs[0].elements <= local.inputs[0].elements:
        return []
    kept = kept_dims(local.inputs[0], local.outputs[0]) if whole_rows else [True]
    extents = local.output_shapes[0] if whole_rows else local.input_shapes[0][:, -1:]
    return [summed(local.dtype, local.input_bytes(0) + local.output_bytes, extents, kept)]


known("aten.slice", "aten.select", "aten.narrow", view_gradient=_cut_gradient, issued=HostClass("slice"))
_PIECES = (f"aten.{name}" for name in ("chunk", "split", "split_with_sizes", "unbind", "tensor_split"))
known(*_PIECES, view_gradient=_pieces_gradient, issued=HostClass("chunk"))
known("aten.expand", "aten.expand_as", view_gradient=_repeated_gradient)
known("aten.repeat", view_gradient=lambda local: _repeated_gradient(local, whole_rows=False))


known(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.view_copy.default",
    samples=lambda a, b, c: [
        (reals(a, b, c), (a * b, c)),
        (reals(a, b, c), (a, b * c)),
        (reals(a, b, c), (a * b * c,)),
        (reals(a * b, c), (a, b, 1, c)),
        (reals(a, b * c), (a, b, c)),
        (reals(a, 1, c), (a, c)),
        (reals(a, b * c), (a * b, c)),
        (reals(a, b, 2, c), (a, 2 * b, c)),
    ],
)
known("aten.flatten.using_ints", samples=lambda a, b, c: [(reals(a, b, c), 0, 1), (reals(a, b, c), 1, -1)])
known("aten.unflatten.int", samples=lambda a, b, c: [(reals(a, b * c), 1, (b, c))])
known(
    "aten.ravel.default",
    "aten.squeeze.default",
    "aten.atleast_1d.default",
    "aten.atleast_2d.default",
    "aten.atleast_3d.default",
    samples=lambda a, b: [(reals(a, 1, b),)],
)
known(
    "aten.squeeze.dim",
    "aten.squeeze_copy.dim",
    "aten.unsqueeze.default",
    "aten.unsqueeze_copy.default",
    samples=lambda a, b: [(reals(a, 1, b), 1)],
)
known("aten.squeeze.dims", "aten.squeeze_copy.dims", samples=lambda a, b: [(reals(a, 1, b, 1), (1, 3))])
known(
    "aten.view.dtype",
    "aten.view_copy.dtype",
    samples=lambda a, b: [(reals(a, b, grad=False), torch.int64), (reals(a, b, grad=False), torch.int32)],
)
known("aten.reshape_as.default", "aten.view_as.default", samples=lambda a, b: [(reals(a, b), reals(a * b))])
known(
    "aten.permute.default",
    "aten.permute_copy.default",
    samples=lambda a, b, c: [(reals(a, b, c), (2, 0, 1)), (reals(a, b, c), (-1, 1, 0))],
)
known(
    "aten.transpose.int",
    "aten.transpose_copy.int",
    "aten.swapaxes.default",
    "aten.swapdims.default",
    samples=lambda a, b, c: [(reals(a, b, c), 0, -1)],
)
known(
    "aten.t.default",
    "aten.numpy_T.default",
    "aten.t_copy.default",
    "aten.mT.default",
    "aten.adjoint.default",
    "aten.mH.default",
    samples=lambda a, b: [(reals(a, b),)],
)
known("aten.movedim.int", "aten.moveaxis.int", samples=lambda a, b, c: [(reals(a, b, c), 0, 2)])
known("aten.movedim.intlist", "aten.moveaxis.intlist", samples=lambda a, b, c: [(reals(a, b, c), (0, 1), (2, 0))])
known("aten.expand_as.default", samples=lambda a, b: [(reals(1, b), reals(a, b))])
known(
    "aten.repeat.default",
    "aten.tile.default",
    samples=lambda a, b: [
        (reals(a, 1), (1, b)),
        (reals(a, b), (2, 1, 1)),
        (reals(a, b), (2, 1)),
        (reals(a, b), (12, 3)),
    ],
)
known("aten.repeat_interleave.self_int", samples=lambda a, b: [(reals(a, b), 3, 1), (reals(a, b), 2)])
known(
    "aten.slice.Tensor",
    "aten.slice_copy.Tensor",
    samples=lambda a, b, c: [
        (reals(a, b), 1, 1, 9223372036854775807),
        (reals(a, b, c), 1, 0, -1),
        (reals(a, 4 * b), -1, 1, 9223372036854775807, 2),
        (reals(a, b), 0, 0, 9223372036854775807),
    ],
)
known("aten.narrow.default", "aten.narrow_copy.default", samples=lambda a, b: [(reals(a, b), 1, 1, b - 2)])
known("aten.select.int", "aten.select_copy.int", samples=lambda a, b, c: [(reals(a, b, c), 1, -1)])
known(
    "aten.split.Tensor",
    "aten.chunk.default",
    "aten.unsafe_chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.tensor_split.sections",
    "aten.split_copy.Tensor",
    samples=lambda a, b, c: [(reals(a, 3 * b, c), 3, 1)],
)
known(
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    samples=lambda a, b: [(reals(a, b), (1, b - 1), 1)],
)
known("aten.tensor_split.indices", samples=lambda a, b: [(reals(a, b), (1, 3), 1)])
known("aten.unbind.int", "aten.unbind_copy.int", samples=lambda a, b: [(reals(a, 3, b), 1)])
known("aten.diagonal.default", "aten.diagonal_copy.default", samples=lambda a, b, c: [(reals(a, b, c), 0, 1, 2)])
known("aten.flip.default", samples=lambda a, b: [(reals(a, b), (1,))])
known("aten.roll.default", samples=lambda a, b: [(reals(a, b), (2,), (1,)), (reals(a, b), (2,))])
known("aten.unfold.default", samples=lambda a, b: [(reals(a, 2 * b), 1, 3, 1), (reals(a, 4 * b), 1, 4, 4)])
known("aten.view_as_real.default", "aten.view_as_real_copy.default", samples=lambda a, b: [(complexes(a, b),)])
known("aten.view_as_complex_copy.default", samples=lambda a, b: [(reals(a, b, 2, grad=False),)])
known("aten.view_as_complex.default", samples=lambda a, b: [(reals(a, b, 2),)])

known(
    "aten.expand.default",
    "aten.expand_copy.default",
    "aten.broadcast_to.default",
    samples=lambda a, b, c: [(reals(b, 1), (a, b, c)), *([(reals(1, b), (a, b))] if a > 1 else [])],
)


known(
    "aten.view",
    "aten._unsafe_view",
    "aten.reshape",
    "aten.t",
    "aten.transpose",
    "aten.permute",
    "aten.expand",
    "aten.slice",
    "aten.select",
    "aten.unsqueeze",
    "aten.squeeze",
    "aten.split",
    "aten.split_with_sizes",
    "aten.unbind",
    "aten.diagonal",
    "aten.unfold",
    "aten.slice_backward",
    "aten.select_backward",
    "aten.repeat",
    "aten.flip",
    "aten.roll",
    "aten.constant_pad_nd",
    any_strides=True,
)
