"""The page: one offline HTML file that shows a plan, and answers what-if questions by simulating it again in the browser.

What can be said without a script (the summary, communication, trust, the peak of memory) is written here as HTML; what moves
is drawn by the scripts under ``assets/`` from the data the page carries, packed by :mod:`~shardwright.reports.page_data`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwright.graph import Graph
from shardwright.planner import describe_graph
from shardwright.planner.advising import Advice
from shardwright.plans import Plan
from shardwright.reports.cuts import MEANING
from shardwright.reports.explaining import why_rows
from shardwright.reports.html import asset, data, escape, filled, legend_item, script, table
from shardwright.reports.in_words import summary_of
from shardwright.reports.measured import compare, measured_html, packed_measured
from shardwright.reports.page_data import deflated, packed_plan, packed_traffic
from shardwright.reports.sections import communication_section, memory_section, timeline_section, what_if_section
from shardwright.reports.splitting import split_rows
from shardwright.reports.steps import PlanStep, told_by
from shardwright.reports.summary import summary, work_of
from shardwright.reports.traces import Trace
from shardwright.reports.trust import trust
from shardwright.search.limits import limit_of
from shardwright.units import bytes_text, seconds_text

SCRIPTS = (
    "common.js",
    "simulate.js",
    "timeline.js",
    "groups.js",
    "memory.js",
    "split.js",
    "traffic.js",
    "why.js",
    "whatif.js",
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
    advice: Sequence[Advice] = (),
) -> str:
    """The page of a plan as one HTML document.

    ``price`` is that of one device for an hour; ``why_seconds`` bounds the searches for alternatives; ``verified`` is what
    ``shardwright verify --json`` said, ``traces`` a recorded step (:func:`~shardwright.reports.traces.read_traces`),
    ``advice`` what could be changed (:func:`~shardwright.planner.advising.advise`).

    >>> page = plan_page(plan, graph)
    """
    step, work = PlanStep.of(plan, graph), work_of(graph)
    limit = limit_of(plan.meshes[0].device, plan.asked.memory_limit)
    measured = compare(step, traces) if traces else None
    split, why = _decided(step, why_seconds)
    carried = {
        "devices": plan.devices,
        "step": packed_plan(step, why_seconds),
        "split": split,
        "traffic": packed_traffic(step),
        "why": why,
        "measured": measured and packed_measured(measured),
        "file": file,
        "limit": limit,
        "work": work and asdict(work),
        "price": price,
        "meanings": MEANING,
    }
    content = {
        "glance": f"<p>{escape(' '.join(summary_of(plan, graph)))}</p>" + summary(told_by(step, limit), work, price),
        "split": _split(),
        "timeline": timeline_section(step) + ("" if measured is None else measured_html(step, measured)),
        "memory": memory_section(step, limit),
        "communication": communication_section(step),
        "why": _WHY,
        "what-if": what_if_section(step, work, price) + _advice(advice),
        "trust": trust(plan, graph, describe_graph(graph).rules, verified),
    }
    banner = (
        '<div class="banner" role="status" hidden><span>Timeline and memory show a what-if, not the plan.</span>'
        '<button type="button">Back to the plan</button></div>'
    )
    body = banner + "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>{content[name]}</section>'
        for name, title in SECTIONS.items()
    )
    found = plan.search if plan.search != "auto" else "found by search"
    under = f"{plan.devices} devices as {step.shape} · {found}"
    return document(f"{plan.model or 'model'} on {plan.cluster.name}", under, SECTIONS, body, carried)


def _decided(step: PlanStep, why_seconds: float) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """How every stage is split, and for the operators that cost most what else there was."""
    rows: list[dict[str, Any]] = []
    why: dict[str, list[dict[str, Any]]] = {}
    for number, (plan, graph) in enumerate(step.parts):
        described = describe_graph(graph)
        rows += [{**row, "stage": number} for row in split_rows(plan, graph, described.rules, described.labels)]
        found = why_rows(plan, graph, described, why_seconds / len(step.parts))
        why |= {name: options for name, options in found.items() if name not in why}
    return rows, why


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


def _advice(advice: Sequence[Advice]) -> str:
    """What the user could change, a row for each, with what it gives."""
    if not advice:
        return ""
    rows = [
        [
            escape(one.change),
            data(f"gain {one.kind} {place}", one.gain, f"{100 * one.gain:.1f} %"),
            seconds_text(one.step_seconds),
            bytes_text(one.memory_bytes) + ("" if one.fits else ", too much"),
        ]
        for place, one in enumerate(advice)
    ]
    columns = ["change", "fewer seconds a row", "step then", "memory then"]
    return table("What is yours to change, simulated under this plan", columns, rows)


def _split() -> str:
    legend = "".join(legend_item(f"cut-{cut.replace(' ', '-')}", meaning) for cut, meaning in MEANING.items())
    return filled("split.html", legend=legend)


_WHY = """<p class="hint">An operator's other options, and what the whole model would take at best with each of them.</p>
<div class="tools"><label>Operator <select></select></label></div><div class="answer"></div>"""
