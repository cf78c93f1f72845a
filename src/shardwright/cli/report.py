"""``shardwright report``: a plan as a page to explore, or as a picture for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import console, progress


def report(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="plan.html for the page, plan.svg or plan.pdf for a picture")
    ] = Path("plan.html"),
    price: Annotated[
        float | None, typer.Option(help="Price of one device for an hour: adds the cost per token")
    ] = None,
    why_seconds: Annotated[float, typer.Option(help="Seconds to search for alternatives of operators")] = 20.0,
    verified: Annotated[Path | None, typer.Option(help="What `shardwright verify … --json` printed")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A trace of `shardwright run --profile`: laid over the predicted timeline")
    ] = None,
    model: ModelOption = None,
    trust: TrustOption = False,
) -> None:
    """Show PLAN: timeline, memory, layouts, communication, alternatives and what-ifs in one offline page.

    Example: shardwright report plan.json -o plan.html --price 2.50

    With what a run took: shardwright report plan.json --measured trace.json

    A picture for a paper: shardwright report plan.json -o plan.pdf
    """
    from shardwright.reports.api import check_kind
    from shardwright.reports.api import report as write_report
    from shardwright.reports.traces import read_traces
    from shardwright.reports.trust import read_verification

    check_kind(output)
    said = None if verified is None else read_verification(verified)
    traces = () if measured is None else read_traces(measured)
    with progress() as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
        say("simulating, and asking for alternatives")
        asked: dict[str, Any] = {"price": price, "why_seconds": why_seconds, "verified": said, "traces": traces}
        write_report(loaded, output, graph=graph, file=plan.name, **asked)
    console.print(f"written to {output} ({output.stat().st_size / 1e3:.0f} kB)")
