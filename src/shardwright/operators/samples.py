"""How a record says on which calls its operator is checked: functions of sizes, so that the same call is tried even, uneven
and with random shapes.

``samples=lambda i, k, j: [(reals(i, k), reals(k, j))]`` is a list of calls, each a tuple of arguments whose last is a dict
where there are keywords. Tensors are specs; :mod:`shardwright.verification.samples` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """A tensor to be made: its shape, and what may be in it."""

    shape: tuple[int, ...]
    content: str = "normal"
    low: int = 0
    high: int = 0
    grad: bool = True


def reals(*shape: int, grad: bool = True) -> Spec:
    """Normally distributed float64."""
    return Spec(shape, grad=grad)


def positive(*shape: int, grad: bool = True) -> Spec:
    """Between 0.1 and 0.9: a probability, a denominator."""
    return Spec(shape, "positive", grad=grad)


def ints(*shape: int, below: int, low: int = 0) -> Spec:
    return Spec(shape, "ints", low, below, grad=False)


def bools(*shape: int) -> Spec:
    return Spec(shape, "bools", grad=False)


def complexes(*shape: int) -> Spec:
    return Spec(shape, "complex")
