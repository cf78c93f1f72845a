"""``shardwright explain``: why a plan is as it is, what else there was, what fills its memory, what one rank does."""

from __future__ import annotations

import re
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._found import print_advice
from shardwright.cli._options import AdviceOption
from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import bytes_text, console, mesh_text, print_json, progress, seconds_text, table
from shardwright.cli._step import print_step

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan
    from shardwright.program.tasks import ListedLine


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    operator: Annotated[
        str | None, typer.Argument(help="An operator by name, module path or pattern: its options and their prices")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory and the largest things alive then")] = False,
    program: Annotated[bool, typer.Option("--program", help="What one rank does in one step, line by line")] = False,
    advice: AdviceOption = False,
    rank: Annotated[int, typer.Option(help="With --program: whose")] = 0,
    model: ModelOption = None,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Explain PLAN: how every operator is split, why one is split as it is, what fills the memory, what a rank does.

    Example: shardwright explain plan.json --memory

    Of several passes: every stage with its bubble, exposed communication and memory too.

    What rank 3 does in one step, instruction by instruction: shardwright explain plan.json --program --rank 3
    """
    from shardwright.reports.steps import PlanStep, several_passes

    with progress(as_json) as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
    if advice:
        explain_advice(loaded, graph, as_json)
    elif memory:
        explain_memory(loaded, graph, as_json)
    elif program:
        explain_program(loaded, graph, rank, as_json)
    elif operator is not None:
        explain_operator(loaded, graph, operator, as_json)
    else:
        if not as_json and several_passes(loaded):
            print_step(PlanStep.of(loaded, graph), width=120)
        explain_plan(loaded, graph, as_json)


def explain_advice(plan: Plan, graph: Graph, as_json: bool) -> None:
    """What is the user's to change; more rows are tried where the plan's model is planned with them: ``plan --advice``."""
    from shardwright.planner.advising import advise

    found = advise(plan, graph)
    if as_json:
        print_json({"advice": [one.as_dict() for one in found]})
        return
    print_advice(found)
    if not found:
        console.print("Nothing that was tried would make it faster.")


def explain_memory(plan: Plan, graph: Graph, as_json: bool) -> None:
    """Per kind of rank its peak; of the fullest the kinds of content then, and the ten largest things with their modules."""
    from shardwright.reports.steps import PlanStep
    from shardwright.simulator.peaks import peak_of

    step = PlanStep.of(plan, graph)
    limit, timeline = plan.meshes[0].device.usable_memory, step.timeline
    peaks = [peak_of(timeline, group) for group in step.groups]
    if as_json:
        rows = [
            {
                "ranks": list(step.ranks(group)),
                "stages": step.stages(group),
                "peak_bytes": peak.needed,
                "allocated_bytes": peak.handed,
                "reserved_bytes": peak.use and peak.use.reserved,
                "at": {
                    "pass": peak.action and str(peak.action),
                    "event": peak.event and peak.event.name,
                    "phase": peak.event and peak.event.phase,
                    "module": peak.event and peak.event.module,
                },
                "breakdown": peak.breakdown,
                "largest": [{"bytes": one.bytes, "what": one.what, "module": one.module} for one in peak.largest],
                "curve": timeline.memory_curve(group),
            }
            for group, peak in enumerate(peaks)
        ]
        print_json({"peak_bytes": timeline.peak_bytes, "usable_bytes": limit, "ranks": rows})
        return
    cells = []
    for group, peak in enumerate(peaks):
        mine = [timeline.stage(stage).bytes for stage in step.stages(group)]
        held = [sum(one.resting for one in mine), sum(one.kept for one in mine), sum(one.held for one in mine)]
        cells.append([step.title(group), *map(bytes_text, (peak.needed, *held, max(one.working for one in mine)))])
    heads = ["ranks", "peak", "at rest", "gradients", "held per micro-batch", "more inside a pass"]
    table(f"Memory of a rank, of {bytes_text(limit)}", heads, cells)
    worst = max(step.groups, key=lambda group: timeline.memory[group])
    peak = peaks[worst]
    total = sum(peak.breakdown.values())
    kinds = sorted(peak.breakdown.items(), key=lambda item: -item[1])
    table(
        f"Peak {bytes_text(peak.needed)} of {step.title(worst)}, during {peak.during}",
        ["kind", "bytes", "share"],
        [[kind, bytes_text(size), f"{100 * size / total:.1f} %"] for kind, size in kinds],
        peak.told(bytes_text).capitalize(),
    )
    table(
        "The largest things alive then",
        ["what", "module", "bytes"],
        [[one.what, one.module, bytes_text(one.bytes)] for one in peak.largest],
    )


def rank_lines(plan: Plan, graph: Graph, rank: int) -> tuple[ListedLine, ...]:
    """What one rank does in one step, in its order; each instruction with the program that it is of.

    Raises
    ------
    ShardwrightError
        When the plan has no such rank.
    """
    from shardwright.costs.priced_decisions import PricedDecisions
    from shardwright.errors import ShardwrightError
    from shardwright.program.pipeline import Pipeline

    if not 0 <= rank < plan.devices:
        raise ShardwrightError(f"The plan has no rank {rank}.", f"Its ranks are 0 to {plan.devices - 1}.")
    pipeline = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
    pairs = zip(plan.stages, plan.meshes, strict=True)
    priced = [replace(stage.decisions, otherwise=PricedDecisions(mesh)) for stage, mesh in pairs]
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


def explain_plan(plan: Plan, graph: Graph, as_json: bool) -> None:
    """Every decision once: operators and parameters of repeated blocks are shown for the first block."""
    from shardwright.reports.explaining import explained_plan

    document = explained_plan(plan, graph)
    if as_json:
        print_json(document)
        return
    rows, parameters = document["operators"], document["parameters"]
    for number, stage in enumerate(plan.stages):
        where = mesh_text(stage.strategy.axes) + (f", stage {number}" if len(plan.stages) > 1 else "")
        shown = [
            [str(r["operator"]), str(r["target"]), str(r["module"]), _split_text(r["split"]), f"×{r['times']}"]
            for r in rows
            if r["stage"] == number
        ]
        table(f"Splits over {where}", ["operator", "target", "module", "cuts per axis", "repeated"], shown)
        folded: dict[tuple[str, str], int] = {}
        for p in parameters:
            if p["stage"] == number:
                key = (re.sub(r"\.\d+(?=\.|$)", ".*", str(p["parameter"])), ", ".join(p["resting"]))
                folded[key] = folded.get(key, 0) + 1
        table(
            f"Parameters at rest over {where}",
            ["parameter", "layout", "repeated"],
            [[name, layout, f"×{count}"] for (name, layout), count in folded.items()],
            caption=document["binding"] if number == len(plan.stages) - 1 else "",
        )
    for name, what, seconds in plan.replicated:
        console.print(f"{name} runs whole on every rank for want of a rule ({what}): {seconds_text(seconds)}.")


def explain_operator(plan: Plan, graph: Graph, pattern: str, as_json: bool) -> None:
    """One operator (by name, module path or pattern): its split, its cost, the next-best options and their totals."""
    from shardwright.reports.explaining import explained_operators, matching

    document = explained_operators(plan, graph, pattern)
    if as_json:
        print_json(document)
        return
    for entry in document:
        count = entry["repeated"]
        table(
            f"{entry['operator']} ({entry['target']}) in {entry['module'] or 'the model'}, {entry['source']}"
            + (f", stage {entry['stage']}" if len(plan.stages) > 1 else "")
            + (f", one of {count} that decide together" if count > 1 else ""),
            ["cuts per axis", "reads → makes", "these operators" if count > 1 else "operator itself", "best total", ""],
            [
                [
                    _split_text(o["split"]),
                    o["layouts"],
                    seconds_text(o["own_seconds"]),
                    seconds_text(o["total_seconds"]) if isfinite(o["total_seconds"]) else "does not fit",
                    "◀ chosen" if o["chosen"] else "",
                ]
                for o in entry["options"]
            ],
            caption=f"Best total: the smallest sum of seconds with this option, all else decided anew. {entry['binding']}"
            + ("" if entry["options"][0]["chosen"] else " The chosen one is faster when simulated, with overlap."),
        )
    if (more := len(matching(graph, pattern)) - len(document)) > 0:
        console.print(f"{more} more operators match {pattern!r}.")
    console.print("To insist on another option: shardwright plan PLAN.json --pin 'OPERATOR=cut,cut,…' -o OTHER.json")


def _split_text(split: Any) -> str:
    return ", ".join("–" if loop is None else str(loop) for loop in split)
