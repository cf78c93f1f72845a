"""``shardwright explain``: why a plan is as it is, or what fills its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli._memory import explain_memory
from shardwright.cli._plans import ModelOption, TrustOption, load_with_graph
from shardwright.cli._program import explain_program
from shardwright.cli._show import progress
from shardwright.cli._step import print_step
from shardwright.cli._why import explain_operator, explain_plan


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan written by `shardwright plan … -o plan.json`")],
    operator: Annotated[
        str | None, typer.Argument(help="An operator by name, module path or pattern: its options and their prices")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory and the largest things alive then")] = False,
    program: Annotated[bool, typer.Option("--program", help="What one rank does in one step, line by line")] = False,
    rank: Annotated[int, typer.Option(help="With --program: whose")] = 0,
    model: ModelOption = None,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Explain PLAN: how every operator is split, why one is split as it is, what fills the memory, what a rank does.

    Example: shardwright explain plan.json --memory

    Of several passes: every stage with its bubble, exposed communication and memory too.

    What rank 3 does in one step, instruction by instruction: shardwright explain plan.json --program --rank 3
    """
    from shardwright.reports.steps import PlanStep, several_passes

    with progress(as_json) as say:
        say("reading the plan")
        loaded, graph = load_with_graph(plan, model, trust)
    if memory:
        explain_memory(loaded, graph, as_json)
    elif program:
        explain_program(loaded, graph, rank, as_json)
    elif operator is not None:
        explain_operator(loaded, graph, operator, as_json)
    else:
        if not as_json and several_passes(loaded):
            print_step(PlanStep.of(loaded, graph), width=120)
        explain_plan(loaded, graph, as_json)
