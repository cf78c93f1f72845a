"""What ``shardwright explain --program`` prints: what one rank does in one step, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, print_json, table

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan
    from shardwright.program.tasks import Line


def rank_lines(plan: Plan, graph: Graph, rank: int) -> tuple[Line, ...]:
    """What one rank does in one step, in its order; each instruction with the program that it is of.

    Raises
    ------
    ShardwrightError
        When the plan has no such rank.
    """
    from shardwright.costs.deciding import ByPrice
    from shardwright.errors import ShardwrightError
    from shardwright.program.pipeline import Pipeline

    if not 0 <= rank < plan.devices:
        raise ShardwrightError(f"The plan has no rank {rank}.", f"Its ranks are 0 to {plan.devices - 1}.")
    pipeline = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
    pairs = zip(plan.stages, plan.meshes, strict=True)
    priced = [replace(stage.decisions, otherwise=ByPrice(mesh)) for stage, mesh in pairs]
    return pipeline.step(rank, priced, device=plan.meshes[0].device.kind, optimizer=plan.optimizer).lines()


def explain_program(plan: Plan, graph: Graph, rank: int, as_json: bool) -> None:
    """The program of one rank."""
    from shardwright.program.listing import listed

    rows = listed(rank_lines(plan, graph, rank))
    if as_json:
        print_json({"rank": rank, "instructions": rows})
        return
    # What is done once, for all micro-batches, bears the number after the last one.
    pieces = {number: str(number) for number in range(plan.microbatches)}
    _print(rank, [row | {"microbatch": pieces.get(row["microbatch"], "–")} for row in rows])


def _print(rank: int, rows: list[dict[str, Any]]) -> None:
    """A line for every instruction."""
    several = len({row["stage"] for row in rows}) > 1 or len({row["microbatch"] for row in rows} - {"–"}) > 1
    staged = {"stage": "stage", "mb": "microbatch"} if several else {}
    shown = {"no": "number", "phase": "phase", **staged, "kind": "kind", "what": "what", "stream": "stream"}
    table(
        f"What rank {rank} does in one step: {len(rows)} instructions",
        [*shown, "waits for", "bytes"],
        [
            [str(row[key]) for key in shown.values()]
            + [", ".join(map(str, row["waits_for"])) or "–", bytes_text(row["bytes"]) if row["bytes"] else ""]
            for row in rows
        ],
    )
