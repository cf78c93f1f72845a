"""Index arithmetic: what may stand between the brackets of a description.

An index is an affine expression of loops with integer coefficients, plus ``//`` and ``%`` by positive constants (which is
all that reshapes need). Expressions are simplified with the ranges of their loops as they are built, so that
``(i*12 + j) // 12`` is ``i`` where ``j`` runs over 12 points. The product of two loops is not affine: it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Union

from shardwright.errors import DescriptionError


class _Arithmetic:
    """Operators shared by loops and affine expressions."""

    def __add__(self, other: object) -> Affine:
        a, b = affine(self), affine(other)
        return _collect((*a.terms, *b.terms), a.constant + b.constant)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: object) -> Affine:
        return self + affine(other) * -1

    def __rsub__(self, other: object) -> Affine:
        return affine(other) + self * -1

    def __mul__(self, other: object) -> Affine:
        if not isinstance(other, int):
            raise DescriptionError(
                f"An index may be multiplied by a whole number only, not by {other!r}: products of indices are not affine.",
                "Write the region as sums of loops times constants, or make the dim Opaque.",
            )
        a = affine(self)
        return _collect(tuple((atom, c * other) for atom, c in a.terms), a.constant * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Affine:
        return _divide(affine(self), _positive(other, "//"))

    def __mod__(self, other: object) -> Affine:
        return _modulo(affine(self), _positive(other, "%"))


@dataclass(frozen=True)
class Loop(_Arithmetic):
    """One loop of an operator: it runs over ``range(extent)``. Loops of the same name are the same loop."""

    name: str
    extent: int

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Quotient:
    """``of // by``, rounded down."""

    of: Affine
    by: int


@dataclass(frozen=True)
class Remainder:
    """``of % by``, never negative."""

    of: Affine
    by: int


IndexAtom = Union[Loop, Quotient, Remainder]


@dataclass(frozen=True)
class Affine(_Arithmetic):
    """``constant + sum(coefficient * atom)``."""

    terms: tuple[tuple[IndexAtom, int], ...]
    constant: int = 0

    @property
    def bare(self) -> Loop | None:
        """The loop this index is, if it is nothing but a loop."""
        if self.constant == 0 and len(self.terms) == 1:
            atom, coefficient = self.terms[0]
            if coefficient == 1 and isinstance(atom, Loop):
                return atom
        return None

    def __repr__(self) -> str:
        parts = [f"{c}*{a}" if c != 1 else f"{a}" for a, c in self.terms]
        return " + ".join(parts + ([str(self.constant)] if self.constant or not parts else []))


def affine(value: object) -> Affine:
    """Anything that may be an index, as an affine expression."""
    if isinstance(value, Affine):
        return value
    if isinstance(value, Loop):
        return Affine(((value, 1),))
    if isinstance(value, int):
        return Affine((), int(value))
    raise DescriptionError(
        f"{value!r} is not an index.", "Indices are loops, whole numbers, and sums, //, % of them with constants."
    )


def loops_of(index: Affine) -> Iterator[Loop]:
    """Every loop an index mentions."""
    for atom, _ in index.terms:
        if isinstance(atom, Loop):
            yield atom
        else:
            yield from loops_of(atom.of)


def bounds(index: Affine) -> tuple[int, int]:
    """Smallest and largest value over all points of its loops."""
    low = high = index.constant
    for atom, coefficient in index.terms:
        first, last = _atom_bounds(atom)
        low += min(coefficient * first, coefficient * last)
        high += max(coefficient * first, coefficient * last)
    return low, high


def _atom_bounds(atom: IndexAtom) -> tuple[int, int]:
    if isinstance(atom, Loop):
        return 0, max(atom.extent - 1, 0)
    low, high = bounds(atom.of)
    if isinstance(atom, Quotient):
        return low // atom.by, high // atom.by
    return 0, atom.by - 1


def _positive(value: object, sign: str) -> int:
    if isinstance(value, int) and value > 0:
        return value
    raise DescriptionError(f"{sign} needs a positive whole number on its right, not {value!r}.")


def _collect(terms: tuple[tuple[IndexAtom, int], ...], constant: int) -> Affine:
    total: dict[IndexAtom, int] = {}
    for atom, coefficient in terms:
        total[atom] = total.get(atom, 0) + coefficient
    return Affine(tuple((a, c) for a, c in total.items() if c and _atom_bounds(a) != (0, 0)), constant)


def _apart(index: Affine, by: int) -> tuple[Affine, Affine]:
    """``(q, r)`` with ``index == q * by + r``: whole multiples of ``by`` taken out."""
    whole = tuple((a, c // by) for a, c in index.terms if c % by == 0)
    rest = tuple((a, c) for a, c in index.terms if c % by)
    return Affine(whole, index.constant // by), Affine(rest, index.constant % by)


def _coarse(rest: Affine, by: int) -> tuple[int, Affine, Affine] | None:
    """``(g, a, r)`` with ``rest == g*a + r``, ``0 <= r < g`` and g a divisor of ``by``: the low digits split off."""
    for g in sorted({math.gcd(c, by) for _, c in rest.terms}, reverse=True):
        if g == 1:
            continue
        high = tuple((a, c // g) for a, c in rest.terms if c % g == 0)
        low = Affine(tuple((a, c) for a, c in rest.terms if c % g), rest.constant % g)
        first, last = bounds(low)
        if first >= 0 and last < g:
            return g, Affine(high, rest.constant // g), low
    return None


def _divide(index: Affine, by: int) -> Affine:
    quotient, rest = _apart(index, by)
    first, last = bounds(rest)
    if first // by == last // by:
        return quotient + first // by
    if (digits := _coarse(rest, by)) is not None:
        g, high, _ = digits
        return quotient + _divide(high, by // g)
    if len(rest.terms) == 1 and rest.constant == 0:
        atom, coefficient = rest.terms[0]
        if coefficient == 1 and isinstance(atom, Quotient):
            return quotient + Affine(((Quotient(atom.of, atom.by * by), 1),))
    return quotient + Affine(((Quotient(rest, by), 1),))


def _modulo(index: Affine, by: int) -> Affine:
    _, rest = _apart(index, by)
    first, last = bounds(rest)
    if first // by == last // by:
        return rest - first // by * by
    if (digits := _coarse(rest, by)) is not None:
        g, high, low = digits
        return _modulo(high, by // g) * g + low
    return Affine(((Remainder(rest, by), 1),))
