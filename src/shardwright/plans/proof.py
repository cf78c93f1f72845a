"""What is proved of a plan, as data: bounds on the plans of spaces, and the bounds that turned out to be none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.plans.spaces import Axes, SearchSpace
from shardwright.search.solution import gap_of

STEP, SUM = "step", "sum"
"""Quantities: seconds of a step; seconds of all that one device does in a step, summed."""

OPTIMAL = 1e-6
"""A sum this close to its bound, relatively, is called optimal."""


@dataclass(frozen=True)
class Bound:
    """No plan of ``space`` takes less than ``value`` seconds, of a ``quantity``; zero says nothing."""

    space: SearchSpace
    quantity: str
    value: float


@dataclass(frozen=True)
class Dropped:
    """A bound that was none: the candidate ``name`` (with its mesh, or its stages) is in its space and takes less."""

    bound: Bound
    name: str
    shape: Axes
    seconds: float


@dataclass(frozen=True)
class Proof:
    """All that is proved beside a plan, each bound with the space it speaks of.

    ``cost`` is the smallest sum among the candidates that fit, ``seconds`` how long planning took. A bound that a plan of
    its space contradicted says nothing any more (its value is zero) and is kept among the ``dropped``.
    """

    bounds: tuple[Bound, ...] = ()
    cost: float = 0.0
    seconds: float = 0.0
    dropped: tuple[Dropped, ...] = ()

    def least(self, quantity: str) -> float:
        """What no plan undercuts of all spaces for which anything is claimed of a quantity; zero where one has no bound."""
        return min((bound.value for bound in self.bounds if bound.quantity == quantity), default=0.0)

    @property
    def step_bound(self) -> float:
        """Seconds that no step undercuts."""
        return self.least(STEP)

    @property
    def sum_bound(self) -> float:
        """Seconds that no sum undercuts."""
        return self.least(SUM)

    @property
    def optimal(self) -> bool:
        """Whether the smallest sum has met its bound."""
        return 0.0 < self.cost <= self.sum_bound * (1 + OPTIMAL)

    @property
    def gap(self) -> float:
        """How far above the smallest sum there is the smallest one found may be (:func:`gap_of`)."""
        return 0.0 if self.optimal else gap_of(self.cost, self.sum_bound)

    def about(self, quantity: str) -> Proof:
        """Of the bounds only those on one quantity."""
        return replace(self, bounds=tuple(bound for bound in self.bounds if bound.quantity == quantity))

    def beside(self, other: Proof) -> Proof:
        """What holds of both searches' spaces; the smallest sum is this one's."""
        return replace(
            self,
            bounds=tuple(dict.fromkeys([*self.bounds, *other.bounds])),
            seconds=self.seconds + other.seconds,
            dropped=tuple(dict.fromkeys([*self.dropped, *other.dropped])),
        )

    def sharing(self, faster: str) -> Proof:
        """The same bounds for rows in unequal shares, none of a ``faster`` device smaller than an equal one."""
        spaces = (replace(bound, space=replace(bound.space, faster_share=faster)) for bound in self.bounds)
        return replace(self, bounds=tuple(spaces))

    def without(self, bound: Bound, name: str, shape: Axes, seconds: float) -> Proof:
        """The same once a candidate that takes fewer ``seconds`` has shown that a bound is none."""
        return replace(self.silent(bound), dropped=(*self.dropped, Dropped(bound, name, shape, seconds)))

    def silent(self, bound: Bound) -> Proof:
        """The same where a bound says nothing of the quantity it stands for."""
        return replace(self, bounds=tuple(replace(b, value=0.0) if b == bound else b for b in self.bounds))
