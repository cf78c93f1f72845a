"""A plan's step as commands show it: tables of its stages and streams, its passes, and all of it as one document."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shardwright.cli._show import bytes_text, console, mesh_text, seconds_text, table

if TYPE_CHECKING:
    from shardwright.plans import Plan
    from shardwright.reports.steps import PlanStep


def stages_document(plan: Plan) -> dict[str, Any]:
    """The stages of a plan and the order of their passes as JSON values."""
    rows = [
        {
            "operators": len(stage.operators),
            "ranks": list(stage.ranks),
            "mesh": stage.strategy.axes,
            **({} if stage.prediction is None else asdict(stage.prediction)),
        }
        for stage in plan.stages
    ]
    orders = [" ".join(map(str, order)) for order in plan.schedule.orders]
    return {"microbatches": plan.microbatches, "stages": rows, "schedule": orders}


def print_stages(plan: Plan) -> None:
    """One row per stage: where it runs, how long it works and idles, what it holds."""
    rows = []
    for number, stage in enumerate(plan.stages):
        p = stage.prediction
        told = ["–"] * 4
        if p is not None:
            told = [seconds_text(p.busy_seconds), f"{100 * p.bubble:.1f} %", seconds_text(p.exposed_seconds)]
            told.append(bytes_text(p.memory_bytes))
        ranks = f"{stage.ranks[0]}–{stage.ranks[-1]}" if len(stage.ranks) > 1 else str(stage.ranks[0])
        rows.append([str(number), str(len(stage.operators)), ranks, mesh_text(stage.strategy.axes), *told])
    title = f"{_counted(len(plan.stages), 'stage')}, {_counted(plan.microbatches, 'micro-batch', 'es')}"
    caption = (
        "Bubble: share of the step that a device idles; exposed: seconds in which it only waits for communication; "
        "memory: of a device."
    )
    heads = ["stage", "operators", "ranks", "mesh", "busy", "bubble", "exposed", "memory"]
    table(title, heads, rows, caption, spare=("operators",))


def _counted(count: int, what: str, more: str = "s") -> str:
    return f"{count} {what}{more if count != 1 else ''}"


def step_document(step: PlanStep) -> dict[str, Any]:
    """A simulated step: of every stage what it does, of every kind of rank what one of them does."""
    timeline = step.timeline
    found = stages_document(_told(step))
    for number, row in enumerate(found["stages"]):
        row["communication"] = [
            {"collective": kind, "axis": axis, "times": count, "bytes": size}
            for (kind, axis), (count, size, _) in step.communication(number).items()
        ]
    ranks = [
        {
            "ranks": list(step.ranks(group)),
            "stages": step.stages(group),
            "exposed_seconds": rank.exposed(),
            "lower_bound_seconds": rank.lower_bound,
            "busy_seconds": rank.load,
            "utilisation": rank.utilisation,
            "peak_bytes": timeline.memory[group],
            "memory_curve": timeline.memory_curve(group),
        }
        for group, rank in enumerate(timeline.ranks)
    ]
    return {
        "step_seconds": timeline.seconds,
        "sum_seconds": timeline.sum_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "lower_bound_seconds": max(rank.lower_bound for rank in timeline.ranks),
        "bubble": timeline.bubble,
        "makespan": timeline.timing.makespan,
        "peak_bytes": timeline.peak_bytes,
        "sent_bytes": timeline.sent_bytes,
        **found,
        "ranks": ranks,
    }


def print_step(step: PlanStep, width: int) -> None:
    """A simulated step of all ranks."""
    from shardwright.reports.steps import several_passes
    from shardwright.schedules.picture import draw

    plan, timeline = _told(step), step.timeline
    print_stages(plan)
    rows = [
        [step.title(group), stream, seconds_text(busy), f"{100 * rank.utilisation[stream]:.1f} %"]
        for group, rank in enumerate(timeline.ranks)
        for stream, busy in rank.load.items()
    ]
    bound = max(rank.lower_bound for rank in timeline.ranks)
    sent = (
        f"{bytes_text(timeline.sent_bytes)} sent to other stages by the busiest rank. " if len(plan.stages) > 1 else ""
    )
    idle = f"Bubble {100 * timeline.bubble:.1f} %. " if len(step.groups) > 1 else ""
    caption = (
        f"{seconds_text(timeline.exposed_seconds)} of communication exposed; no schedule of these events is shorter than "
        f"{seconds_text(bound)}. {idle}{sent}Peak memory {bytes_text(timeline.peak_bytes)}. Prices: {plan.calibration}."
    )
    title = f"{plan.model or 'The model'} as {step.shape}: {seconds_text(timeline.seconds)} a step"
    table(title, ["ranks", "stream", "busy", "share of the step"], rows, caption)
    talk = [
        [str(number), kind, axis, str(count), bytes_text(size)]
        for number in range(len(plan.stages))
        for (kind, axis), (count, size, _) in step.communication(number).items()
    ]
    if talk:
        table("Collectives of one rank of a stage", ["stage", "collective", "axis", "times", "bytes"], talk)
    if several_passes(plan):
        for line in draw(timeline.timing, width):
            console.print(line, soft_wrap=True, highlight=False)


def _told(step: PlanStep) -> Plan:
    """The plan as it was simulated: its order of passes, and what is predicted of its stages."""
    timeline = step.timeline
    rows = zip(step.plan.stages, timeline.stages, strict=True)
    stages = tuple(replace(stage, prediction=one) for stage, one in rows)
    return replace(step.plan, stages=stages, schedule=timeline.pipeline.schedule)
