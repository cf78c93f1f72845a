"""Descriptions by users: ``@describe("mylib::myop")`` is enough for an operator to be captured, split, run and verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.operators.deriving import forget
from shardwright.operators.record import known, records
from shardwright.operators.validating import validate


def describe(
    operator: str,
    *,
    kind: str = "other",
    flops: Callable[..., float] | None = None,
    piece: Callable[..., Any] | None = None,
    shapes: Sequence[Sequence[int]] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what an operator of your own computes; every way to split it is derived from that.

    ``operator`` is its qualified name, ``"mylib::myop"`` or ``"mylib::myop.overload"``. The function gets the operator's
    arguments (tensors may only be indexed) and returns a lambda from the indices of an output element to its value, one
    lambda per output. ``piece`` is needed where a piece is more than the operator called on local inputs: for windows,
    exchanges and positions. ``shapes`` are example shapes of the tensor arguments: with them a description that looks at
    shapes is checked when it is registered, too.

    Raises :class:`~shardwright.errors.DescriptionError`, naming the line, for an index that is not bound, a product of
    indices, a wrong number of indices.

    Example
    -------
    >>> @describe("mylib::scaled_sum")
    ... def scaled_sum(x, scale):
    ...     return lambda i: scale[i] * Sum(lambda k: x[i, k])
    """
    target = operator_target(operator)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        validate(target, function, shapes)
        records()  # so that none of ours comes after it
        known(target, function=function, kind=kind, flops=flops, **({} if piece is None else {"piece": piece}))
        forget()
        return function

    return register


def operator_target(operator: str) -> str:
    """``"mylib::myop"`` as graphs name it: ``"mylib.myop.default"``."""
    name = operator.replace("::", ".")
    return name if name.count(".") >= 2 else f"{name}.default"
