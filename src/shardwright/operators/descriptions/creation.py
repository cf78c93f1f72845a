"""Tensors made from nothing: every loop is free, a piece only has to know its size, or where it lies."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import TensorArgument, call, value
from shardwright.operators.registry import describes


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
