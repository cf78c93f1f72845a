"""The trade-off curve: step time against memory per device, from the fastest plan to the smallest.

Both ends are searched for themselves: the fastest under the given limit, and the one that needs least, whatever the time.
Between them the same search runs under limits that divide the way evenly (each the same ratio below what the plan before it
uses), and what another plan beats in both respects is left out. So the curve is strictly monotone: every further plan uses
less memory and takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.cluster import Cluster
from shardwright.errors import Infeasible
from shardwright.graph import Graph
from shardwright.planner.joint import Joint
from shardwright.planner.options import Options, Progress
from shardwright.planner.planning import plan_graph
from shardwright.planner.staging import shape_of
from shardwright.plans import Plan
from shardwright.search.conditions import LEAST_MEMORY

RATIO = 0.8
"""How much tighter the next limit is where the smallest plan is not known (a search restricted to one recipe)."""

CLOSE = 0.98
"""Plans closer together in memory than this ratio are not worth a search between them."""


def frontier(
    graph: Graph,
    cluster: Cluster,
    options: Options | None = None,
    *,
    steps: int = 8,
    fastest: Plan | None = None,
    progress: Progress | None = None,
) -> list[Plan]:
    """At most ``steps`` plans, the fastest first, none beaten by another in both time and memory.

    ``fastest`` is the plan for ``options`` where it has been made already.

    >>> [plan.prediction.memory_bytes for plan in frontier(graph, cluster)]
    """
    options = replace(options or Options(), fewer_devices=False)
    plans = [fastest or plan_graph(graph, cluster, options, progress=progress)]
    least = replace(options, search=LEAST_MEMORY)
    smallest = plan_graph(graph, cluster, least, progress=progress) if options.search == "auto" else None
    for left in range(steps - 1, 0, -1):
        last = plans[-1].prediction.memory_bytes
        room = RATIO**left if smallest is None else smallest.prediction.memory_bytes / last
        if room > CLOSE or (smallest is not None and left == 1):
            break
        tighter = replace(options, memory_limit=min(room ** (1 / left), CLOSE) * last)
        try:
            plans.append(plan_graph(graph, cluster, tighter, progress=progress))
        except Infeasible:
            break
    return undominated([*plans, *([smallest] if smallest else [])])


@dataclass(frozen=True)
class Point:
    """A plan of the curve, on one mesh or in stages."""

    memory_bytes: float
    step_seconds: float
    mesh: tuple[tuple[str, int], ...]
    gap: float


def spanning(flat: Sequence[Plan], joint: Joint | None = None, steps: int = 6) -> list[Point]:
    """The curve over plans on one mesh and, where they were searched, pipelines under ever smaller limits.

    >>> spanning([])
    []
    """
    points = [
        Point(p.prediction.memory_bytes, p.prediction.step_seconds, p.stages[0].strategy.axes, p.proof.gap)
        for p in flat
    ]
    if joint is not None:
        largest = max(stage.memory_bytes for stage in joint.best.stages)
        limits = [RATIO**k * largest for k in range(1, steps)] + [p.memory_bytes for p in points]
        for found in [joint.best, *joint.under(limits)]:
            memory = max(stage.memory_bytes for stage in found.stages)
            points.append(Point(memory, found.step_seconds, shape_of(found), found.gap))
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.step_seconds, p.memory_bytes)):
        if not kept or point.memory_bytes < kept[-1].memory_bytes:
            kept.append(point)
    return kept


def undominated(plans: Sequence[Plan]) -> list[Plan]:
    """The plans that no other one beats, by decreasing memory and so by increasing time."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.prediction.step_seconds, p.prediction.memory_bytes)):
        if not kept or plan.prediction.memory_bytes < kept[-1].prediction.memory_bytes:
            kept.append(plan)
    return kept
