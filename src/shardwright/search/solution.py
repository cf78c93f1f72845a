"""What every solver answers: never an answer without saying how far from the optimum it can be."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


def gap_of(value: float, bound: float) -> float:
    """How far above the least there is a value may be, relative to what is proved of that least: (value - bound) / bound.

    >>> gap_of(1.5, 1.0), gap_of(1.0, 0.0)
    (0.5, inf)
    """
    return 0.0 if value <= bound else (value - bound) / abs(bound) if bound else inf


@dataclass(frozen=True)
class Solution(Generic[Answer]):
    """An answer, its cost, and the proof that came with it.

    ``lower_bound`` holds for every feasible answer of the problem; ``optimal`` is true only when the bound has met the
    cost (up to floating-point tolerance).
    """

    answer: Answer
    cost: float
    lower_bound: float
    optimal: bool
    seconds: float

    def __post_init__(self) -> None:
        for name, plain in (("cost", float), ("lower_bound", float), ("optimal", bool)):  # not numpy's: files know none
            object.__setattr__(self, name, plain(getattr(self, name)))
        slack = 1e-6 * max(1.0, abs(self.cost))
        if self.lower_bound > self.cost + slack:
            raise ValueError(f"a lower bound of {self.lower_bound} above the cost {self.cost} proves nothing")

    @property
    def gap(self) -> float:
        """How far above the optimum of its problem the cost may be (:func:`gap_of`); 0 when optimal."""
        return 0.0 if self.optimal else gap_of(self.cost, self.lower_bound)
