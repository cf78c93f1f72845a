"""What ``shardwright explain --memory`` says: the peak of a plan's memory, when it is, and what makes it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.cli._show import bytes_text, print_json, table

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def explain_memory(plan: Plan, graph: Graph, as_json: bool) -> None:
    """The peak per kind of content, and the ten largest things alive at it with their module paths."""
    from shardwright.simulator import simulate_plan

    timeline = simulate_plan(plan, graph)
    use, moment = timeline.stage().memory, timeline.stage().events[timeline.stage().memory.at]
    limit = plan.meshes[0].device.usable_memory
    if as_json:
        print_json(
            {
                "peak_bytes": use.needed,
                "allocated_bytes": use.peak,
                "reserved_bytes": use.reserved,
                "usable_bytes": limit,
                "at": {"event": moment.name, "phase": moment.phase, "module": moment.module},
                "breakdown": use.breakdown,
                "largest": [{"bytes": size, "what": what, "module": module} for size, what, module in use.largest],
                "curve": use.curve,
            }
        )
        return
    during = f"{moment.phase} of {moment.name}" if moment.kind != "update" else f"the {moment.name} update"
    where = f" ({moment.module})" if moment.module else ""
    total = sum(use.breakdown.values())
    kinds = sorted(use.breakdown.items(), key=lambda item: -item[1])
    table(
        f"Peak {bytes_text(use.needed)} of {bytes_text(limit)} per device, during {during}{where}",
        ["kind", "bytes", "share"],
        [[kind, bytes_text(size), f"{100 * size / total:.1f} %"] for kind, size in kinds],
        use.told(bytes_text).capitalize(),
    )
    table(
        "The largest things alive then",
        ["what", "module", "bytes"],
        [[what, module, bytes_text(size)] for size, what, module in use.largest],
    )
