"""What a plan decides about its step beyond the strategy, asked once and written down.

Every question that building the program of any rank asks (which route between two layouts, which nest of a sum) is answered
by price here, for the call the plan is made for, training as it runs, and the border of the module.
"""

from __future__ import annotations

from shardwright.cluster import Mesh
from shardwright.costs.deciding import ByPrice
from shardwright.graph import Graph
from shardwright.operators.rules import largest_place
from shardwright.operators.strategy import Strategy
from shardwright.program import Noting, Written, build
from shardwright.program.border import cross


def decided(graph: Graph, strategy: Strategy, mesh: Mesh) -> Written:
    """Every decision that running a strategy on a mesh asks for."""
    noting = Noting(ByPrice(mesh.with_shares(strategy.shares)))
    place = largest_place(strategy.cuts)
    program = build(graph, strategy, noting, place, device=mesh.device.kind)
    cross(program.flow, noting)
    return noting.written()
