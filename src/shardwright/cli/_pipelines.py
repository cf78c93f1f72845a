"""Stages of a pipeline: what is asked of them on the command line, and what they are as a table and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, console, mesh_text, print_json, seconds_text, table
from shardwright.records import shown

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.planner import Pipelining
    from shardwright.plans import Plan, Stage
    from shardwright.schedules import Schedule
    from shardwright.simulator import Timeline


MOST = 100_000
"""Stages and micro-batches that anybody could mean."""


def pipelining(
    stages: str | None, microbatches: str | None, schedule: str, cuts: Sequence[str], norm: str = "whole"
) -> Pipelining | None:
    """What the command line asks of a pipeline; refused before any work where it means nothing."""
    from shardwright.errors import ShardwrightError
    from shardwright.planner import Pipelining
    from shardwright.schedules import RECIPES, read_csv

    if norm not in ("whole", "per-piece"):
        raise ShardwrightError(f"--batch-norm {norm!r} is not known.", "Write whole or per-piece.")
    if stages in ("auto", "none"):
        if microbatches is not None or cuts or schedule != "auto":
            what = "chooses micro-batches, cuts and schedule itself" if stages == "auto" else "asks for no pipeline"
            raise ShardwrightError(f"--stages {stages} {what}.", "Give a number of stages with these.")
        return None
    if stages is None and microbatches is None and not cuts:
        if schedule != "auto":
            raise ShardwrightError(f"--schedule {schedule} orders the passes of a pipeline.", "Say --stages 4 too.")
        if norm != "whole":
            raise ShardwrightError(f"--batch-norm {norm} is about micro-batches.", "Say --microbatches 4 too.")
        return None
    if schedule.endswith(".csv"):
        read_csv(schedule)
    elif schedule != "auto" and schedule not in RECIPES:
        raise ShardwrightError(f"There is no schedule {schedule!r}.", f"There are auto, {', '.join(RECIPES)}.")
    count = _whole("stages", stages) if stages is not None else len(cuts) + 1
    number = None if microbatches in (None, "auto") else _whole("microbatches", str(microbatches))
    return Pipelining(count, number, schedule, cuts, norm)


def _whole(flag: str, text: str) -> int:
    from shardwright.errors import ShardwrightError

    if not text.isdecimal():
        raise ShardwrightError(f"--{flag} {shown(text)} is no number.", f"Write --{flag} 4, or auto.")
    if len(text) > len(str(MOST)) or not 1 <= int(text) <= MOST:
        raise ShardwrightError(f"--{flag} {shown(text)} means nothing.", f"Give a number from 1 to {MOST:,}.")
    return int(text)


def stages_document(stages: Sequence[Stage], schedule: Schedule) -> dict[str, Any]:
    """JSON values."""
    rows = [
        {
            "operators": len(stage.operators),
            "ranks": list(stage.ranks),
            "mesh": stage.strategy.axes,
            **({} if stage.prediction is None else asdict(stage.prediction)),
        }
        for stage in stages
    ]
    orders = [" ".join(map(str, order)) for order in schedule.orders]
    return {"microbatches": schedule.microbatches, "stages": rows, "schedule": orders}


def print_stages(stages: Sequence[Stage], schedule: Schedule) -> None:
    """One row per stage: where it runs, how long it works and idles, what it holds."""
    rows = []
    for number, stage in enumerate(stages):
        p = stage.prediction
        told = ["–"] * 4
        if p is not None:
            told = [seconds_text(p.busy_seconds), f"{100 * p.bubble:.1f} %", seconds_text(p.exposed_seconds)]
            told.append(bytes_text(p.memory_bytes))
        ranks = f"{stage.ranks[0]}–{stage.ranks[-1]}" if len(stage.ranks) > 1 else str(stage.ranks[0])
        rows.append([str(number), str(len(stage.operators)), ranks, mesh_text(stage.strategy.axes), *told])
    title = f"{len(stages)} stages, {schedule.microbatches} micro-batches"
    caption = "bubble: share of the step that a device idles; exposed: seconds in which it only waits for communication"
    heads = ["stage", "operators", "ranks", "mesh", "busy", "bubble", "exposed", "memory/device"]
    table(title, heads, rows, caption)


def show_timeline(plan: Plan, timeline: Timeline, width: int, as_json: bool) -> None:
    """A simulated step of all ranks."""
    from shardwright.schedules.picture import draw

    p, timing = {"step_seconds": timeline.seconds, "bubble": timeline.bubble}, timeline.timing
    if as_json:
        print_json(
            {
                **p,
                "makespan": timing.makespan,
                "peak_bytes": timeline.memory,
                "sent_bytes": timeline.sent_bytes,
                **stages_document(plan.stages, timing.schedule),
                "stage_predictions": [asdict(one) for one in timeline.stages],
            }
        )
        return
    from dataclasses import replace

    shown = [replace(stage, prediction=one) for stage, one in zip(plan.stages, timeline.stages, strict=True)]
    print_stages(shown, timing.schedule)
    console.print(
        f"{plan.model or 'The model'}: {seconds_text(timeline.seconds)} a step, bubble {100 * timeline.bubble:.1f} %, "
        f"{bytes_text(timeline.sent_bytes)} sent to other stages by the busiest rank. Prices: {plan.calibration}."
    )
    for line in draw(timing, width):
        console.print(line, soft_wrap=True, highlight=False)


def explain_stages(plan: Plan, graph: Graph, memory: bool, as_json: bool) -> None:
    """What every stage does and holds, by the simulation of all ranks; ``memory``: what fills it."""
    from shardwright.simulator import simulate_plan

    timeline = simulate_plan(plan, graph)
    if not memory:
        show_timeline(plan, timeline, 120, as_json)
        return
    rows = []
    for stage, device in enumerate(timeline.timing.schedule.device_of):
        held = timeline.stage(stage).bytes
        about = {"at_rest": held.resting, "gradients": held.kept, "per_microbatch": held.held}
        rows.append({"stage": stage, **about, "inside_a_pass": held.working, "peak_bytes": timeline.memory[device]})
    if as_json:
        curves = [timeline.memory_curve(device) for device in range(timeline.timing.schedule.devices)]
        print_json({"stages": rows, "memory_curves": curves})
        return
    heads = ["stage", "at rest", "gradients", "held per micro-batch", "more inside a pass", "peak of its ranks"]
    cells = [[str(row["stage"]), *(bytes_text(size) for key, size in row.items() if key != "stage")] for row in rows]
    table("Memory of a pipeline, bytes on one rank", heads, cells)
