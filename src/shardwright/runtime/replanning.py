"""A job that comes back with fewer (or more) processes than its plan is for: another plan, made when it starts.

Torchrun's elastic agents start the processes of a job anew when a node is lost or joins, as many as there are then. Rank 0
plans for that many devices of the plan's cluster and tells the others; the script then reads the last checkpoint, which any
plan can. What was in the memory of the processes is gone: torchrun ends those that are left before it starts new ones.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwright.cluster import Cluster, part_of
from shardwright.errors import PlanError, ShardwrightError
from shardwright.graph import Graph
from shardwright.plans import Plan, from_json, to_json

if TYPE_CHECKING:
    from shardwright.planner import Options

ELASTIC_VARIABLE = "SHARDWRIGHT_ELASTIC"
"""Set by ``shardwright run --elastic``."""
_log = logging.getLogger("shardwright")


def for_those_here(plan: Plan, graph: Graph) -> Plan:
    """The plan, or one like it for as many processes as there are where ``shardwright run --elastic`` asked for that.

    Raises
    ------
    PlanError
        On every rank, where no plan for so many processes can be made.
    """
    here = dist.get_world_size() if dist.is_initialized() else plan.devices
    if here == plan.devices or os.environ.get(ELASTIC_VARIABLE) != "1":
        return plan
    told: list[tuple[str, str, str] | None] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(to_json(_planned(plan, graph, here)), "", "")]
        except ShardwrightError as error:
            told = [("", error.message, error.remedy)]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    text, why, remedy = told[0]
    if why:
        raise PlanError(f"There is no plan for {here} processes instead of {plan.devices}: {why}", remedy)
    _log.warning("shardwright: %d processes where the plan is for %d: planned anew", here, plan.devices)
    return from_json(text)


def _planned(plan: Plan, graph: Graph, devices: int) -> Plan:
    from shardwright.planner import plan_jointly
    from shardwright.planner.joint import ALWAYS, NEVER, PROMISING
    from shardwright.search.baselines import BASELINES

    named = plan.search in BASELINES
    pipelines = NEVER if named and plan.whole else PROMISING if plan.whole else ALWAYS
    options = _asked(plan, search=plan.search if named and plan.whole else "auto", batch_norm=plan.batch_norm)
    return plan_jointly(graph, _cluster(plan.cluster, devices), options, reference=plan.model, pipelines=pipelines)[0]


def _cluster(known: Cluster, devices: int) -> Cluster:
    """So many devices of the plan's cluster, or, of equal nodes, as many nodes more."""
    if devices <= known.size or not known.uniform:
        return part_of(known, range(devices))
    each = int(os.environ.get("LOCAL_WORLD_SIZE", known.nodes[0].devices))
    sizes = [each] * (devices // each) + [devices % each] * (devices % each > 0)
    nodes = tuple(replace(known.nodes[0], devices=size) for size in sizes)
    return replace(known, name=f"{devices} like {known.name}", nodes=nodes)


def planned_again(plan: Plan, graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """A plan on one mesh for another cluster, with all of its devices, within the limits and pins that this one was asked
    for."""
    from shardwright.planner import plan_graph

    return plan_graph(graph, cluster, _asked(plan, **options), reference=plan.model)


def _asked(plan: Plan, **options: Any) -> Options:
    from shardwright.planner import Options

    return Options(
        baselines=(),
        optimizer=plan.optimizer,
        memory_limit=plan.asked.memory_limit,
        pins=plan.asked.pins,
        forbidden=plan.asked.forbidden,
        fewer_devices=False,
        **options,
    )
