"""Reductions over some dims. Sums stay unreduced when a summed dim is cut; means and variances need the global count.

Reductions over cut dims that need to know the global count or a global statistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardwright.operators.language import Expression, Max, Min, Opaque, Prod, Sum, TensorArgument, call
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import bools, ints, reals
from shardwright.operators.work import Kernels, LocalOp, memory_kernels, summed


def dims_of(x: TensorArgument, dims: Any) -> list[int]:
    """The reduced dims as a list; none given means all."""
    chosen = [dims] if isinstance(dims, int) else list(dims or range(x.rank))
    return sorted({d % max(x.rank, 1) for d in chosen}) if x.rank else []


def reduced(x: TensorArgument, dims: Any, keepdim: bool, body: Any) -> Any:
    """A lambda over the output's indices; ``body(read, extents)`` gets ``read(*k)``, the element at reduced indices k."""
    chosen = dims_of(x, dims)
    extents = [x.shape[d] for d in chosen]

    def element(*i: Any) -> Expression:
        kept = iter(entry for d, entry in enumerate(i) if not (keepdim and d in chosen))
        rest = {d: next(kept) for d in range(x.rank) if d not in chosen}

        def read(*k: Any) -> Expression:
            inner = dict(zip(chosen, k, strict=True))
            return x[tuple(inner[d] if d in inner else rest[d] for d in range(x.rank))]

        return body(read, extents)

    return element


def total(read: Any, extents: Sequence[int]) -> Expression:
    return Sum(lambda *k: read(*k), extents) if extents else read() * 1


@describes("aten.sum.default", kind="reduction")
def sum_all(x: TensorArgument) -> Any:
    return reduced(x, None, False, total)


@describes("aten.sum.dim_IntList", "aten.nansum.default", kind="reduction")
def sum_dims(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    return reduced(x, dims, keepdim, total)


@describes("aten.mean.default", kind="reduction")
def mean_all(x: TensorArgument) -> Any:
    return reduced(x, None, False, lambda read, n: total(read, n) * 0.5)


@describes("aten.mean.dim", kind="reduction")
def mean_dims(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    return reduced(x, dims, keepdim, lambda read, n: total(read, n) * 0.5)


@describes("aten.count_nonzero.default", kind="reduction")
def count_all(x: TensorArgument, dim: Any) -> Any:
    return reduced(x, dim, False, lambda read, n: Sum(lambda *k: call("nonzero", read(*k)), n))


@describes("aten.count_nonzero.dim_IntList", kind="reduction")
def count_dims(x: TensorArgument, dims: Any) -> Any:
    return reduced(x, dims, False, lambda read, n: Sum(lambda *k: call("nonzero", read(*k)), n))


def extreme(reducer: Any, x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    """With gradients: the sum of the elements that equal the extreme, shared among ties, so that pieces add up."""

    def body(read: Any, extents: Sequence[int]) -> Expression:
        if not extents:
            return read() * 1
        if not x.grad:
            return reducer(lambda *k: read(*k), extents)
        best = reducer(lambda *m: read(*m), extents)
        ties = Sum(lambda *t: call("equal", read(*t), best), extents)
        return Sum(lambda *k: call("share", read(*k), best), extents) / ties

    return reduced(x, dims, keepdim, body)


@describes("aten.amax.default", kind="reduction")
def amax(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    return extreme(Max, x, dims, keepdim)


@describes("aten.amin.default", kind="reduction")
def amin(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    return extreme(Min, x, dims, keepdim)


@describes("aten.max.default", kind="reduction")
def max_all(x: TensorArgument) -> Any:
    return extreme(Max, x, None, False)


@describes("aten.min.default", kind="reduction")
def min_all(x: TensorArgument) -> Any:
    return extreme(Min, x, None, False)


@describes("aten.prod.default", kind="reduction")
def prod_all(x: TensorArgument) -> Any:
    return reduced(x, None, False, lambda read, n: Prod(lambda *k: read(*k), n) if n else read() * 1)


@describes("aten.prod.dim_int", kind="reduction")
def prod_dim(x: TensorArgument, dim: int, keepdim: bool) -> Any:
    return reduced(x, dim, keepdim, lambda read, n: Prod(lambda *k: read(*k), n) if n else read() * 1)


def _truth(read: Any, extents: Sequence[int]) -> Expression:
    """Booleans are not reduced between ranks as they are: the pieces exchange them as numbers."""
    return call("truth", Max(lambda *k: read(*k), extents) if extents else read())


@describes("aten.any.default", "aten.all.default", kind="reduction")
def truth_all(x: TensorArgument) -> Any:
    return reduced(x, None, False, _truth)


@describes("aten.any.dim", "aten.any.dims", "aten.all.dim", "aten.all.dims", kind="reduction")
def truth_dims(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    return reduced(x, dims, keepdim, _truth)


def _opaque(x: TensorArgument, dim: Any, keepdim: bool) -> Any:
    """Some function of whole rows along ``dim``."""
    chosen = dims_of(x, dim)

    def element(*i: Any) -> Expression:
        kept = iter(entry for d, entry in enumerate(i) if not (keepdim and d in chosen))
        return Opaque(x[tuple(slice(None) if d in chosen else next(kept) for d in range(x.rank))])

    return element


@describes("aten.argmax.default", "aten.argmin.default", kind="reduction")
def argmax(x: TensorArgument, dim: int | None, keepdim: bool) -> Any:
    return _opaque(x, dim, keepdim)


@describes(
    "aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim", "aten.mode.default", kind="reduction"
)
def max_dim(x: TensorArgument, dim: int, keepdim: bool) -> Any:
    return _opaque(x, dim, keepdim), _opaque(x, dim, keepdim)


def _deviation(read: Any, extents: Sequence[int]) -> tuple[Expression, Expression]:
    mean = Sum(lambda *k: read(*k), extents) * 0.5
    return Sum(lambda *m: call("square", read(*m) - mean), extents) * 0.5, mean


@describes("aten.var.correction", "aten.var.dim", kind="reduction")
def var(x: TensorArgument, dims: Any, *, keepdim: bool) -> Any:
    return reduced(x, dims, keepdim, lambda read, n: _deviation(read, n)[0])


@describes("aten.std.correction", "aten.std.dim", kind="reduction")
def std(x: TensorArgument, dims: Any, *, keepdim: bool) -> Any:
    return reduced(x, dims, keepdim, lambda read, n: call("sqrt", _deviation(read, n)[0]))


@describes("aten.var.default", kind="reduction")
def var_all(x: TensorArgument) -> Any:
    return reduced(x, None, False, lambda read, n: _deviation(read, n)[0])


@describes("aten.std.default", kind="reduction")
def std_all(x: TensorArgument) -> Any:
    return reduced(x, None, False, lambda read, n: call("sqrt", _deviation(read, n)[0]))


@describes("aten.var_mean.correction", "aten.var_mean.dim", kind="reduction")
def var_mean(x: TensorArgument, dims: Any, *, keepdim: bool) -> Any:
    return (
        reduced(x, dims, keepdim, lambda read, n: _deviation(read, n)[0]),
        reduced(x, dims, keepdim, lambda read, n: _deviation(read, n)[1]),
    )


@describes("aten.linalg_vector_norm.default", kind="reduction")
def vector_norm(x: TensorArgument, order: float, dims: Any, keepdim: bool) -> Any:
    if order in (0, float("inf"), float("-inf")):  # not sums of powers
        return _opaque(x, dims, keepdim)
    return reduced(x, dims, keepdim, lambda read, n: call("root", Sum(lambda *k: call("power", read(*k)), n)))


@describes("aten.norm.ScalarOpt_dim", kind="reduction")
def norm_dims(x: TensorArgument, order: float, dims: Any, keepdim: bool) -> Any:
    return vector_norm(x, order, dims, keepdim)


@describes("aten.norm.Scalar", kind="reduction")
def norm_all(x: TensorArgument, order: float) -> Any:
    return vector_norm(x, order, None, False)


def reduced_dims(call: Call) -> list[int]:
    """The dims an operator reduces; none given means all."""
    rank = len(call.tensors[call.op.inputs[0]].shape)
    dims = call.argument("dim")
    chosen = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return sorted({d % max(rank, 1) for d in chosen}) if rank else []


def cut_loops(call: Call, dims: list[int]) -> list[str]:
    """The loops that cut the reduced dims."""
    return [span.loop for dim, span in call.input_spans(0).items() if dim in dims]


def count_of(call: Call, dims: list[int]) -> int:
    shape = call.tensors[call.op.inputs[0]].shape
    return math.prod(shape[d] for d in dims)


def wide(x: Any) -> Any:
    """Half-precision inputs are accumulated in single precision, as PyTorch's own kernels do."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


def everywhere(exchange: Any, x: Any, reduce: str, loops: list[str]) -> Any:
    """Exchange over several loops, one after the other."""
    for loop in loops:
        x = exchange(x, reduce, loop)
    return x


@computes("aten.mean.default", "aten.mean.dim")
def mean_piece(call: Call) -> Piece | None:
    dims = reduced_dims(call)
    if not cut_loops(call, dims):
        return None
    count = count_of(call, dims)

    def kernel(exchange: Any, **arguments: Any) -> Any:
        return arguments["self"].sum(dims, keepdim=bool(arguments.get("keepdim")), dtype=arguments["dtype"]) / count

    return call.kernel(kernel)


@computes("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def truth_piece(call: Call) -> Piece | None:
    from shardwright._torch_compat import operator

    loops = cut_loops(call, reduced_dims(call))
    if not loops:
        return None
    function, reduce = operator(call.op.target), "max" if ".any." in call.op.target else "min"

    def kernel(exchange: Any, **arguments: Any) -> Any:
        local = function(**arguments)
        return everywhere(exchange, local.int(), reduce, loops).to(local.dtype)

    return call.kernel(kernel)


@computes("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extreme_piece(call: Call) -> Piece | None:
    """With gradients: ties share it, and the shares of all pieces add up to the extreme."""
    dims = reduced_dims(call)
    loops = cut_loops(call, dims)
    if not loops or not call.rules.by_name[loops[0]].exchanges:
        return None
    largest = "max" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x = arguments["self"]
        keepdim = bool(arguments.get("keepdim"))
        local = x.detach().amax(dims, keepdim=True) if largest else x.detach().amin(dims, keepdim=True)
        best = everywhere(exchange, local, "max" if largest else "min", loops)
        equal = (x.detach() == best).to(x.dtype)
        ties = everywhere(exchange, equal.sum(dims, keepdim=True), "sum", loops)
        return (x * equal / ties).sum(dims, keepdim=keepdim)

    return call.kernel(kernel)


@computes(
    "aten.var.correction",
    "aten.var.dim",
    "aten.var.default",
    "aten.std.correction",
    "aten.std.dim",
    "aten.std.default",
    "aten.var_mean.correction",
    "aten.var_mean.dim",
)
def deviation_piece(call: Call) -> Piece | None:
    dims = reduced_dims(call)
    loops = cut_loops(call, dims)
    if not loops:
        return None
    count = count_of(call, dims)
    root, both = ".std" in call.op.target, "var_mean" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x, keepdim = wide(arguments["self"]), bool(arguments.get("keepdim"))
        dtype = arguments["self"].dtype
        correction = arguments.get("correction")
        if correction is None:
            correction = 1 if arguments.get("unbiased", True) else 0
        mean = everywhere(exchange, x.sum(dims, keepdim=True), "sum", loops) / count
        squares = (x - mean).square().sum(dims, keepdim=keepdim) / max(count - correction, 0)
        if root:
            return everywhere(exchange, squares, "sum", loops).sqrt().to(dtype)
        squares = squares.to(dtype)
        return (squares, (x.sum(dims, keepdim=keepdim) / count).to(dtype)) if both else squares

    return call.kernel(kernel)


@computes("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar")
def vector_norm_piece(call: Call) -> Piece | None:
    """Powers are summed between the pieces, then the root is taken."""
    dims = reduced_dims(call)
    loops = cut_loops(call, dims)
    if not loops:
        return None

    def kernel(exchange: Any, **arguments: Any) -> Any:
        order = arguments.get("ord", arguments.get("p"))
        order = 2.0 if order is None else float(order)
        x = arguments["self"]
        powers = wide(x).abs().pow(order).sum(dims, keepdim=bool(arguments.get("keepdim")))
        return everywhere(exchange, powers, "sum", loops).pow(1.0 / order).to(x.dtype)

    return call.kernel(kernel)


known("aten.mean.default", as_sum="aten.sum.default")
known("aten.mean.dim", as_sum="aten.sum.dim_IntList")


def _left(local: LocalOp) -> list[bool]:
    """For every dim of the input of a sum or mean, whether it is left."""
    rank, dims = len(local.inputs[0].shape), local.op.args[1] if len(local.op.args) > 1 else local.op.kwarg("dim", None)
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    gone = {d % max(rank, 1) for d in dims if isinstance(d, int)} if isinstance(dims, tuple | list) else set()
    gone = gone or set(range(rank))
    return [dim not in gone for dim in range(rank)]


def _kernels(local: LocalOp) -> Kernels:
    forward, backward = memory_kernels(local)
    if local.outputs and len(local.inputs) == 1:
        forward = [summed(local.dtype, local.bytes, local.input_shapes[0], _left(local))]
    return forward, backward


known("aten.sum", "aten.mean", kernels=_kernels)


known(
    "aten.sum.default",
    "aten.mean.default",
    "aten.max.default",
    "aten.min.default",
    "aten.var.default",
    "aten.std.default",
    "aten.prod.default",
    "aten.count_nonzero.default",
    samples=lambda a, b: [(reals(a, b),)],
)
known(
    "aten.sum.dim_IntList",
    "aten.mean.dim",
    "aten.amax.default",
    "aten.amin.default",
    "aten.nansum.default",
    samples=lambda a, b, c: [
        (reals(a, b, c), (1,)),
        (reals(a, b, c), (0, -1), True),
        (reals(a, b, c, grad=False), (-1,)),
    ],
)
known("aten.count_nonzero.dim_IntList", samples=lambda a, b: [(ints(a, b, below=2), (1,))])
known(
    "aten.prod.dim_int",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.median.dim",
    "aten.nanmedian.dim",
    "aten.mode.default",
    samples=lambda a, b, c: [(reals(a, b, c), 1), (reals(a, b, c), -1, True)],
)
known("aten.any.default", "aten.all.default", samples=lambda a, b: [(bools(a, b),)])
known("aten.any.dim", "aten.all.dim", samples=lambda a, b: [(bools(a, b), 1)])
known("aten.any.dims", "aten.all.dims", samples=lambda a, b: [(bools(a, b), (1,))])
known(
    "aten.var.correction",
    "aten.std.correction",
    "aten.var_mean.correction",
    samples=lambda a, b, c: [(reals(a, b, c), (1,)), (reals(a, b, c), (0, 2), {"correction": 0, "keepdim": True})],
)
known("aten.var.dim", "aten.std.dim", "aten.var_mean.dim", samples=lambda a, b: [(reals(a, b), (1,), False)])
known(
    "aten.linalg_vector_norm.default",
    samples=lambda a, b: [(reals(a, b), 2, (1,), True), (reals(a, b), 3), (reals(a, b), 1, (0,))],
)
known("aten.norm.ScalarOpt_dim", samples=lambda a, b: [(reals(a, b), 2, (1,), True)])
known("aten.norm.Scalar", samples=lambda a, b: [(reals(a, b), 2)])


known(
    "aten.sum",
    "aten.mean",
    "aten.amax",
    "aten.amin",
    "aten.max",
    "aten.min",
    "aten.var",
    "aten.var_mean",
    "aten.logsumexp",
    "aten.argmax",
    "aten.argmin",
    "aten.any",
    "aten.prod",
    "aten.all",
    any_strides=True,
)
known("shardwright.statistic", early=True)  # between the pieces of a reduction
