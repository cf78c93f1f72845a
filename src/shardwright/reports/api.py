"""From Python what the commands do with a plan's file: its step in simulation, and its page or picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.errors import ShardwrightError
from shardwright.files import check_writable, write
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.simulator import Timeline, simulate_plan

if TYPE_CHECKING:
    from shardwright.reports.traces import Trace

KINDS = (".html", ".svg", ".pdf")


def simulate(plan: Plan, *, graph: Graph | None = None) -> Timeline:
    """One training step of a plan in simulation, on all kinds of its ranks.

    >>> shardwright.simulate(plan).seconds                                        # doctest: +SKIP
    """
    return simulate_plan(plan, plan.graph() if graph is None else graph)


def report(
    plan: Plan,
    path: str | Path,
    *,
    graph: Graph | None = None,
    file: str | None = None,
    price: float | None = None,
    why_seconds: float = 20.0,
    verified: Mapping[str, Any] | None = None,
    traces: Sequence[Trace] = (),
) -> None:
    """Write a plan's page (``.html``) or its picture (``.svg``, ``.pdf``).

    The page names the plan's ``file`` in its commands; for the rest see :func:`~shardwright.reports.page.plan_page`.

    >>> shardwright.report(plan, "plan.html")                                     # doctest: +SKIP
    """
    from shardwright.planner.advising import advise
    from shardwright.reports.page import plan_page
    from shardwright.reports.picture import picture

    path = Path(path)
    check_kind(path)
    graph = plan.graph() if graph is None else graph
    if path.suffix == ".html":
        asked: dict[str, Any] = {"price": price, "why_seconds": why_seconds, "verified": verified, "traces": traces}
        asked["advice"] = advise(plan, graph)
        write(path, plan_page(plan, graph, file=file or path.name, **asked))
        return
    drawing = picture(plan, graph)
    write(path, drawing.svg() if path.suffix == ".svg" else drawing.pdf())


def check_kind(path: Path) -> None:
    """Refuse, before any work, a path that no report can be written to."""
    if path.suffix not in KINDS:
        raise ShardwrightError(f"A report cannot be written as {path.name!r}.", f"End its name in {', '.join(KINDS)}.")
    check_writable(path)
