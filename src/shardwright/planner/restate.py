"""The choice problem that a finished plan answers, stated again: its mesh and limits, what was asked for and recomputed."""

from __future__ import annotations

from dataclasses import replace

from shardwright.graph import Graph
from shardwright.graph.repeats import representatives
from shardwright.plans import Plan
from shardwright.search.constraints import constraints
from shardwright.search.formulate import Described, Formulation, describe_graph, formulate
from shardwright.search.limits import limit_of


def restate(plan: Plan, graph: Graph, described: Described | None = None) -> Formulation:
    """The problem of ``plan`` on ``graph``; repeated blocks decide together where the plan splits them alike."""
    described = described or describe_graph(graph)
    mesh, asked, splits = plan.meshes[0], plan.asked, plan.stages[0].strategy.splits
    alike = all(splits[name] == splits[first] for name, first in representatives(graph).items())
    return formulate(
        described,
        mesh,
        optimizer=plan.optimizer,
        memory_limit=limit_of(mesh.device, asked.memory_limit),
        within=replace(constraints(graph, mesh.names, asked.pins, asked.forbidden), fold=alike),
        recompute=plan.stages[0].strategy.recomputed,
        lightly=bool(plan.stages[0].strategy.lightly),
    )
