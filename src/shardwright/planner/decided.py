"""What a plan decides about its step beyond the strategy, asked once and written down.

Every question that building the program of any rank asks (which route between two layouts, which nest of a sum) is answered
by price here: for every size of micro-batch, for the border of the module and for the borders between stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.cluster import Mesh
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import LoweringError
from shardwright.operators.rules import largest_place
from shardwright.operators.strategy import Strategy
from shardwright.program import FixedDecisions, RecordingDecisions, build
from shardwright.program.boundary import arriving, cross
from shardwright.program.stages import StageGraph


def decided(parts: Mapping[int, StageGraph], strategy: Strategy, mesh: Mesh) -> FixedDecisions:
    """Every decision that running a stage asks for; ``parts`` are its graphs by the size of a micro-batch.

    Raises
    ------
    LoweringError
        When an operator cannot be split as the strategy says; the message names it.
    """
    noting, place = RecordingDecisions(PricedDecisions(mesh.with_shares(strategy.shares))), largest_place(strategy.cuts)
    for part in parts.values():
        try:
            flow = build(part.graph, strategy, noting, place, device=mesh.device.kind).flow
        except LoweringError as error:
            if len(parts) == 1:
                raise
            raise LoweringError(
                f"Micro-batches of {' and '.join(map(str, parts))} rows cannot all be split alike: {error.message}",
                "Ask for a number of micro-batches that divides the batch.",
            ) from None
        cross(flow, noting)
        for name in part.wanted:
            arriving(flow, noting, name, strategy.resting[name])
    return noting.written()
