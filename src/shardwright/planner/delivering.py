"""A proposal becomes a plan: what running it asks for is decided, it is checked as the runtime will check it, and simulated.

The only place in the planner where plans are made, whoever searched.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from shardwright.cluster import Cluster, Mesh
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.graph import Graph
from shardwright.planner.decided import decided
from shardwright.planner.options import Options
from shardwright.planner.proposals import Proposal
from shardwright.planner.proving import checked
from shardwright.plans import Plan, Prediction
from shardwright.plans.plan import PlanRequest, Signature
from shardwright.plans.stages import check_operators
from shardwright.program import FixedDecisions
from shardwright.program.microbatches import WHOLE
from shardwright.program.pipeline import Pipeline, check
from shardwright.simulator import Timeline
from shardwright.simulator.alike import doing
from shardwright.simulator.links import Links
from shardwright.simulator.stages import price_stages
from shardwright.simulator.timeline import simulated

MAX_RANKS_PLAYED = 256
"""All ranks of larger pipelines are not played together while planning; one of every stage always is."""


def deliver(graph: Graph, cluster: Cluster, options: Options, proposal: Proposal, reference: str = "") -> Plan:
    """A proposal as a plan that the runtime can run; whether it fits is in its prediction.

    Raises
    ------
    LoweringError, PlanError
        When the runtime could not run it; the message says why.

    Example
    -------
    >>> deliver(graph, cluster, Options(), proposal).prediction.step_seconds                     # doctest: +SKIP
    """
    stages, order = proposal.laid()
    meshes = [stage.mesh_of(cluster) for stage in stages]
    check_operators(stages, graph)
    batch_norm = options.batch_norm if order.microbatches > 1 else WHOLE  # a single piece is the whole batch
    cut = Pipeline.of(graph, stages, order.microbatches, order, batch_norm)
    notes = (*graph.notes, *proposal.notes)
    if len(cut.workers) <= MAX_RANKS_PLAYED:
        check(cut)
    elif order.devices > 1:
        notes += (
            f"its {len(cut.workers)} ranks were not played together: parallelize() does that before the first step",
        )
    kinds: list[tuple[Mesh, Hashable]] = [(meshes[0], ())]
    if len(stages) > 1:
        kinds = [(mesh, doing(cut, number)) for number, mesh in enumerate(meshes)]
    written: list[FixedDecisions] = []
    for number, (stage, mesh) in enumerate(zip(stages, meshes, strict=True)):
        first = kinds.index(kinds[number])
        parts = {size: parts[number] for size, parts in cut.parts.items()}
        written.append(written[first] if first < number else decided(parts, stage.strategy, mesh))
    plan = Plan(
        model=reference,
        signature=Signature.of(graph),
        cluster=cluster,
        stages=tuple(replace(stage, decisions=one) for stage, one in zip(stages, written, strict=True)),
        schedule=order,
        search=options.search,
        optimizer=options.optimizer,
        prediction=proposal.prediction or proposal.expected,
        proof=proposal.proof,
        calibration="; ".join(dict.fromkeys(mesh.calibration for mesh in meshes)),
        candidates=(proposal.row(),),
        notes=notes,
        asked=PlanRequest(options.memory_limit, tuple(options.pins), tuple(options.forbidden)),
        captured=graph,
        batch_norm=batch_norm,
    )
    if proposal.prediction is None:
        decisions = [
            replace(s.decisions, otherwise=PricedDecisions(m)) for s, m in zip(plan.stages, meshes, strict=True)
        ]
        times = price_stages(cut, meshes, decisions, options.optimizer, kinds=kinds)
        plan = _simulated(plan, simulated(times, Links(cut, cluster)), options, proposal)
    return replace(plan, proof=checked(plan.proof, plan, proposal.name))


def _simulated(plan: Plan, timeline: Timeline, options: Options, proposal: Proposal) -> Plan:
    """The same with what the simulation of all kinds of ranks says."""
    rooms = [options.room(mesh.device) for mesh in plan.meshes]
    prediction = Prediction(
        step_seconds=timeline.seconds,
        sum_seconds=timeline.sum_seconds,
        memory_bytes=timeline.peak_bytes,
        communication_bytes=timeline.communication_bytes,
        exposed_seconds=timeline.exposed_seconds,
        fits=all(stage.memory_bytes <= room for stage, room in zip(timeline.stages, rooms, strict=True)),
    )
    stages = tuple(replace(s, prediction=one) for s, one in zip(plan.stages, timeline.stages, strict=True))
    return replace(
        plan, stages=stages, prediction=prediction, candidates=(replace(proposal, prediction=prediction).row(),)
    )
