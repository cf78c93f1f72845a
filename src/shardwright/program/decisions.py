"""What is decided about a step before its program is written: routes, sums between replicas, sizes of bundles and buckets.

The builder asks these questions and obeys the answers; it knows no price. While a plan is made the answers come from prices
(:mod:`shardwright.costs.priced_decisions`); the plan records them, so that running it asks nothing again and an edited price
changes no program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shardwright.errors import PlanError
from shardwright.operators.rules import Layout, Need
from shardwright.program.steps import Route

MiB = 2**20


@dataclass(frozen=True)
class Sizes:
    """Byte counts at which bundles and buckets are full and gathers stop being started ahead.

    ``bundle``: parameters that travel together; one with as many bytes travels alone. ``bucket``: gradients summed together;
    the first of a kind is small (``first_bucket``), so that communication starts early. ``ahead``: gathers are started ahead
    of use until this many bytes are under way, and the next one in any case. ``in_flight``: with more bytes of gradients
    being scattered, the oldest are awaited, which frees them.
    """

    bundle: int = 4 * MiB
    bucket: int = 25 * MiB
    first_bucket: int = 1 * MiB
    ahead: int = 64 * MiB
    in_flight: int = 64 * MiB


RouteKey = tuple[tuple[int, ...], str, Layout, tuple[Need, ...], bool]
"""Shape, dtype, layout, what is needed, and whether a gradient comes back."""
NestKey = tuple[int, int, tuple[int, ...]]
"""Elements and bytes of each, and the mesh axes (slowest first) along which replicas are summed."""


class Decisions(Protocol):
    """Answers to the builder's questions."""

    @property
    def sizes(self) -> Sizes: ...

    def route(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: tuple[Need, ...], grad: bool
    ) -> Route | None:
        """How a tensor gets from one layout to what a reader needs; nothing where it cannot."""

    def nest(self, elements: int, itemsize: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Along which of the axes sums between replicas are scattered before the rest is reduced."""


@dataclass(frozen=True)
class FixedDecisions:
    """Decisions that were made before, as a plan holds them; what was never asked is left to ``otherwise``.

    >>> FixedDecisions().sizes.bucket
    26214400
    """

    sizes: Sizes = Sizes()
    routes: Mapping[RouteKey, Route] = field(default_factory=dict)
    nests: Mapping[NestKey, tuple[int, ...]] = field(default_factory=dict)
    otherwise: Decisions | None = None

    def route(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: tuple[Need, ...], grad: bool
    ) -> Route | None:
        known = self.routes.get((shape, dtype, source, target, grad))
        if known is None and self.otherwise is not None:
            return self.otherwise.route(shape, dtype, source, target, grad)
        if known is None:
            raise PlanError(
                f"the plan says no route for {dtype}{list(shape)} from {source} to {target}.", "Make the plan again."
            )
        return known

    def nest(self, elements: int, itemsize: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        if len(axes) < 2:
            return ()
        known = self.nests.get((elements, itemsize, axes))
        if known is None and self.otherwise is not None:
            return self.otherwise.nest(elements, itemsize, axes)
        if known is None:
            raise PlanError(
                f"the plan does not say how {elements} elements are summed along mesh axes {axes}.",
                "Make the plan again.",
            )
        return known


class RecordingDecisions:
    """Passes questions on to other decisions and notes the answers, for a plan to hold them."""

    def __init__(self, decisions: Decisions) -> None:
        self.decisions, self.sizes = decisions, decisions.sizes
        self._routes: dict[RouteKey, Route] = {}
        self._nests: dict[NestKey, tuple[int, ...]] = {}

    def route(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: tuple[Need, ...], grad: bool
    ) -> Route | None:
        answer = self.decisions.route(shape, dtype, source, target, grad)
        if answer is not None:
            self._routes[shape, dtype, source, target, grad] = answer
        return answer

    def nest(self, elements: int, itemsize: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        answer = self.decisions.nest(elements, itemsize, axes)
        if len(axes) > 1:
            self._nests[elements, itemsize, axes] = answer
        return answer

    def written(self) -> FixedDecisions:
        """Everything asked so far, with its answers."""
        return FixedDecisions(self.sizes, dict(self._routes), dict(self._nests))
