"""Softmax and its relatives: when the normalised dim is cut, the maximum and the sum are exchanged, not the elements.

Softmax over a cut dim: the maximum (no gradient flows through it) and the sum are reduced between the pieces.
"""

from __future__ import annotations

from typing import Any

from shardwright.operators.families.reductions import wide
from shardwright.operators.language import Expression, Max, Sum, TensorArgument, call, put
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import reals


def _shifted(x: TensorArgument, i: tuple[Any, ...], dim: int, at: Any) -> Expression:
    largest = Max(lambda m: x[put(i, dim, m)], [x.shape[dim]])
    return x[put(i, dim, at)] - largest


@describes("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default", kind="normalisation")
def softmax(x: TensorArgument, dim: int) -> Any:
    if x.rank == 0:
        return lambda: x[()] * 0 + 1
    at = dim % x.rank
    return lambda *i: (
        call("exp", _shifted(x, i, at, i[at])) / Sum(lambda k: call("exp", _shifted(x, i, at, k)), [x.shape[at]])
    )


@describes("aten.log_softmax.int", "aten._log_softmax.default", kind="normalisation")
def log_softmax(x: TensorArgument, dim: int) -> Any:
    if x.rank == 0:
        return lambda: x[()] * 0
    at = dim % x.rank
    return lambda *i: (
        _shifted(x, i, at, i[at]) - call("log", Sum(lambda k: call("exp", _shifted(x, i, at, k)), [x.shape[at]]))
    )


@describes("aten.logsumexp.default", kind="reduction")
def logsumexp(x: TensorArgument, dims: Any, keepdim: bool) -> Any:
    chosen = [d % x.rank for d in ((dims,) if isinstance(dims, int) else dims)]
    if len(chosen) != 1:
        return None
    at = chosen[0]

    def element(*i: Any) -> Expression:
        full = put(i, at, 0) if keepdim else (*i[:at], 0, *i[at:])
        largest = Max(lambda m: x[put(full, at, m)], [x.shape[at]])
        return call("log", Sum(lambda k: call("exp", x[put(full, at, k)] - largest), [x.shape[at]])) + largest

    return element


def _dim_and_loop(call: Call) -> tuple[int, str | None]:
    x = call.tensors[call.op.inputs[0]]
    dims = call.argument("dim")
    dim = (dims if isinstance(dims, int) else dims[0]) % max(len(x.shape), 1)
    span = call.input_spans(0).get(dim)
    return dim, None if span is None else span.loop


def exchanged_log_sum(x: Any, dim: int, loop: str, exchange: Any) -> tuple[Any, Any]:
    """``(x - max, log(sum(exp(x - max))))`` over a cut dim."""
    largest = exchange(x.detach().amax(dim, keepdim=True), "max", loop)
    largest = largest.masked_fill(largest.isinf(), 0.0)  # a row of -inf: keep exp(-inf - 0) = 0
    shifted = x - largest
    return shifted, exchange(shifted.exp().sum(dim, keepdim=True), "sum", loop).log()


def _result_dtype(x: Any, arguments: dict[str, Any]) -> Any:
    import torch

    if arguments.get("half_to_float"):
        return torch.float32
    dtype = arguments.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else x.dtype


@computes("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default")
def softmax_piece(call: Call) -> Piece | None:
    dim, loop = _dim_and_loop(call)
    if loop is None:
        return None
    safe = "_safe" in call.op.target

    def kernel(exchange: Any, **arguments: Any) -> Any:
        dtype = _result_dtype(arguments["self"], arguments)
        x = wide(arguments["self"].to(dtype))
        largest = exchange(x.detach().amax(dim, keepdim=True), "max", loop)
        if safe:
            largest = largest.masked_fill(largest.isinf(), 0.0)
        powers = (x - largest).exp()
        total = exchange(powers.sum(dim, keepdim=True), "sum", loop)
        return (powers / (total.masked_fill(total == 0, 1.0) if safe else total)).to(dtype)

    return call.kernel(kernel)


@computes("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax_piece(call: Call) -> Piece | None:
    dim, loop = _dim_and_loop(call)
    if loop is None:
        return None

    def kernel(exchange: Any, **arguments: Any) -> Any:
        dtype = _result_dtype(arguments["self"], arguments)
        shifted, log_sum = exchanged_log_sum(wide(arguments["self"].to(dtype)), dim, loop, exchange)
        return (shifted - log_sum).to(dtype)

    return call.kernel(kernel)


@computes("aten.logsumexp.default")
def logsumexp_piece(call: Call) -> Piece | None:
    dim, loop = _dim_and_loop(call)
    if loop is None:
        return None

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x = wide(arguments["self"])
        largest = exchange(x.detach().amax(dim, keepdim=True), "max", loop)
        largest = largest.masked_fill(largest.isinf(), 0.0)
        total = exchange((x - largest).exp().sum(dim, keepdim=True), "sum", loop).log() + largest
        return (total if arguments["keepdim"] else total.squeeze(dim)).to(arguments["self"].dtype)

    return call.kernel(kernel)


known("aten._softmax", measured="softmax")
known("aten._log_softmax", measured="log_softmax")


known(
    "aten.softmax.int",
    "aten.log_softmax.int",
    "aten._safe_softmax.default",
    samples=lambda a, b, c: [(reals(a, b, c), -1), (reals(a, b, c), 1)],
)
known("aten._softmax.default", "aten._log_softmax.default", samples=lambda a, b: [(reals(a, b), -1, False)])
known("aten.logsumexp.default", samples=lambda a, b, c: [(reals(a, b, c), (1,)), (reals(a, b, c), (-1,), True)])


known(
    "aten._softmax",
    "aten._softmax_backward_data",
    "aten._log_softmax",
    "aten._log_softmax_backward_data",
    any_strides=True,
)
