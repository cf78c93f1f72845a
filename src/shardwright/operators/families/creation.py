"""Tensors made from nothing: every loop is free, a piece only has to know its size, or where it lies.

Creation: sizes become local sizes; ranges and identities are shifted to where the piece lies.
"""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import TensorArgument, call, value
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import computes, describes, known
from shardwright.operators.samples import ints, reals


@describes(
    "aten.zeros.default",
    "aten.ones.default",
    "aten.full.default",
    "aten.empty.memory_format",
    kind="creation",
)
def constant() -> Any:
    return lambda *i: value(0)


@describes(
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.new_empty.default",
    kind="creation",
)
def constant_like(x: TensorArgument, *, out: Any) -> Any:
    """Only the type of ``x`` matters, so any part of it will do: where a dim of the result has the extent of one of
    ``x``, as batches do, both are cut together, and nothing has to be gathered for it."""
    free = list(range(x.rank))
    partner: dict[int, int] = {}
    for d, extent in enumerate(out[0]):
        matching = [s for s in free if x.shape[s] == extent and extent > 1]
        if matching:
            partner[d] = min(matching, key=lambda s: abs(s - d))
            free.remove(partner[d])

    def element(*i: Any) -> Any:
        index: list[Any] = [slice(None)] * x.rank
        for d, s in partner.items():
            index[s] = i[d]
        return call("constant", x[tuple(index)])

    return element


@describes("aten.scalar_tensor.default", "aten.scalar_tensor.default", kind="creation")
def scalar() -> Any:
    return lambda: value(0)


@describes("aten.arange.default", "aten.arange.start", "aten.arange.start_step", kind="creation")
def arange() -> Any:
    return lambda i: value(i + 0)


@describes("aten.eye.default", "aten.eye.m", kind="creation")
def eye() -> Any:
    return lambda i, j: call("equal", value(i + 0), value(j + 0))


@describes("aten.linspace.default", kind="creation")
def linspace() -> Any:
    return lambda i: value(i + 0)


@describes("aten.rand.default", "aten.randn.default", "aten.randint.default", "aten.randint.low", kind="random")
def random() -> Any:
    return lambda *i: value(0)


@describes("aten.one_hot.default", kind="creation")
def one_hot(x: TensorArgument) -> Any:
    return lambda *i: call("equal", x[i[:-1]], value(i[-1] + 0))


@computes(
    "aten.zeros.default",
    "aten.ones.default",
    "aten.full.default",
    "aten.empty.memory_format",
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.new_empty.default",
    "aten.rand.default",
    "aten.randn.default",
    "aten.randint.default",
    "aten.randint.low",
)
def sized_piece(call: Call) -> Piece:
    return call.rewritten(size=call.local_shape())


@computes("aten.affine_grid_generator.default")
def affine_grid_piece(call: Call) -> Piece:
    """Told the size of the image it is for, batch first."""
    return call.rewritten(size=(call.local_shape()[0], *call.argument("size")[1:]))


@computes("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.linspace.default")
def ranged_piece(call: Call) -> Piece:
    """The whole range is cheap and exact in every dtype; the piece is cut out of it."""
    import torch

    from shardwright._torch_compat import operator

    span = call.output_spans()[0]
    function = operator(call.op.target)
    names = call.bound.names

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        return function(**{name: arguments[name] for name in names})[span.start : span.stop].clone()

    return call.kernel(kernel)


@computes("aten.eye.default", "aten.eye.m")
def eye_piece(call: Call) -> Piece:
    import torch

    from shardwright._torch_compat import operator

    function = operator(call.op.target)
    spans = call.output_spans()

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        whole = function(**arguments)
        for dim, span in spans.items():
            whole = whole.narrow(dim, span.start, span.size)
        return whole.clone()

    return call.kernel(kernel)


@computes("aten.triu.default", "aten.tril.default")
def triangle_piece(call: Call) -> Piece:
    """Moving the piece by its offsets moves the diagonal."""
    rank = len(call.output.shape)
    spans = call.output_spans()
    rows, columns = spans.get(rank - 2), spans.get(rank - 1)
    shift = (rows.start if rows else 0) - (columns.start if columns else 0)
    return call.rewritten(diagonal=call.argument("diagonal", 0) + shift)


@computes("aten.one_hot.default")
def one_hot_piece(call: Call) -> Piece | None:
    """Cutting the classes: compare with the local ones. The number of classes is fixed by the captured shape."""
    import torch

    rank = len(call.output.shape)
    span = call.output_spans().get(rank - 1)
    first, count = (span.start, span.size) if span else (0, call.output.shape[-1])

    def kernel(exchange: Any, **arguments: Any) -> torch.Tensor:
        x = arguments["self"]
        classes = torch.arange(first, first + count, device=x.device)
        return (x.unsqueeze(-1) == classes).to(torch.int64)

    return call.kernel(kernel)


known("aten.zeros.default", "aten.ones.default", samples=lambda a, b: [((a, b),)])
known("aten.full.default", samples=lambda a, b: [((a, b), 3.5)])
known(
    "aten.new_zeros.default",
    "aten.new_ones.default",
    samples=lambda a, b, c: [(reals(3), (a, b)), (reals(a, c, b), (a, b))],
)
known("aten.new_full.default", samples=lambda a, b: [(reals(3), (a, b), 2.5)])
known("aten.scalar_tensor.default", samples=lambda: [(2.5,)])
known("aten.eye.m", samples=lambda a, b: [(a, b)])
known("aten.one_hot.default", samples=lambda a, b, c: [(ints(a, b, below=c), c)])

known("aten.arange.default", "aten.eye.default", samples=lambda n: [(n,)])
known("aten.arange.start", samples=lambda n: [(2, 2 + n)])
known("aten.arange.start_step", samples=lambda n: [(2, 2 + 3 * n, 3)])
known("aten.linspace.default", samples=lambda n: [(0.0, 1.0, n)])


known(
    "aten.zeros_like",
    "aten.ones_like",
    "aten.empty_like",
    "aten.full_like",
    "aten.rand_like",
    "aten.randn_like",
    "aten.new_zeros",
    "aten.new_ones",
    "aten.new_empty",
    "aten.new_full",
    any_strides=True,
    only_measures=True,
)


for _name in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"):
    known(f"aten.{_name}", python={_name: "created"})
