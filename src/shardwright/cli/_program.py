"""What ``shardwright explain --program`` prints: what one rank does in one step, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, print_json, table

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def _explain_stages(plan: Plan, graph: Graph, rank: int, as_json: bool) -> None:
    """What one rank of a pipeline does."""
    from shardwright.costs.deciding import ByPrice
    from shardwright.errors import ShardwrightError
    from shardwright.program.flat import flat
    from shardwright.program.listing import listed_lines
    from shardwright.program.pipeline import Pipeline

    if not 0 <= rank < plan.devices:
        raise ShardwrightError(f"The plan has no rank {rank}.", f"Its ranks are 0 to {plan.devices - 1}.")
    assert plan.schedule is not None  # a plan with stages has one
    pipeline = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
    programs = {}
    for number, stage in enumerate(plan.stages):
        mesh = plan.stage_mesh(number)
        decisions = replace(stage.decisions, otherwise=ByPrice(mesh))
        for size in pipeline.parts if rank in stage.ranks else ():
            split, kind = pipeline.splits(number), mesh.device.kind
            programs[number, size] = pipeline.program(number, size, rank, decisions, device=kind, split=split)
    rows = listed_lines(flat(pipeline, rank, programs))
    if as_json:
        print_json({"rank": rank, "instructions": rows})
        return
    # What is done once, for all micro-batches, bears the number after the last one.
    pieces = {number: str(number) for number in range(plan.microbatches)}
    _print(rank, [row | {"microbatch": pieces.get(row["microbatch"], "–")} for row in rows], stages=True)


def explain_program(plan: Plan, graph: Graph, rank: int, as_json: bool) -> None:
    """The program of one rank."""
    from shardwright.costs.deciding import ByPrice
    from shardwright.errors import ShardwrightError
    from shardwright.program import build
    from shardwright.program.listing import listed

    if plan.stages:
        _explain_stages(plan, graph, rank, as_json)
        return
    mesh = plan.mesh
    if not 0 <= rank < mesh.devices:
        raise ShardwrightError(f"The plan has no rank {rank}.", f"Its ranks are 0 to {mesh.devices - 1}.")
    decisions = replace(plan.decisions, otherwise=ByPrice(mesh))
    place, kind = mesh.coordinates(rank), mesh.device.kind
    program = build(
        graph, plan.strategy, decisions, place, device=kind, training=graph.training, optimizer=plan.optimizer
    )
    rows = listed(program)
    if as_json:
        print_json({"rank": rank, "coordinate": list(place), "instructions": rows})
        return
    _print(rank, rows)


def _print(rank: int, rows: list[dict[str, Any]], stages: bool = False) -> None:
    """A line for every instruction."""
    staged = {"stage": "stage", "mb": "microbatch"} if stages else {}
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
