"""Reductions over cut dims that need to know the global count or a global statistic."""

from __future__ import annotations

import math
from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


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
def mean(call: Call) -> Piece | None:
    dims = reduced_dims(call)
    if not cut_loops(call, dims):
        return None
    count = count_of(call, dims)

    def kernel(exchange: Any, **arguments: Any) -> Any:
        return arguments["self"].sum(dims, keepdim=bool(arguments.get("keepdim")), dtype=arguments["dtype"]) / count

    return call.kernel(kernel)


@computes("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def truth(call: Call) -> Piece | None:
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
def extreme(call: Call) -> Piece | None:
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
def deviation(call: Call) -> Piece | None:
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
def vector_norm(call: Call) -> Piece | None:
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
