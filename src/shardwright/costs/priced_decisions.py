"""Decisions made by price: the cheapest route between two layouts, the cheapest nest of a sum between replicas."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.cluster import Mesh
from shardwright.costs.redistribute import conversion
from shardwright.costs.replica_sums import cheapest_nest
from shardwright.operators.rules import Layout, Need
from shardwright.program.decisions import Sizes
from shardwright.program.steps import Route


@dataclass(frozen=True)
class PricedDecisions:
    """The cheapest answers on a mesh (:class:`shardwright.program.decisions.Decisions`)."""

    mesh: Mesh
    sizes: Sizes = field(default_factory=Sizes)

    def route(
        self, shape: tuple[int, ...], dtype: str, source: Layout, target: tuple[Need, ...], grad: bool
    ) -> Route | None:
        found = conversion(shape, dtype, source, target, self.mesh, grad)
        return found.route if found.possible else None

    def nest(self, elements: int, itemsize: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        return cheapest_nest(elements, itemsize, axes, self.mesh)[0]
