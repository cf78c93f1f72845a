"""Operators that keep elements by their position: a piece must know where it lies."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import TensorArgument, call, value, where
from shardwright.operators.record import describes, known
from shardwright.operators.samples import reals


@describes("aten.triu.default", "aten.tril.default", kind="elementwise")
def triangle(x: TensorArgument, diagonal: int) -> Any:
    return lambda *i: where(call("at_least", value(i[-1] - i[-2]), diagonal), x[i], x[i] * 0)


known("aten.triu.default", "aten.tril.default", samples=lambda a, b, c: [(reals(a, b, c), 1), (reals(b, b),)])


known("aten.tril", "aten.triu", any_strides=True)
