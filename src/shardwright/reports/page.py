"""The page: one offline HTML file that shows a plan, and answers what-if questions by simulating it again in the browser.

What can be said without a script (the glance, communication, trust, the peak of memory) is written here as HTML; what moves
is drawn by the scripts under ``assets/`` from the data the page carries, packed by :mod:`~shardwright.reports.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwright.cluster import Mesh
from shardwright.graph import Graph
from shardwright.planner import describe_graph
from shardwright.plans import Plan
from shardwright.reports import pipeline_page
from shardwright.reports.cuts import MEANING
from shardwright.reports.glance import Work, glance, memory_gauge, work_of
from shardwright.reports.html import asset, breakable, data, escape, filled, legend_item, script, table
from shardwright.reports.measured import Measured, compare_with, measured_html, packed_measured
from shardwright.reports.measured_pipeline import compare_pipeline, packed, pipeline_html
from shardwright.reports.packing import axes_of, deflated, packed_step
from shardwright.reports.pipelined import Piped, simulated_prediction
from shardwright.reports.splitting import split_rows
from shardwright.reports.steps import RankStep, rank_steps
from shardwright.reports.traces import Trace
from shardwright.reports.traffic import RECEIVERS, Flow, flows
from shardwright.reports.trust import trust
from shardwright.reports.why import why_rows
from shardwright.search.limits import limit_of
from shardwright.search.strategies import Described
from shardwright.units import bytes_text, seconds_text

SCRIPTS = (
    "common.js",
    "simulate.js",
    "pipeline.js",
    "timeline.js",
    "memory.js",
    "split.js",
    "traffic.js",
    "why.js",
    "whatif.js",
    "pipelined.js",
    "page.js",
)
SECTIONS = {
    "glance": "At a glance",
    "split": "How it is split",
    "timeline": "Timeline",
    "memory": "Memory over time",
    "communication": "Communication",
    "why": "Why",
    "what-if": "What if",
    "trust": "Trust",
}
WHY_SECONDS = 20.0


def plan_page(
    plan: Plan,
    graph: Graph,
    *,
    file: str = "plan.json",
    price: float | None = None,
    why_seconds: float = WHY_SECONDS,
    verified: Mapping[str, Any] | None = None,
    traces: Sequence[Trace] = (),
) -> str:
    """The page of a plan as one HTML document.

    ``price`` is that of one device for an hour; ``why_seconds`` bounds the searches for alternatives; ``verified`` is what
    ``shardwright verify --json`` said, ``traces`` a recorded step (:func:`~shardwright.reports.traces.read_traces`).

    >>> page = plan_page(plan, graph)
    """
    described, work = describe_graph(graph), work_of(graph)
    limit = limit_of(plan.meshes[0].device, plan.asked.memory_limit)
    piped = Piped.of(plan, graph) if not plan.whole else None
    shown = plan if piped is None else simulated_prediction(plan, piped.timeline, limit)
    if piped is None:
        carried, content, under = _one_mesh(plan, graph, described, why_seconds, limit, traces, work, price)
    else:
        carried, content, under = _stages(piped, why_seconds, limit, traces, work, price)
    carried |= {"file": file, "limit": limit, "work": work and asdict(work), "price": price, "meanings": MEANING}
    content |= {
        "glance": glance(shown, work, price),
        "split": _split(),
        "why": _WHY,
        "trust": trust(plan, graph, described.rules, verified),
    }
    banner = (
        '<div class="banner" role="status" hidden><span>Timeline and memory show a what-if, not the plan.</span>'
        '<button type="button">Back to the plan</button></div>'
    )
    body = banner + "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>{content[name]}</section>'
        for name, title in SECTIONS.items()
    )
    return document(f"{plan.model or 'model'} on {plan.cluster.name}", under, SECTIONS, body, carried)


Parts = tuple[dict[str, Any], dict[str, str], str]
"""What the scripts read, the sections' HTML by name, and the line below the title."""


def _one_mesh(
    plan: Plan,
    graph: Graph,
    described: Described,
    why_seconds: float,
    limit: float,
    traces: Sequence[Trace],
    work: Work | None,
    price: float | None,
) -> Parts:
    """A plan whose ranks all do the same."""
    steps, mesh = rank_steps(plan, graph), plan.meshes[0]
    sent = flows(steps[0].communication, mesh)
    measured = compare_with(steps[0], graph, traces[0]) if traces else None
    axes = axes_of(plan.stages[0].strategy)
    block = {"ranks": list(range(mesh.devices)), "axes": axes, "flows": [asdict(flow) for flow in sent]}
    carried = {
        "axes": axes,
        "devices": mesh.devices,
        "steps": [packed_step(step) for step in steps],
        "split": split_rows(plan, graph, described.rules, described.labels),
        "traffic": {"ranks": mesh.devices, "names": [axis.name for axis in mesh.axes], "blocks": [block], "pairs": []},
        "why": why_rows(plan, graph, described, why_seconds),
        "measured": measured and packed_measured(measured),
    }
    numbers = [
        ("exposed_seconds", "communication nothing hides"),
        ("sum_seconds", "sum of all events"),
        ("lower_bound_seconds", "no schedule of these events is shorter than"),
        *((f"busy {stream}", f"{stream} busy") for stream in steps[0].streams),
    ]
    content = {
        "timeline": _timeline(steps, measured),
        "memory": _memory(steps, limit),
        "communication": _communication(steps[0], sent, mesh),
        "what-if": _what_if(numbers, work, price, "with every event's seconds stretched by what they depend on"),
    }
    names = " × ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
    found = plan.search if plan.search != "auto" else "found by search"
    return carried, content, f"{plan.stages[0].strategy.devices} devices as {names} · {found}"


def _stages(
    piped: Piped,
    why_seconds: float,
    limit: float,
    traces: Sequence[Trace],
    work: Work | None,
    price: float | None,
) -> Parts:
    """A pipeline."""
    measured = compare_pipeline(piped, traces) if traces else None
    content = {
        "timeline": pipeline_page.timeline_section(piped)
        + ("" if measured is None else pipeline_html(piped, measured)),
        "memory": pipeline_page.memory_section(piped, limit),
        "communication": pipeline_page.communication_section(piped),
        "what-if": _what_if(
            pipeline_page.what_if_numbers(piped),
            work,
            price,
            "every stage's events and then all passes in their order; another number of micro-batches has the same recipe's "
            "order, or the fastest of the known ones where the plan's was searched for",
        ),
    }
    carried = pipeline_page.carried(piped, why_seconds)
    carried["measured"] = measured and packed(piped, measured)
    return carried, content, pipeline_page.under(piped)


def document(title: str, under: str, sections: Mapping[str, str], body: str, carried: Mapping[str, Any]) -> str:
    """The frame all pages share: styles and scripts inline, nothing fetched from anywhere."""
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in sections.items())
    return filled(
        "frame.html",
        title=escape(title),
        heading=escape(title).replace(",", ",<wbr>"),
        under=escape(under),
        links=links,
        body=body,
        style=asset("page.css"),
        data=deflated(carried),
        script=script(SCRIPTS),
    )


def _split() -> str:
    legend = "".join(legend_item(f"cut-{cut.replace(' ', '-')}", meaning) for cut, meaning in MEANING.items())
    return filled("split.html", legend=legend)


def _timeline(steps: Sequence[RankStep], measured: Measured | None) -> str:
    step = steps[0]
    busy = [
        [
            escape(stream),
            data(f"busy {stream}", busy, seconds_text(busy)),
            f"{100 * busy / max(step.seconds, 1e-30):.1f} %",
        ]
        for stream, busy in step.busy.items()
    ]
    return (
        f'<p class="hint">One step of {escape(step.title)}. Drag to move, Ctrl and the wheel (or two fingers) to zoom; '
        "point at a bar for what it is, how long it takes and what it waits for.</p>"
        + asset("timeline.html")
        + table("How busy every stream is", ["stream", "busy", "share of the step"], busy)
        + ("" if measured is None else measured_html(measured, step.seconds))
    )


def _memory(steps: Sequence[RankStep], limit: float) -> str:
    use, events = steps[0].memory, steps[0].events
    moment = events[use.at] if events else None
    during = (
        ""
        if moment is None
        else f", during {moment.phase} of {moment.name}" + (f" ({moment.module})" if moment.module else "")
    )
    largest = [[escape(what), breakable(module), bytes_text(size)] for size, what, module in use.largest]
    return (
        f'<p class="hint">Peak {data("peak_bytes", use.needed, bytes_text(use.needed))} of {bytes_text(limit)}'
        f"{escape(during)}; {use.told(bytes_text)} The curve shows the bytes alive, without the allocator's rounding.</p>"
        + memory_gauge(use.breakdown, limit)
        + """<ul class="legend"></ul><div class="plot"><canvas tabindex="0" role="application" aria-label="Memory over time.
Left and right arrow tell what is alive then, plus and minus zoom."></canvas></div><p class="said" aria-live="polite"></p>"""
        + table("The largest things alive at the peak", ["what", "module", "bytes"], largest)
    )


def _communication(step: RankStep, sent: Sequence[Flow], mesh: Mesh) -> str:
    if not sent:
        return "<p>Nothing is sent between ranks.</p>"
    links = {axis.name: axis for axis in mesh.axes}
    seconds: dict[tuple[str, str], float] = {}
    for event in step.events:
        if event.collective:
            key = (event.collective, event.stream)
            seconds[key] = seconds.get(key, 0.0) + event.seconds
    rows = []
    for flow in sent:
        times, size = step.communication[flow.collective, flow.axis]
        rows.append(
            [
                f"{escape(flow.collective.replace('_', '-'))} over {escape(flow.axis)}",
                str(times),
                data(f"bytes {flow.collective} {flow.axis}", size, bytes_text(size)),
                seconds_text(seconds.get((flow.collective, flow.axis), 0.0)),
                f"{bytes_text(flow.bytes)} to {RECEIVERS[flow.to]}",
                f"{bytes_text(links[flow.axis].bandwidth)}/s",
            ]
        )
    legend = "".join(
        legend_item(f"axis-{a % 4}", f"over {axis.name}") for a, axis in enumerate(mesh.axes) if axis.size > 1
    )
    return (
        '<p class="hint">What every rank sends to every other in one step, as the collectives\' algorithms send it (rings, '
        "exchanges); a stronger colour is more.</p>"
        f'<ul class="legend">{legend}</ul><div class="beside"><div><div class="plot">'
        '<canvas class="matrix" tabindex="0" role="application" '
        'aria-label="Matrix of who sends to whom. Arrow keys walk through it."></canvas></div>'
        '<p class="said" aria-live="polite"></p></div><div>'
        + table(
            "Collectives of one rank in one step",
            ["collective", "times", "bytes", "seconds", "sends", "rate of the link"],
            rows,
        )
        + "</div></div>"
    )


_WHY = """<p class="hint">An operator's other options, and what the whole model would take at best with each of them.</p>
<div class="tools"><label>Operator <select></select></label></div><div class="answer"></div>"""


def _what_if(numbers: Sequence[tuple[str, str]], work: Work | None, price: float | None, how: str) -> str:
    told = [
        ("step_seconds", "one step"),
        ("ratio", "against the plan"),
        *([("rate", "rate")] if work is not None else []),
        *([("cost", "cost")] if work is not None and price is not None else []),
        *numbers,
    ]
    rows = [[escape(label), f'<output data-number="{escape(name)}"></output>'] for name, label in told]
    return (
        f'<p class="hint">The same plan on other hardware: the step is simulated again, here, {escape(how)}.</p>'
        '<div class="controls"></div><div class="tools"><button type="button" class="reset">Back to the plan</button></div>'
        + table("The step at these settings", ["what", "now"], rows)
        + '<p class="hint">The command that gives the same numbers:</p><code class="command" tabindex="0"></code>'
        '<div class="sensitivity">' + table("What one change would give", ["what", "step", "change"], []) + "</div>"
    )
