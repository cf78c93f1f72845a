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
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.new_empty.default",
    kind="creation",
)
def constant() -> Any:
    return lambda *i: value(0)


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
