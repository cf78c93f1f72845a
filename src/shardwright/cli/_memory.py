"""What ``shardwright explain --memory`` says: the peak of every kind of rank, when it is, and what makes it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.cli._show import bytes_text, print_json, table

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def explain_memory(plan: Plan, graph: Graph, as_json: bool) -> None:
    """Per kind of rank its peak; of the fullest the kinds of content then, and the ten largest things with their modules."""
    from shardwright.reports.peaks import peak_of
    from shardwright.reports.steps import PlanStep

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
