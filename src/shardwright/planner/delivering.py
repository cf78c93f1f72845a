"""A pipeline that the joint search found, as a plan.

Every stage's strategy is unfolded, the whole checked as the runtime will check it, and one rank of every stage simulated.
What a step takes there, and whether it fits, is what is told of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.cluster import Cluster
from shardwright.errors import LoweringError
from shardwright.graph import Graph
from shardwright.planner.decided import decided
from shardwright.planner.planning import Options
from shardwright.planner.staging import Twins, cut_into, held_by_several, stage_strategy
from shardwright.plans import Candidate, Plan, Prediction, Proof, Stage
from shardwright.plans.plan import Asked, Signature
from shardwright.program.microbatches import microbatches
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.stages import stage_graphs
from shardwright.schedules import Schedule, known_schedule
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.pipelines import JointPlan
from shardwright.search.limits import limit_of, more_room
from shardwright.simulator.pipelines import simulate_plan_pipeline
from shardwright.units import bytes_text, seconds_text

MOST_PLAYED = 256
"""All ranks of larger pipelines are not played together while planning; one of every stage always is."""

SUMMED = (
    "pipelines were searched, bounded and, but for those that could be the plan, compared by sums of their operators"
)


def predicted(plan: JointPlan) -> Prediction:
    busy: dict[int, float] = {}  # by group of devices
    for stage in plan.stages:
        own = stage.seconds * plan.microbatches + stage.closing_seconds
        busy[stage.first_device] = busy.get(stage.first_device, 0.0) + own
    memory = max(stage.memory_bytes for stage in plan.stages)
    return Prediction(plan.step_seconds, max(busy.values()), memory, plan.boundary_bytes, 0.0, True)


class TooLargeSimulatedError(LoweringError):
    """A pipeline that was taken to fit does not, simulated; ``stage_bytes`` are what the devices of each stage need."""

    stage_bytes: tuple[float, ...] = ()


def delivered(
    graph: Graph, cluster: Cluster, options: Options, found: JointPlan, reference: str, rows: Sequence[Candidate]
) -> Plan:
    """A pipeline as a plan, checked and simulated; ``rows`` are the candidates that it is shown beside.

    Raises
    ------
    LoweringError, PlanError
        When the runtime could not run it, or it does not fit; the message says why.
    """
    cut = microbatches(graph, found.microbatches, options.batch_norm)
    micro = cut.graphs[found.microbatch]
    cuts = cut_into(graph, micro, found.stages)
    parts = stage_graphs(micro, cuts)
    twins, shared = Twins.of(micro, found.stages[0]), held_by_several(parts)
    stages = []
    for stage, part, names in zip(found.stages, parts, cuts, strict=True):
        strategy = stage_strategy(stage, part, twins, shared)
        ranks = tuple(range(stage.first_device, stage.first_device + stage.devices))
        decisions = decided(part.graph, strategy, stage.mesh)
        stages.append(Stage(tuple(names), ranks, strategy, decisions))
    order, devices = _order(found, whole_batch=cut.tail is not None), sum(found.groups)
    if devices <= MOST_PLAYED:
        check(Pipeline.of(graph, stages, found.microbatches, order, options.batch_norm))
    proof = Proof(0.0, 0.0, False, found.search_seconds, found.scope, found.bound_seconds)
    plan = Plan(
        model=reference,
        signature=Signature.of(graph),
        cluster=cluster,
        stages=tuple(stages),
        schedule=order,
        search="pipeline",
        optimizer=options.optimizer,
        prediction=predicted(found),
        proof=proof,
        calibration=found.stages[0].mesh.calibration,
        candidates=tuple(rows),
        notes=(*graph.notes, SUMMED, *([f"{devices} of {cluster.size} devices are used"] * (devices < cluster.size))),
        asked=Asked(options.memory_limit),  # searched under no pins
        captured=graph,
        batch_norm=options.batch_norm,
    )
    plan.check(graph)
    if devices > MOST_PLAYED:
        text = f"its {devices} ranks were not played together: parallelize() does that before the first step"
        plan = replace(plan, notes=(*plan.notes, text))
    return _simulated(plan, graph, limit_of(cluster.device, options.memory_limit, options.ignore_device_memory))


def _order(found: JointPlan, *, whole_batch: bool) -> Schedule:
    """The order of passes that a pipeline was found for; all forward passes first where the loss needs the whole batch."""
    stages, groups = len(found.stages), len(found.groups)
    if whole_batch and found.schedule in OTHERS:
        raise LoweringError(
            f"The loss needs the whole batch, so all forward passes come first, not in the order {found.schedule}.",
            "Plan with --schedule gpipe.",
        )
    plain = stages == 1 and not whole_batch  # one stage holds one micro-batch, as it was searched
    name = "1f1b" if plain else "gpipe" if whole_batch else found.schedule
    return known_schedule(name, stages, found.microbatches, groups)


def _simulated(plan: Plan, graph: Graph, limit: float) -> Plan:
    """The same with what the simulation of all ranks says beside the sums; refused where that does not fit."""
    timeline = simulate_plan_pipeline(plan, graph)
    peak = max(one.memory_bytes for one in timeline.stages)
    if peak > limit:
        error = TooLargeSimulatedError(
            f"simulated, a device of this pipeline needs {bytes_text(peak)}, more than {bytes_text(limit)}.",
            more_room(plan.cluster.device, limit, peak),
        )
        error.stage_bytes = tuple(one.memory_bytes for one in timeline.stages)
        raise error
    stages = tuple(replace(s, prediction=one) for s, one in zip(plan.stages, timeline.stages, strict=True))
    text = f"by sums, in which nothing overlaps and nothing waits, a step takes {seconds_text(plan.prediction.step_seconds)}"
    prediction = replace(plan.prediction, step_seconds=timeline.seconds, memory_bytes=peak)
    # It is one on sums, so nothing is wrong where overlap makes a step shorter; it is just no bound then.
    bound = plan.proof.step_bound if plan.proof.step_bound <= timeline.seconds else 0.0
    proof = replace(plan.proof, step_bound=bound)
    return replace(plan, stages=stages, prediction=prediction, proof=proof, notes=(*plan.notes, text))
