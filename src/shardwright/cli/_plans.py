"""What commands that take a ``plan.json`` share: the plan, and the graph of the model it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import PlanError

if TYPE_CHECKING:
    from shardwright.graph import Graph
    from shardwright.plans import Plan


def load_with_graph(path: Path) -> tuple[Plan, Graph]:
    """Read a plan, build its model again from the reference it carries, capture it and check that both agree."""
    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.zoo.reference import resolve

    plan = Plan.load(path)
    if not plan.model:
        raise PlanError(
            f"The plan {str(path)!r} was made from Python objects and does not say which model it is for.",
            "Make it with `shardwright plan MODEL …`, or work with it from Python.",
        )
    resolved = resolve(plan.model, batch=plan.batch, seq=plan.sequence, dtype=plan.dtype)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    plan.check(graph)
    return plan, graph
