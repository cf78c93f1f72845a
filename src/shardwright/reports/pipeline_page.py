"""What the page of a plan with stages shows: every section as for other plans, of all stages together or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.planner import describe_graph
from shardwright.reports.html import asset, data, escape, legend_item, table
from shardwright.reports.packing import axes_of
from shardwright.reports.pipelined import BETWEEN, Piped, packed_pipeline, packed_traffic
from shardwright.reports.splitting import split_rows
from shardwright.reports.traffic import RECEIVERS
from shardwright.reports.why import why_rows
from shardwright.simulator.variants import order_name
from shardwright.units import bytes_text, seconds_text


def carried(piped: Piped, why_seconds: float) -> dict[str, Any]:
    """What the scripts of the page draw from."""
    plan = piped.plan
    rows: list[dict[str, Any]] = []
    why: dict[str, Any] = {}
    for number in range(len(plan.stages)):
        one, graph = piped.stage(number)
        described = describe_graph(graph)
        rows += [{**row, "stage": number} for row in split_rows(one, graph, described.rules, described.labels)]
        found = why_rows(one, graph, described, why_seconds / len(plan.stages))
        why |= {name: options for name, options in found.items() if name not in why}
    return {
        "axes": axes_of(plan.stages[0].strategy),
        "devices": plan.devices,
        "split": rows,
        "why": why,
        "traffic": packed_traffic(piped),
        "pipeline": packed_pipeline(piped, why_seconds),
    }


def under(piped: Piped) -> str:
    """The line below the title."""
    plan = piped.plan
    meshes = dict.fromkeys(" × ".join(f"{name} {size}" for name, size in stage.strategy.axes) for stage in plan.stages)
    order = order_name(plan.schedule) or "found by search"
    return (
        f"{plan.devices} devices, {len(plan.stages)} stages of {' or '.join(meshes)} · {plan.microbatches} micro-batches, "
        f"order {order}"
    )


def stages_table(piped: Piped) -> str:
    """One line per stage: where it runs, how long it works and idles, what it holds."""
    rows = []
    for number, (stage, p) in enumerate(zip(piped.plan.stages, piped.timeline.stages, strict=True)):
        mesh = " × ".join(f"{name} {size}" for name, size in stage.strategy.axes)
        ranks = f"{stage.ranks[0]}–{stage.ranks[-1]}" if len(stage.ranks) > 1 else str(stage.ranks[0])
        rows.append(
            [
                f"stage {number}",
                ranks,
                escape(mesh),
                str(len(stage.operators)),
                data(f"busy stage {number}", p.busy_seconds, seconds_text(p.busy_seconds)),
                data(f"bubble stage {number}", p.bubble, f"{100 * p.bubble:.1f} %"),
                data(f"exposed stage {number}", p.exposed_seconds, seconds_text(p.exposed_seconds)),
                data(f"memory stage {number}", p.memory_bytes, bytes_text(p.memory_bytes)),
            ]
        )
    columns = ["stage", "ranks", "mesh", "operators", "busy", "bubble", "exposed inside", "memory of a device"]
    return table("Stages", columns, rows, tight=True)


def timeline_section(piped: Piped) -> str:
    return (
        '<p class="hint">One step of every kind of rank. Above, the passes of every stage: a number is a micro-batch, '
        "what is left open is a bubble. Below, the streams of one kind of rank, event by event. Drag to move, Ctrl and the "
        "wheel (or two fingers) to zoom; point at a bar for what it is, how long it takes and what it waits for.</p>"
        + _choice(piped, "Streams of")
        + asset("timeline.html")
        + stages_table(piped)
    )


def memory_section(piped: Piped, limit: float) -> str:
    timeline = piped.timeline
    rows = []
    for device, peak in enumerate(timeline.memory):
        mine = [timeline.times[stage, piped.largest].bytes for stage in piped.stages(device)]
        rows.append(
            [
                escape(piped.title(device)),
                data(f"peak_bytes {device}", peak, bytes_text(peak)),
                f"{100 * peak / limit:.0f} %",
                bytes_text(sum(one.resting for one in mine)),
                bytes_text(sum(one.kept for one in mine)),
                bytes_text(sum(one.held for one in mine)),
                bytes_text(max(one.working for one in mine)),
            ]
        )
    worst = max(timeline.memory)
    columns = ["ranks", "peak", "of the limit", "at rest", "gradients", "held per micro-batch", "more inside a pass"]
    return (
        f'<p class="hint">Peak {data("peak_bytes", worst, bytes_text(worst))} of {bytes_text(limit)}: what is at '
        "rest, gradients, what every micro-batch under way holds for its backward pass, and what the largest pass needs "
        "besides. The curve shows the bytes alive, event by event, of which these are an estimate.</p>"
        + _choice(piped, "Memory of")
        + """<ul class="legend"></ul><div class="plot"><canvas tabindex="0" role="application" aria-label="Memory over time.
Left and right arrow tell what is alive then, plus and minus zoom."></canvas></div><p class="said" aria-live="polite"></p>"""
        + table("The peak of every kind of rank", columns, rows, tight=True)
    )


def _choice(piped: Piped, label: str) -> str:
    devices = range(piped.timeline.timing.schedule.devices)
    options = "".join(f'<option value="{device}">{escape(piped.title(device))}</option>' for device in devices)
    return f'<div class="tools"><label>{escape(label)} <select class="device">{options}</select></label></div>'


def communication_section(piped: Piped) -> str:
    plan, inside, between = piped.plan, _collectives(piped), _parcels(piped)
    if not inside and not between:
        return "<p>Nothing is sent between ranks.</p>"
    names = [*dict.fromkeys(name for stage in plan.stages for name, _ in stage.strategy.axes), BETWEEN]
    used = {name for stage in plan.stages for name, size in stage.strategy.axes if size > 1} | {BETWEEN}
    legend = "".join(
        legend_item(f"axis-{place % 5}", name if name == BETWEEN else f"over {name}")
        for place, name in enumerate(names)
        if name in used
    )
    heads = ["collective", "times", "bytes", "of which sent", "rate of the link"]
    pairs = ["between", "values", "gradients", "of each rank, both ways"]
    return (
        '<p class="hint">What every rank sends to every other in one step, as the collectives\' algorithms send it (rings, '
        "exchanges) and stages hand values and gradients on; a stronger colour is more.</p>"
        f'<ul class="legend">{legend}</ul><div class="beside"><div><div class="plot">'
        '<canvas class="matrix" tabindex="0" role="application" '
        'aria-label="Matrix of who sends to whom. Arrow keys walk through it."></canvas></div>'
        '<p class="said" aria-live="polite"></p></div><div>'
        + (table("Collectives of one rank in one step", heads, inside) if inside else "")
        + (table("What stages hand on in one step", pairs, between) if between else "")
        + "</div></div>"
    )


def _collectives(piped: Piped) -> list[list[str]]:
    """One line per collective and axis, over all stages that perform it: from the least to the most."""
    plan = piped.plan
    found: dict[tuple[str, str], list[tuple[int, int, float, str, float]]] = {}
    for number in range(len(plan.stages)):
        done = piped.communication(number)
        links = {axis.name: axis for axis in plan.meshes[number].axes}
        for flow in piped.flows(number):
            times, size = done[flow.collective, flow.axis]
            line = (times, size, flow.bytes, RECEIVERS[flow.to], links[flow.axis].bandwidth)
            found.setdefault((flow.collective, flow.axis), []).append(line)

    def span(texts: Sequence[str]) -> str:
        return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"

    rows = []
    for (kind, axis), lines in found.items():
        several = f" ({len(lines)} stages)" if len(lines) > 1 else ""
        ordered = sorted(lines, key=lambda line: line[1])
        rows.append(
            [
                f"{escape(kind.replace('_', '-'))} over {escape(axis)}{several}",
                span([str(times) for times in sorted(line[0] for line in lines)]),
                span([bytes_text(line[1]) for line in ordered]),
                f"{span([bytes_text(line[2]) for line in ordered])} to {ordered[0][3]}",
                f"{bytes_text(ordered[0][4])}/s",
            ]
        )
    return rows


def _parcels(piped: Piped) -> list[list[str]]:
    """One line per pair of neighbours: values onwards, gradients back."""
    owner = {rank: device for device in range(len(set(piped.device_of))) for rank in piped.ranks(device)}
    sent: dict[tuple[int, int], float] = {}
    for (source, target), amount in piped.parcels.items():
        pair = owner[source], owner[target]
        sent[pair] = sent.get(pair, 0.0) + amount
    rows = []
    for first, second in sorted({(min(pair), max(pair)) for pair in sent}):
        onwards, back = sent.get((first, second), 0.0), sent.get((second, first), 0.0)
        each = onwards / len(piped.ranks(first)) + back / len(piped.ranks(second))
        rows.append(
            [
                f"stages {_numbers(piped, first)} and {_numbers(piped, second)}",
                data(f"sent {first} {second}", onwards, bytes_text(onwards)),
                data(f"sent {second} {first}", back, bytes_text(back)),
                bytes_text(each),
            ]
        )
    return rows


def _numbers(piped: Piped, device: int) -> str:
    return ", ".join(map(str, piped.stages(device)))


def what_if_numbers(piped: Piped) -> Sequence[tuple[str, str]]:
    """Names and labels of the numbers that sliders change."""
    return [
        ("order", "order of the passes"),
        ("bubble", "bubbles"),
        ("makespan", "until the last pass ends"),
        ("peak_bytes", "memory of the fullest device"),
        ("sent_bytes", "sent to other stages by the busiest rank"),
        *((f"busy stage {number}", f"stage {number} busy") for number in range(len(piped.plan.stages))),
    ]
