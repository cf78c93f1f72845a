"""Gathers, scatters and advanced indexing: free along the dims they do not look up.

A lookup along a dim is a sum over which element is hit, so gathers can also be cut along the dim they look into.

Lookups into a cut dim: what lies elsewhere counts as zero, the sum over the pieces is the lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shardwright.operators.families.embeddings import lookup_kernels
from shardwright.operators.language import Expression, Opaque, Sum, TensorArgument, hit, put, where
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import bools, ints, positive, reals

ALL = slice(None)


@describes("aten.gather.default", kind="gather")
def gather(x: TensorArgument, dim: int, index: TensorArgument) -> Any:
    if x.rank == 0:
        return None
    at = dim % x.rank
    return lambda *i: Sum(lambda v: hit(index[i], v) * x[put(i, at, v)], [x.shape[at]])


@describes("aten.take_along_dim.default", kind="gather")
def take_along_dim(x: TensorArgument, index: TensorArgument, dim: int | None) -> Any:
    if dim is None or x.rank == 0:
        return None
    at = dim % x.rank
    return lambda *i: Opaque(index.at(i), x.at(put(i, at, ALL)))


@describes("aten.index_select.default", kind="gather")
def index_select(x: TensorArgument, dim: int, index: TensorArgument) -> Any:
    if x.rank == 0 or index.rank == 0:
        return None
    at = dim % x.rank
    return lambda *i: Sum(lambda v: hit(index[i[at]], v) * x[put(i, at, v)], [x.shape[at]])


def _layout(x: TensorArgument, indices: Sequence[Any]) -> tuple[list[int], int, int] | None:
    """Indexed dims, where the index dims stand in the result, and how many they are; ``None`` for boolean masks."""
    given = [d for d, entry in enumerate(indices) if entry is not None]
    if any(indices[d].dtype in ("bool", "uint8") for d in given) or not given:
        return None
    adjacent = given == list(range(given[0], given[-1] + 1))
    return given, given[0] if adjacent else 0, max(indices[d].rank for d in given)


def _element(x: TensorArgument, i: Sequence[Any], found: tuple[list[int], int, int]) -> tuple[tuple[Any, ...], Any]:
    """``x``'s indices for a result element, and the part of the result's indices that belongs to the index tensors."""
    given, place, count = found
    rest = iter([*i[:place], *i[place + count :]])
    return tuple(ALL if d in given else next(rest) for d in range(x.rank)), tuple(i[place : place + count])


@describes("aten.index.Tensor", "aten._unsafe_index.Tensor", kind="gather")
def index_tensor(x: TensorArgument, indices: Sequence[Any]) -> Any:
    found = _layout(x, indices)
    if found is None:
        return None

    def element(*i: Any) -> Expression:
        source, looked_up = _element(x, i, found)
        return Opaque(x[source], *(indices[d].at(looked_up) for d in found[0]))

    return element


@describes("aten.index_put.default", "aten._unsafe_index_put.default", kind="gather")
def index_put(x: TensorArgument, indices: Sequence[Any], values: TensorArgument) -> Any:
    """Indexed dims are written by data: they stay whole. The other dims of ``x`` and ``values`` are cut together.

    A mask that fills with one value is element-wise: ``x[mask] = 0``.
    """
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == "bool" and values.rank == 0:
        mask = indices[0]
        return lambda *i: where(mask[i[: mask.rank]], values[()], x[i])
    found = _layout(x, indices)
    if found is None:
        return None
    given, place, count = found

    def element(*i: Any) -> Expression:
        rest = [entry for d, entry in enumerate(i) if d not in given]
        written = values.at([*rest[:place], *(ALL,) * count, *rest[place:]])
        wholes = (indices[d][(ALL,) * indices[d].rank] for d in given)
        return Opaque(x[tuple(ALL if d in given else entry for d, entry in enumerate(i))], written, *wholes)

    return element


def _scatter(x: TensorArgument, dim: int, index: TensorArgument, source: Any) -> Any:
    """Dims that index, source and target share in full are free; the scattered dim and all others stay whole."""
    if x.rank == 0 or index.rank == 0:
        return None
    at = dim % x.rank
    tensors = [index, source] if isinstance(source, TensorArgument) else [index]
    free = [d for d in range(x.rank) if d != at and all(t.shape[d] == x.shape[d] for t in tensors)]

    def element(*i: Any) -> Expression:
        where = tuple(entry if d in free else ALL for d, entry in enumerate(i))
        return Opaque(x[where], *(t[where] for t in tensors))

    return element


@describes("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", kind="gather")
def scatter(x: TensorArgument, dim: int, index: TensorArgument, source: Any) -> Any:
    return _scatter(x, dim, index, source)


@describes("aten.scatter.reduce", "aten.scatter.value_reduce", "aten.scatter_reduce.two", kind="gather")
def scatter_reduce(x: TensorArgument, dim: int, index: TensorArgument, source: Any) -> Any:
    return _scatter(x, dim, index, source)


@describes("aten.index_add.default", "aten.index_copy.default", kind="gather")
def index_add(x: TensorArgument, dim: int, index: TensorArgument, source: TensorArgument) -> Any:
    if x.rank == 0:
        return None
    at = dim % x.rank
    return lambda *i: Opaque(x[put(i, at, ALL)], source[put(i, at, ALL)], index[(ALL,) * index.rank])


@describes("aten.index_fill.int_Scalar", kind="gather")
def index_fill(x: TensorArgument, dim: int, index: TensorArgument) -> Any:
    at = dim % max(x.rank, 1)
    return lambda *i: Opaque(x[put(i, at, ALL)], index[(ALL,) * index.rank])


@describes("aten.select_scatter.default", kind="copy")
def select_scatter(x: TensorArgument, source: TensorArgument, dim: int) -> Any:
    at = dim % x.rank
    return lambda *i: x[put(i, at, ALL)] + source[(*i[:at], *i[at + 1 :])]


@describes("aten.slice_scatter.default", kind="copy")
def slice_scatter(x: TensorArgument, source: TensorArgument, dim: int) -> Any:
    at = dim % x.rank
    return lambda *i: x[put(i, at, ALL)] + source[put(i, at, ALL)]


@describes("aten.bucketize.Tensor", kind="elementwise")
def bucketize(x: TensorArgument, boundaries: TensorArgument) -> Any:
    return lambda *i: Opaque(x[i], boundaries[ALL])


@describes("aten.searchsorted.Tensor", kind="gather")
def searchsorted(boundaries: TensorArgument, x: TensorArgument) -> Any:
    if boundaries.rank == 1:
        return lambda *i: Opaque(x[i], boundaries[ALL])
    return lambda *i: Opaque(x[i], boundaries[(*i[:-1], ALL)])


@describes("aten.isin.Tensor_Tensor", kind="elementwise")
def isin(x: TensorArgument, values: TensorArgument) -> Any:
    return lambda *i: Opaque(x[i], values[(ALL,) * values.rank])


@computes("aten.gather.default", "aten.index_select.default")
def lookup_piece(call: Call) -> Piece | None:
    import torch

    rank = len(call.tensors[call.op.inputs[0]].shape)
    dim = call.argument("dim") % rank
    span = call.input_spans(0).get(dim)
    if span is None:
        return None
    gather = "gather" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        x, index = arguments["self"], arguments["index"] - span.start
        here = (index >= 0) & (index < span.size)
        near = torch.where(here, index, 0)
        found = x.gather(dim, near) if gather else x.index_select(dim, near)
        if not gather:
            here = here.view([-1 if d == dim else 1 for d in range(rank)])
        return torch.where(here, found, torch.zeros((), dtype=x.dtype, device=x.device))

    return call.kernel(kernel)


known("aten.gather", "aten.index_select", kernels=partial(lookup_kernels, added=True))
known("aten.index", kernels=lookup_kernels)


known(
    "aten.gather.default",
    samples=lambda a, b, c: [(reals(a, b), 1, ints(a, c, below=b)), (reals(a, b), 0, ints(c, b, below=a))],
)
known("aten.take_along_dim.default", samples=lambda a, b, c: [(reals(a, b), ints(a, c, below=b), 1)])
known("aten.index_select.default", samples=lambda a, b, c: [(reals(a, b), 1, ints(c, below=b))])
known(
    "aten.index.Tensor",
    "aten._unsafe_index.Tensor",
    samples=lambda a, b, c, d: [
        (reals(a, b), [ints(c, below=a)]),
        (reals(a, b, c), [None, ints(d, below=b)]),
        (reals(a, b, c), [ints(d, 1, below=a), ints(b, below=b)]),
        (reals(a, b, c), [ints(d, below=a), None, ints(d, below=c)]),
    ],
)
known(
    "aten._unsafe_index_put.default",
    samples=lambda a, b, c: [
        (reals(a, b), [ints(c, below=a)], reals(c, b), True),
        (reals(a, b, c), [None, ints(4, below=b)], reals(c), True),
    ],
)
known(
    "aten.scatter.src",
    "aten.scatter_add.default",
    samples=lambda a, b: [(reals(a, b), 1, ints(a, 1, below=b), reals(a, 1))],
)
known("aten.scatter.value", samples=lambda a, b, c: [(reals(a, b), 1, ints(a, c, below=b), 1.0)])
known("aten.scatter_reduce.two", samples=lambda a, b, c: [(reals(a, b), 1, ints(a, c, below=b), reals(a, c), "sum")])
known(
    "aten.scatter.reduce",
    samples=lambda a, b, c: [
        (reals(a, b, grad=False), 1, ints(a, c, below=b), reals(a, c, grad=False), {"reduce": "add"})
    ],
)
known(
    "aten.scatter.value_reduce",
    samples=lambda a, b, c: [(reals(a, b, grad=False), 1, ints(a, c, below=b), 2.0, {"reduce": "multiply"})],
)
known("aten.index_add.default", samples=lambda a, b, c: [(reals(a, b), 1, ints(c, below=b), reals(a, c))])
known("aten.index_copy.default", samples=lambda a, b: [(reals(a, b), 1, ints(1, below=b), reals(a, 1))])
known("aten.index_fill.int_Scalar", samples=lambda a, b, c: [(reals(a, b), 1, ints(c, below=b), 2.0)])
known("aten.select_scatter.default", samples=lambda a, b, c: [(reals(a, b, c), reals(a, c), 1, 2)])
known("aten.slice_scatter.default", samples=lambda a, b, c: [(reals(a, b, c), reals(a, 3, c), 1, 1, 4)])
known("aten.bucketize.Tensor", samples=lambda a, b: [(positive(a, b, grad=False), positive(1, grad=False))])
known(
    "aten.searchsorted.Tensor",
    samples=lambda a, b: [
        (positive(1, grad=False), positive(a, b, grad=False)),
        (positive(a, 1, grad=False), positive(a, b, grad=False)),
    ],
)
known("aten.isin.Tensor_Tensor", samples=lambda a, b, c: [(ints(a, b, below=9), ints(c, below=9))])

known(
    "aten.index_put.default",
    samples=lambda a, b, c: [
        (reals(a, b), [ints(c, below=a)], reals(c, b), True),
        (reals(a, b, c), [None, ints(4, below=b)], reals(c), True),
        (reals(a, b, c), [bools(a, b)], reals()),
    ],
)


known(
    "aten.gather",
    "aten.scatter",
    "aten.scatter_add",
    "aten.index",
    "aten._unsafe_index",
    "aten.index_select",
    "aten.index_add",
    "aten.index_put",
    "aten._unsafe_index_put",
    any_strides=True,
)
