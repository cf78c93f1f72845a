"""What the sections of a plan's page say without a script: every stage, and every group of ranks that does the same."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.reports.html import asset, breakable, data, escape, legend_item, table
from shardwright.reports.page_data import BETWEEN
from shardwright.reports.steps import PlanStep, rank_word, several_passes
from shardwright.reports.summary import StepWork, memory_gauge
from shardwright.reports.traffic import RECEIVERS
from shardwright.simulator.peaks import peak_of
from shardwright.units import bytes_text, seconds_text

_CANVAS = """<ul class="legend"></ul><div class="plot"><canvas tabindex="0" role="application" aria-label="Memory over time.
Left and right arrow tell what is alive then, plus and minus zoom."></canvas></div><p class="said" aria-live="polite"></p>"""


def timeline_section(step: PlanStep) -> str:
    passes = ""
    if several_passes(step.plan):
        passes = (
            "Above, the passes: a number is a micro-batch, what is left open is a bubble. Below, the streams of one kind "
            "of rank, event by event. "
        )
    return (
        f'<p class="hint">One step of every kind of rank. {passes}Drag to move, Ctrl and '
        "the wheel (or two fingers) to zoom; point at a bar for what it is, how long it takes and what it waits for.</p>"
        + _choice(step, "Streams of")
        + asset("timeline.html")
        + _stages_table(step)
        + _streams_table(step)
    )


def _stages_table(step: PlanStep) -> str:
    """One line per stage: where it runs, how long it works and idles, what it holds."""
    rows = []
    for number, (stage, p) in enumerate(zip(step.plan.stages, step.timeline.stages, strict=True)):
        rows.append(
            [
                f"stage {number}",
                rank_word(stage.ranks),
                escape(" × ".join(f"{name} {size}" for name, size in stage.strategy.axes)),
                str(len(stage.operators)),
                data(f"busy stage {number}", p.busy_seconds, seconds_text(p.busy_seconds)),
                data(f"bubble stage {number}", p.bubble, f"{100 * p.bubble:.1f} %"),
                data(f"exposed stage {number}", p.exposed_seconds, seconds_text(p.exposed_seconds)),
                data(f"memory stage {number}", p.memory_bytes, bytes_text(p.memory_bytes)),
            ]
        )
    columns = ["stage", "ranks", "mesh", "operators", "busy", "bubble", "exposed", "memory of a device"]
    return table("Stages", columns, rows, tight=True)


def _streams_table(step: PlanStep) -> str:
    rows = []
    for group, rank in enumerate(step.timeline.ranks):
        for stream, busy in rank.load.items():
            share = f"{100 * rank.utilisation[stream]:.1f} %"
            seconds = data(f"busy {group} {stream}", busy, seconds_text(busy))
            rows.append([escape(step.title(group)), escape(stream), seconds, share])
    return table("How busy every stream is", ["ranks", "stream", "busy", "share of the step"], rows, tight=True)


def memory_section(step: PlanStep, limit: float) -> str:
    """The peak of every kind of rank, and what is alive then on the one that holds most."""
    timeline, rows = step.timeline, []
    for group in step.groups:
        needed = timeline.memory[group]
        mine = [timeline.stage(stage).bytes for stage in step.stages(group)]
        rows.append(
            [
                escape(step.title(group)),
                data(f"peak_bytes {group}", needed, bytes_text(needed)),
                f"{100 * needed / limit:.0f} %",
                bytes_text(sum(one.resting for one in mine)),
                bytes_text(sum(one.kept for one in mine)),
                bytes_text(sum(one.held for one in mine)),
                bytes_text(max(one.working for one in mine)),
            ]
        )
    worst = max(step.groups, key=lambda group: timeline.memory[group])
    peak = peak_of(timeline, worst)
    largest = [[escape(one.what), breakable(one.module), bytes_text(one.bytes)] for one in peak.largest]
    whose = f" on {step.title(worst)}" if len(step.groups) > 1 else ""
    columns = ["ranks", "peak", "of the limit", "at rest", "gradients", "held per micro-batch", "more inside a pass"]
    return (
        f'<p class="hint">Peak {data("peak_bytes", peak.needed, bytes_text(peak.needed))} of {bytes_text(limit)}'
        f"{escape(whose)}, during {escape(peak.during)}; {escape(peak.told(bytes_text))} The curve shows the bytes alive, "
        "without the allocator's rounding.</p>"
        + memory_gauge(peak.breakdown, limit)
        + _choice(step, "Memory of")
        + _CANVAS
        + table("The peak of every kind of rank", columns, rows, tight=True)
        + table("The largest things alive at the peak", ["what", "module", "bytes"], largest)
    )


def _choice(step: PlanStep, label: str) -> str:
    if len(step.groups) == 1:
        return ""
    options = "".join(f'<option value="{group}">{escape(step.title(group))}</option>' for group in step.groups)
    return f'<div class="tools"><label>{escape(label)} <select class="group">{options}</select></label></div>'


def communication_section(step: PlanStep) -> str:
    plan, inside, between = step.plan, _collectives(step), _parcels(step)
    if not inside and not between:
        return "<p>Nothing is sent between ranks.</p>"
    used = {name for stage in plan.stages for name, size in stage.strategy.axes if size > 1} | (
        {BETWEEN} if between else set()
    )
    names = [*dict.fromkeys(name for stage in plan.stages for name, _ in stage.strategy.axes), BETWEEN]
    legend = "".join(
        legend_item(f"axis-{place % 5}", name if name == BETWEEN else f"over {name}")
        for place, name in enumerate(names)
        if name in used
    )
    heads = ["collective", "times", "bytes", "seconds", "sends", "rate of the link"]
    pairs = ["between", "values", "gradients", "of each rank, both ways"]
    handed = " and stages hand values and gradients on" if between else ""
    return (
        '<p class="hint">What every rank sends to every other in one step, as the collectives\' algorithms send it (rings, '
        f"exchanges){handed}; a stronger colour is more.</p>"
        f'<ul class="legend">{legend}</ul><div class="beside"><div><div class="plot">'
        '<canvas class="matrix" tabindex="0" role="application" '
        'aria-label="Matrix of who sends to whom. Arrow keys walk through it."></canvas></div>'
        '<p class="said" aria-live="polite"></p></div><div>'
        + (table("Collectives of one rank in one step", heads, inside) if inside else "")
        + (table("What stages hand on in one step", pairs, between) if between else "")
        + "</div></div>"
    )


def _collectives(step: PlanStep) -> list[list[str]]:
    """One line per collective and axis, over all stages that perform it: from the least to the most."""
    found: dict[tuple[str, str], list[tuple[int, int, float, float, str, float]]] = {}
    for number, mesh in enumerate(step.plan.meshes):
        done, links = step.communication(number), {axis.name: axis for axis in mesh.axes}
        for flow in step.flows(number):
            times, size, seconds = done[flow.collective, flow.axis]
            line = (times, size, seconds, flow.bytes, RECEIVERS[flow.to], links[flow.axis].bandwidth)
            found.setdefault((flow.collective, flow.axis), []).append(line)

    def span(texts: Sequence[str]) -> str:
        return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"

    rows = []
    for (kind, axis), lines in found.items():
        several = f" ({len(lines)} stages)" if len(lines) > 1 else ""
        lines.sort(key=lambda line: line[1])
        rows.append(
            [
                f"{escape(kind.replace('_', '-'))} over {escape(axis)}{several}",
                span([str(times) for times in sorted(line[0] for line in lines)]),
                data(f"bytes {kind} {axis}", lines[-1][1], span([bytes_text(line[1]) for line in lines])),
                span([seconds_text(seconds) for seconds in sorted(line[2] for line in lines)]),
                f"{span([bytes_text(line[3]) for line in lines])} to {lines[0][4]}",
                f"{bytes_text(lines[0][5])}/s",
            ]
        )
    return rows


def _parcels(step: PlanStep) -> list[list[str]]:
    """One line per pair of neighbours: values onwards, gradients back."""
    owner = {rank: group for group in step.groups for rank in step.ranks(group)}
    sent: dict[tuple[int, int], float] = {}
    for (source, target), amount in step.parcels.items():
        pair = owner[source], owner[target]
        sent[pair] = sent.get(pair, 0.0) + amount
    rows = []
    for first, second in sorted({(min(pair), max(pair)) for pair in sent}):
        onwards, back = sent.get((first, second), 0.0), sent.get((second, first), 0.0)
        each = onwards / len(step.ranks(first)) + back / len(step.ranks(second))
        rows.append(
            [
                " and ".join(", ".join(map(str, step.stages(group))) for group in (first, second)),
                data(f"sent {first} {second}", onwards, bytes_text(onwards)),
                data(f"sent {second} {first}", back, bytes_text(back)),
                bytes_text(each),
            ]
        )
    return [[f"stages {name}", *cells] for name, *cells in rows]


def what_if_section(step: PlanStep, work: StepWork | None, price: float | None) -> str:
    """Sliders, the step at these settings, and what one change would give."""
    plan = step.plan
    passes = [("order", "order of the passes")] if several_passes(plan) else []
    if len(step.groups) > 1:
        passes += [
            ("bubble", "bubbles"),
            ("makespan", "until the last pass ends"),
            ("sent_bytes", "sent to other stages by the busiest rank"),
        ]
        busy = [(f"busy stage {number}", f"stage {number} busy") for number in range(len(plan.stages))]
    else:
        busy = [(f"busy 0 {stream}", f"{stream} busy") for stream in step.timeline.ranks[0].load]
    told = [
        ("step_seconds", "one step"),
        ("ratio", "against the plan"),
        *([("rate", "rate")] if work is not None else []),
        *([("cost", "cost")] if work is not None and price is not None else []),
        *passes,
        ("exposed_seconds", "communication nothing hides"),
        ("sum_seconds", "sum of all events of a rank"),
        ("lower_bound_seconds", "no schedule of a rank's events is shorter than"),
        ("peak_bytes", "memory of the fullest device"),
        *busy,
    ]
    rows = [[escape(label), f'<output data-number="{escape(name)}"></output>'] for name, label in told]
    return (
        '<p class="hint">The same plan on other hardware: the step is simulated again, here, with every event\'s seconds '
        "stretched by what they depend on. Another number of micro-batches has the same recipe's order, or the fastest of "
        "the known ones where the plan's was searched for.</p>"
        '<div class="controls"></div><div class="tools"><button type="button" class="reset">Back to the plan</button></div>'
        + table("The step at these settings", ["what", "now"], rows)
        + '<p class="hint">The command that gives the same numbers:</p><code class="command" tabindex="0"></code>'
        '<div class="sensitivity">' + table("What one change would give", ["what", "step", "change"], []) + "</div>"
    )
