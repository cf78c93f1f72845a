"""Plans with stages: cut the model, split every stage on its own devices, order the passes, simulate all ranks.

The operators are cut in their order where the slowest stage, with what it sends, is fastest (or where the user says); each
stage is searched on its own mesh like a model of its own; the schedule is a known one, or the best that our scheduler finds
for the simulated seconds of the passes (:mod:`shardwright.search.schedule`), with its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from torch.distributed.tensor import Replicate

from shardwright.cluster import Cluster, mesh_of, part_of
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner.cutting import Line, Named, complete, microbatch_counts
from shardwright.planner.delivering import deliver
from shardwright.planner.options import Options, Progress
from shardwright.planner.planning import plan_graph
from shardwright.planner.proposals import Laid, LaidOut, Proposal
from shardwright.plans import Bound, Plan, Prediction, Proof, SearchSpace, Stage
from shardwright.plans.layouts import layout_text
from shardwright.plans.proof import STEP
from shardwright.plans.spaces import stages_fingerprint
from shardwright.program.microbatches import WHOLE, batch_of, microbatches
from shardwright.program.pieces import describe
from shardwright.program.pipeline import Pipeline
from shardwright.program.stages import StageGraph, stage_graphs
from shardwright.schedules import RECIPES, Schedule, gpipe, known_schedule, read_csv, run
from shardwright.search.constraints import asked_of, check_asked, check_uncut
from shardwright.search.formulate import describe_graph
from shardwright.search.joint.cuts import Cuts, cut_into
from shardwright.search.schedule import find_schedule, lower_bound
from shardwright.simulator.links import Links
from shardwright.simulator.stages import PricedStage, price_stages, work_of

AUTO = "auto"


@dataclass(frozen=True)
class Pipelining:
    """What is asked of a pipeline: how many stages and micro-batches (``None``: as many as are fastest), which schedule
    (``auto``: searched for), the modules before which the model is cut (none: where it is fastest), and whether batch norms
    take statistics of the ``whole`` batch (which only one micro-batch has) or ``per-piece``."""

    stages: int = 2
    microbatches: int | None = None
    schedule: str = AUTO
    cuts: Sequence[str] = ()
    batch_norm: str = WHOLE


def plan_pipeline(
    graph: Graph,
    cluster: Cluster,
    asked: Pipelining,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    reference: str = "",
) -> Plan:
    """A plan with stages for a captured graph.

    Raises
    ------
    ShardwrightError
        When the stages do not fit the cluster or the model, or nothing fits into memory.

    Example
    -------
    >>> plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(4, 16, "zb-h1")).microbatches   # doctest: +SKIP
    """
    begin, options, say = perf_counter(), options or Options(), progress or (lambda text: None)
    check_asked(graph, options.pins, options.forbidden)
    options = replace(options, batch_norm=asked.batch_norm)
    plans = []
    batch, wanted = batch_of(graph), (asked.stages, 2 * asked.stages, 4 * asked.stages)
    counts = microbatch_counts(batch, wanted) or [min(asked.stages, batch)]
    for count in counts if asked.microbatches is None else [asked.microbatches]:
        say(f"{asked.stages} stages, {count} micro-batches")
        plans.append(deliver(graph, cluster, options, _proposed(graph, cluster, asked, options, count, say), reference))
    fitting = [plan for plan in plans if plan.prediction.fits]
    if not fitting:
        least = min(plan.prediction.memory_bytes for plan in plans)
        raise Infeasible(
            f"No pipeline of {asked.stages} stages fits {cluster.name}: the smallest needs {least / 1e9:.1f} GB a device.",
            "Ask for more stages, more micro-batches, --recompute blocks or --search fsdp.",
        )
    best = min(fitting, key=lambda plan: plan.prediction.step_seconds)
    rows = tuple(row for plan in sorted(plans, key=lambda plan: plan is not best) for row in plan.candidates)
    return replace(best, proof=replace(best.proof, seconds=perf_counter() - begin), candidates=rows)


def _proposed(
    graph: Graph, cluster: Cluster, asked: Pipelining, options: Options, count: int, say: Progress
) -> Proposal:
    """The pipeline with so many micro-batches: cut, each stage split on its own devices, its passes in order."""
    order = _order(asked, count, cluster)
    each = cluster.size // order.devices
    micro = microbatches(graph, count, asked.batch_norm)
    smallest = micro.graphs[micro.sizes[-1]]
    alone = mesh_of(part_of(cluster, [0]))
    cuts: Cuts = Named.of(graph, asked.cuts) if asked.cuts else Line.of(smallest, alone, cluster)
    names = complete(graph, cut_into(cuts, asked.stages))
    stages: list[Stage] = []
    pins: dict[str, str] = {}
    for number, part in enumerate(stage_graphs(smallest, names)):
        first = order.device_of[number] * each
        ranks = tuple(range(first, first + each))
        say(f"stage {number} of {asked.stages}")
        strategy = _strategy(part, part_of(cluster, ranks), options, pins, say)
        stages.append(Stage(tuple(names[number]), ranks, strategy))
    meshes = [stage.mesh_of(cluster) for stage in stages]
    pipe = Pipeline.of(graph, stages, count, order, asked.batch_norm)
    halves = price_stages(pipe, meshes, [PricedDecisions(mesh) for mesh in meshes], options.optimizer, split=True)
    rooms = [options.room(mesh.device) for mesh in meshes]
    order, notes = _scheduled(pipe, halves, cluster, asked.schedule, rooms, options), []
    if micro.tail is not None:
        order = order.forwards_first()
        notes = [
            f"{describe(micro.tail.ops[0])} needs the whole batch: all forward passes come before the backward passes."
        ]
    space = SearchSpace(
        microbatches=(count,), most_stages=len(stages), given_stages=stages_fingerprint(stages), training=graph.training
    )
    # No order of the passes of these stages takes less: computation, hops, and the optimizer of the quickest device.
    closing = [0.0] * order.devices
    for number, device in enumerate(pipe.schedule.device_of):
        closing[device] += halves[number, max(pipe.micro.sizes)].least.closing
    bound = lower_bound(work_of(Links(pipe, cluster), halves, least=True), "makespan") + min(closing)
    return LaidOut(
        name=f"{asked.schedule}, {count} micro-batches",
        shape=(("stage", len(stages)), *stages[0].strategy.axes),
        expected=Prediction(bound, bound, 0.0, 0.0, 0.0, True),  # no sums: what it takes at least
        proof=Proof((Bound(space, STEP, bound),)),
        notes=tuple(notes),
        layout=Laid(tuple(stages), order),
    )


def _order(asked: Pipelining, count: int, cluster: Cluster) -> Schedule:
    """A schedule that says which device has which stage."""
    if asked.schedule.endswith(".csv"):
        order = read_csv(asked.schedule)
        if (order.stages, order.microbatches) != (asked.stages, count):
            raise ShardwrightError(
                f"{asked.schedule} has {order.stages} stages and {order.microbatches} micro-batches.",
                f"Say --stages {order.stages} --microbatches {order.microbatches}.",
            )
    elif asked.schedule == AUTO:
        order = gpipe(asked.stages, count)
    else:
        recipe = RECIPES.get(asked.schedule)
        devices = None if recipe is None or recipe.stages_per_device else min(asked.stages, cluster.size)
        if devices is not None and asked.stages > devices:
            devices = max(d for d in range(1, devices + 1) if asked.stages % d == 0 and cluster.size % d == 0)
        order = known_schedule(asked.schedule, asked.stages, count, devices)
    if cluster.size % order.devices:
        raise ShardwrightError(
            f"{cluster.size} devices cannot be shared equally by {order.devices} groups of stages.",
            f"Ask for a number of stages that divides {cluster.size}.",
        )
    return order


def _scheduled(
    pipe: Pipeline,
    times: dict[tuple[int, int], PricedStage],
    cluster: Cluster,
    name: str,
    rooms: Sequence[float],
    options: Options,
) -> Schedule:
    """The order of the passes."""
    if name != AUTO:
        return pipe.schedule
    sizes = max(pipe.micro.sizes)
    room = []
    for device in range(pipe.schedule.devices):
        mine = [times[s, sizes] for s, d in enumerate(pipe.schedule.device_of) if d == device]
        limit = min(rooms[s] for s, d in enumerate(pipe.schedule.device_of) if d == device)
        room.append(max(limit - sum(t.resting for t in mine) - max(t.bytes.working for t in mine), 0.0))
    links = Links(pipe, cluster)
    free = work_of(links, times)
    try:
        found = find_schedule(work_of(links, times, room), "makespan", min(options.time_limit, 10.0))
    except Infeasible:
        found = find_schedule(free, "makespan", min(options.time_limit, 10.0))
    merged = found.answer.merged()
    return min((merged, found.answer), key=lambda order: run(order, free).makespan)


def _strategy(part: StageGraph, cluster: Cluster, options: Options, pins: dict[str, str], say: Progress) -> Strategy:
    """How a stage is split on its own devices; a parameter that another stage holds too lies there as it does here."""
    graph = part.graph
    if cluster.size == 1:
        check_uncut(graph, options.pins)
        mesh = mesh_of(cluster)
        blocks = tuple(describe_graph(graph).blocks) if options.recompute == "blocks" else ()
        splits = {op.name: (None,) for op in graph.ops}
        return Strategy(mesh.names, splits, {name: (Replicate(),) for name in graph.sources}, recomputed=blocks)
    held = {p.paths[0] for p in graph.parameters}
    bound = [f"{path}={layout}" for path, layout in pins.items() if path in held]
    own, forbidden = asked_of(graph, options.pins, options.forbidden)
    mine = replace(options, baselines=(), fewer_devices=False, pins=(*own, *bound), forbidden=forbidden)
    strategy = plan_graph(graph, cluster, mine, progress=say).stages[0].strategy
    pins |= {p.paths[0]: ",".join(layout_text(strategy.resting[p.tensor])) for p in graph.parameters}
    return strategy
