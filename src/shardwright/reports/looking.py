"""From Python what the commands do with a plan's file: its step in simulation, and its page or picture."""

from __future__ import annotations

from pathlib import Path

from shardwright.errors import ShardwrightError
from shardwright.files import check_writable, write
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.simulator import Timeline, simulate_plan

KINDS = (".html", ".svg", ".pdf")


def simulate(plan: Plan, *, graph: Graph | None = None) -> Timeline:
    """One training step of a plan in simulation, on all kinds of its ranks.

    >>> shardwright.simulate(plan).seconds                                        # doctest: +SKIP
    """
    return simulate_plan(plan, plan.graph() if graph is None else graph)


def report(plan: Plan, path: str | Path, *, graph: Graph | None = None) -> None:
    """Write a plan's page (``.html``) or its picture (``.svg``, ``.pdf``).

    >>> shardwright.report(plan, "plan.html")                                     # doctest: +SKIP
    """
    from shardwright.planner import describe_graph
    from shardwright.reports.page import plan_page
    from shardwright.reports.picture import picture

    path = Path(path)
    if path.suffix not in KINDS:
        raise ShardwrightError(f"A report cannot be written as {path.name!r}.", f"End its name in {', '.join(KINDS)}.")
    check_writable(path)
    graph = plan.graph() if graph is None else graph
    if path.suffix == ".html":
        write(path, plan_page(plan, graph, file=path.name))
        return
    described = describe_graph(graph)
    drawing = picture(plan, graph, described.rules, described.labels)
    write(path, drawing.svg() if path.suffix == ".svg" else drawing.pdf())
