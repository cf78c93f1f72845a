"""Another plan for ranks that have become slow (or fast again), where shares of the present one leave much undone.

Shares move what a plan cuts. What it does not cut (norms beside cut heads) every rank does in full, however slow it is, and
what it cuts in few pieces (four heads) cannot be dealt out finely. Every recipe on one mesh is planned for, dealt out by the
speeds that were seen, and simulated on every rank at its own speed: the slowest decides. The job goes over
(:mod:`~shardwright.runtime.moving`) where that is enough faster than staying by the same simulation. Once the ranks are
alike again, the plan that was left is compared with the one that took its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from shardwright.cluster import mesh_of
from shardwright.errors import RunError, ShardwrightError
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.program import build
from shardwright.runtime.assistant.links import PLANNING_SECONDS, OtherPlan, told_to_all
from shardwright.runtime.assistant.movable import movable
from shardwright.runtime.assistant.prices import uncut_part
from shardwright.runtime.assistant.watching import dealt
from shardwright.runtime.replanning import planned_again

RECIPES = ("data-parallel", "fsdp", "megatron")
"""What is planned for, each within a part of the time."""
ALIKE = 1.1
"""Ranks whose slownesses are within this factor are alike."""


def answer_for_ranks(plan: Plan, graph: Graph, slowness: Sequence[float], home: Plan | None) -> OtherPlan | None:
    """The plan for ranks of these slownesses; rank 0 makes it, all ranks are told the same. Nothing where none is better.

    ``home``: the plan that was left for ranks that were slow, if any.
    """
    return told_to_all(lambda: _planned(plan, graph, slowness, home))


def _planned(plan: Plan, graph: Graph, slowness: Sequence[float], home: Plan | None) -> OtherPlan | None:
    began = perf_counter()
    staying, best = seconds_at(plan, graph, slowness), None
    if home is not None and max(slowness) < ALIKE * min(slowness):
        candidates = iter((home,))
    else:
        candidates = _candidates(plan, graph)
    for candidate in candidates:
        given = by_speed(candidate, graph, slowness)
        expected = seconds_at(given, graph, slowness)
        if expected < staying and (best is None or expected < best.expected):
            best = OtherPlan(given, staying, expected, 0.0)
    return None if best is None else replace(best, spent=perf_counter() - began)


def _candidates(plan: Plan, graph: Graph) -> Iterator[Plan]:
    for recipe in RECIPES:
        try:
            yield planned_again(plan, graph, plan.cluster, search=recipe, time_limit=PLANNING_SECONDS / len(RECIPES))
        except ShardwrightError:
            continue  # it does not fit, or pins exclude it


def by_speed(plan: Plan, graph: Graph, slowness: Sequence[float]) -> Plan:
    """The plan with what it cuts dealt out by the ranks' speeds; as it is where nothing of it can be dealt out."""
    strategy, mesh = replace(plan.stages[0].strategy, shares={}), mesh_of(plan.cluster, plan.stages[0].strategy.sizes)
    program = build(graph, strategy, plan.stages[0].decisions, (0,) * len(strategy.sizes), device=mesh.device.kind)
    try:
        shares = movable(program)
    except RunError:
        return plan
    places = [mesh.coordinates(rank)[shares.axis] for rank in range(mesh.devices)]
    costs = [max(own for own, at in zip(slowness, places, strict=True) if at == p) for p in range(len(shares.rows))]
    fixed = uncut_part(program, mesh, shares.axis, shares.rows) / shares.unit
    units = sum(shares.rows) // shares.unit
    rows = dealt(units, costs, [fixed] * len(costs))
    if len(set(rows)) == 1:
        return replace(plan, stages=(replace(plan.stages[0], strategy=strategy),))
    given = replace(strategy, shares={shares.name: shares.of(rows)})
    return replace(plan, stages=(replace(plan.stages[0], strategy=given),))


def seconds_at(plan: Plan, graph: Graph, slowness: Sequence[float]) -> float:
    """The step of a plan on one mesh whose ranks are slower than planned by these factors: that of the last of them."""
    from shardwright.simulator import WhatIf, simulate

    found = 0.0
    mesh = plan.meshes[0]
    for rank, own in enumerate(slowness):
        what_if = WhatIf(device_speed=1 / own, host_speed=1 / own)
        place = mesh.coordinates(rank)
        step = simulate(
            graph, plan.stages[0].strategy, mesh, optimizer=plan.optimizer, what_if=what_if, coordinate=place
        )
        found = max(found, step.seconds)
    return found
