"""What commands that take a ``plan.json`` share: the plan, and the graph of the model it was made for.

The graph is the one the plan holds. Nothing that a plan merely names is run: a Python file only when a person names it
(``--model``) or says that the plan is to be trusted (``--trust``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.errors import PlanError

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan
    from shardwright.zoo.reference import ResolvedModel

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Build this model instead of using the graph that the plan holds")
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run the Python file the plan names; for plans from people you trust")
]


def load_with_graph(path: Path, model: str | None = None, trust: bool = False) -> tuple[Plan, Graph]:
    """A plan and its graph, checked against each other."""
    from shardwright.frontend import capture
    from shardwright.plans import Plan

    plan = Plan.load(path)
    if model is None and not (trust and plan.model) and (plan.captured is not None or not plan.model):
        return plan, plan.graph(trusted=trust)
    resolved = build_model(plan, model, trust)
    plan.check_parameters(resolved.model.named_parameters(remove_duplicate=False))
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    plan.check(graph)
    return plan, graph


def build_model(
    plan: Plan,
    model: str | None = None,
    trust: bool = False,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    inference: bool = False,
    cache: int = 0,
) -> ResolvedModel:
    """The model a person names, or the one the plan does, where building that runs none but our own code."""
    from shardwright.zoo.reference import FILE_FUNCTION, resolve

    if model is None:
        if not plan.model:
            raise PlanError("The plan was made from Python objects and names no model.", "Give it: --model MODEL.")
        if FILE_FUNCTION.fullmatch(plan.model) and not trust:
            raise PlanError(
                f"The plan names the Python file {plan.model!r}, and a plan alone may not make it run.",
                "Look at that file, then say --trust (or --model with your own).",
            )
    served = plan.serving
    return resolve(
        model or plan.model,
        batch=batch or plan.batch,
        seq=seq or plan.sequence,
        dtype=dtype or plan.dtype,
        inference=inference or served is not None,
        cache=cache or (served.cache if served is not None else 0),
    )
