"""What ``shardwright explain --program`` prints: what one rank does in one step, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.cli._show import bytes_text, print_json, table

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def explain_program(plan: Plan, graph: Graph, rank: int, as_json: bool) -> None:
    """The program of one rank."""
    from shardwright.costs.deciding import ByPrice
    from shardwright.errors import ShardwrightError
    from shardwright.program import build
    from shardwright.program.listing import listed

    mesh = plan.mesh
    if not 0 <= rank < mesh.devices:
        raise ShardwrightError(f"The plan has no rank {rank}.", f"Its ranks are 0 to {mesh.devices - 1}.")
    decisions = replace(plan.decisions, otherwise=ByPrice(mesh))
    place, kind = mesh.coordinates(rank), mesh.device.kind
    program = build(
        graph, plan.strategy, decisions, place, device=kind, training=graph.training, optimizer=plan.optimiser
    )
    rows = listed(program)
    if as_json:
        print_json({"rank": rank, "coordinate": list(place), "instructions": rows})
        return
    table(
        f"What rank {rank} does in one step: {len(rows)} instructions",
        ["no", "phase", "kind", "what", "stream", "waits for", "bytes"],
        [
            [
                str(row["number"]),
                row["phase"],
                row["kind"],
                row["what"],
                row["stream"],
                ", ".join(map(str, row["waits_for"])) or "–",
                bytes_text(row["bytes"]) if row["bytes"] else "",
            ]
            for row in rows
        ],
    )
