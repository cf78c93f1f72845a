"""``shardwright explain``: why a plan is as it is, or what fills its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._memory import explain_memory
from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._show import progress
from shardwright.cli._why import explain_operator, explain_plan


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    operator: Annotated[
        str | None, typer.Argument(help="An operator by name, module path or pattern: its options and their prices")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory and the largest things alive then")] = False,
    model: ModelOption = None,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Explain PLAN: how every operator is split, why one is split as it is, or what fills the memory.

    Example: shardwright explain plan.json --memory
    """
    with progress(as_json) as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
    if memory:
        explain_memory(loaded, graph, as_json)
    elif operator is not None:
        explain_operator(loaded, graph, operator, as_json)
    else:
        explain_plan(loaded, graph, as_json)
