"""``shardwright report``: a plan as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import console, progress


def report(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the picture")] = Path("plan.svg"),
    model: ModelOption = None,
    trust: TrustOption = False,
) -> None:
    """Draw PLAN: its candidates side by side, and what every operator cuts on each mesh axis.

    Example: shardwright report plan.json -o plan.svg
    """
    from shardwright.files import check_writable, write
    from shardwright.planner import describe_graph
    from shardwright.reports import picture

    check_writable(output)
    with progress() as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
    described = describe_graph(graph)
    write(output, picture(loaded, graph, dict(described.rules), described.labels))
    console.print(f"written to {output}")
