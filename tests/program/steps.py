"""A step of a strategy, built and priced, for tests to look at."""

from __future__ import annotations

from shardwright.cluster import Mesh
from shardwright.costs.memory import MemoryUse, memory
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.costs.pricing import FREE, Event, Priced, price
from shardwright.graph import Graph
from shardwright.operators.rules import largest_place
from shardwright.operators.strategy import Strategy
from shardwright.program import Program, Sizes, build


def program_of(
    graph: Graph, strategy: Strategy, mesh: Mesh, training: bool = True, sizes: Sizes | None = None
) -> Program:
    """The program of the rank with the largest pieces."""
    mesh = mesh.with_shares(strategy.shares)
    decisions = PricedDecisions(mesh, sizes or Sizes())
    return build(graph, strategy, decisions, largest_place(strategy.cuts), device=mesh.device.kind, training=training)


def priced(graph: Graph, strategy: Strategy, mesh: Mesh, training: bool = True, sizes: Sizes | None = None) -> Priced:
    return price(program_of(graph, strategy, mesh, training, sizes), mesh)


def issued(found: Priced) -> list[Event]:
    """The instructions that issue something, in order."""
    return [event for event in found.events if event.kind not in FREE]


def memory_of(graph: Graph, strategy: Strategy, mesh: Mesh) -> MemoryUse:
    return memory(program_of(graph, strategy, mesh), mesh.device)
