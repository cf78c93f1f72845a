"""Pipelines beside plans on one mesh: micro-batches of the captured graph, the joint search, and its answer as a plan.

The graph of a micro-batch is cut from the captured one (:mod:`shardwright.program.microbatches`), so nothing is captured
twice. The joint search (:mod:`shardwright.search.joint.pipelines`) answers with runs of blocks and a strategy for a model of
three blocks; here every operator of a stage takes the split of its twin there, every parameter the layout of its twin, and
the whole is checked as the runtime will check it. The search goes by sums, in which nothing overlaps; a pipeline that may be
the plan is simulated on all its ranks, and its simulated step decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

from shardwright.cluster import Cluster
from shardwright.errors import ClusterError, Infeasible, LoweringError, PlanError, ProblemError
from shardwright.graph import Graph
from shardwright.graph.shorten import longest_run
from shardwright.planner.decided import decided
from shardwright.planner.planning import PIPELINES_NOT_SEARCHED, Options, Progress, plan_graph
from shardwright.planner.staging import Twins, held_by_several, operators_of, stage_strategy
from shardwright.plans import Candidate, Plan, Prediction, Proof, Stage
from shardwright.plans.plan import Asked, Signature
from shardwright.program.microbatches import batch_of, microbatches
from shardwright.program.pipeline import Pipeline, check
from shardwright.program.stages import stage_graphs
from shardwright.schedules import Schedule, gpipe, one_f_one_b
from shardwright.search.joint.pipelines import BASELINES, JointPlan, Model, Pipelines
from shardwright.search.limits import limit_of
from shardwright.simulator.pipelines import simulate_plan_pipeline
from shardwright.units import bytes_text, seconds_text

COUNTS = (4, 16, 64)
"""Numbers of micro-batches that are tried: for each, the largest divisor of the batch that is no larger."""

MOST_PLAYED = 256
"""Pipelines of more ranks are not played and simulated rank by rank while planning."""

LESS = (0.9, 0.8)
"""Shares of the memory to search under where the sums of the fastest pipeline leave out too much of it."""

SUMMED = (
    "pipelines were searched, bounded and, but for those that could be the plan, compared by sums of their operators"
)

Simulated = Mapping[str, Prediction | str]
"""By name, what simulating a pipeline said of it: its step, or why it cannot be run."""


@dataclass(frozen=True, eq=False)
class Joint:
    """What the joint search came to for one model: the fastest pipeline, those of the recipes, and how to deliver one."""

    graph: Graph
    cluster: Cluster
    options: Options
    space: Pipelines
    best: JointPlan
    recipes: Mapping[str, JointPlan | str]

    def candidates(self, said: Simulated | None = None) -> tuple[Candidate, ...]:
        """Rows of the comparison: the best pipeline and every recipe's, as sums or as they were ``said`` to be."""
        found = {"pipeline": self.best, **self.recipes}
        return tuple(_candidate(name, plan, (said or {}).get(name)) for name, plan in found.items())

    def under(self, limits: Sequence[float]) -> list[JointPlan]:
        """The fastest pipelines within so many bytes per device each, where there are any; blocks are priced once."""
        plans = []
        for limit in limits:
            try:
                plans.append(self.space.best(limit))
            except Infeasible:
                continue
        return plans

    def deliver(self, found: JointPlan, reference: str = "") -> Plan:
        """A pipeline as a plan that the runtime can run, checked.

        Raises
        ------
        LoweringError, PlanError
            When the runtime could not run it; the message says why.
        """
        return _delivered(self, found, reference)

    def fastest(self, reference: str = "") -> tuple[Plan, Simulated]:
        """The pipeline whose simulated step is shortest, as a plan, and what the simulation said of each that was tried.

        Sums leave out what overlaps and what waits, so every pipeline whose sum is below the best simulated step is
        simulated too. Where none of them fits, those found under a little less memory are.

        Raises
        ------
        LoweringError, PlanError
            When none can be run; the message is about the first.
        """
        limit = limit_of(self.cluster.device, self.options.memory_limit, self.options.ignore_device_memory)
        known = {"pipeline": self.best, **{n: p for n, p in self.recipes.items() if isinstance(p, JointPlan)}}
        best: Plan | None = None
        said: dict[str, Prediction | str] = {}
        first: LoweringError | PlanError | None = None
        for name, found in sorted(known.items(), key=lambda pair: pair[1].step_seconds):
            if best is None or found.step_seconds < best.prediction.step_seconds:
                try:
                    plan = self.deliver(found, reference)
                except (LoweringError, PlanError) as error:
                    first, said[name] = first or error, error.message
                else:
                    said[name] = plan.prediction
                    best = plan if best is None else min(best, plan, key=lambda p: p.prediction.step_seconds)
        for share in LESS if best is None else ():
            for found in self.under([share * limit]) if best is None else ():
                with suppress(LoweringError, PlanError):
                    best = self.deliver(found, reference)
                    said["pipeline"] = best.prediction
        if best is None:
            assert first is not None
            raise first
        return best, said


def find_pipelines(graph: Graph, cluster: Cluster, options: Options, names: Sequence[str] = BASELINES) -> Joint:
    """Search pipelines of a captured graph, and those of the recipes ``names``.

    Raises
    ------
    Infeasible
        When the model has no pipeline here: no repeated blocks, no micro-batches, or nothing that fits; it says which.

    Example
    -------
    >>> find_pipelines(graph, parse_cluster("8xH100"), Options()).best.step_seconds  # doctest: +SKIP
    """
    started = perf_counter()
    if not graph.training:
        raise Infeasible("There are no pipelines of a model in evaluation mode.", "Call model.train() before planning.")
    try:
        batch = batch_of(graph)
        sizes = tuple(batch // count for count in _counts(batch))
        model = Model(lambda size: microbatches(graph, batch // size).graphs[size])
        space = Pipelines(
            model,
            cluster,
            batch=batch,
            microbatch_sizes=sizes,
            memory_limit=options.memory_limit,
            optimizer=options.optimizer,
            max_axes=options.max_axes,
        )
    except (LoweringError, ProblemError) as error:
        raise Infeasible(f"There is no pipeline of this model: {error.message}", error.remedy) from None
    best, recipes = space.compared(names)
    return Joint(graph, cluster, options, space, replace(best, search_seconds=perf_counter() - started), recipes)


def plan_jointly(
    graph: Graph,
    cluster: Cluster,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    reference: str = "",
    always: bool = True,
) -> tuple[Plan, Joint | None]:
    """The faster of the best plan on one mesh and the best pipeline, and what was found out about pipelines.

    A pipeline that the runtime cannot run is never the plan; a note says what it would take and what is in the way. Not
    ``always``: pipelines are searched only where nothing fits on one mesh, or unlike nodes have none.

    Example
    -------
    >>> plan_jointly(graph, parse_cluster("8xH100"))[0].stages                                   # doctest: +SKIP
    """
    options, say = options or Options(), progress or (lambda text: None)
    flat, refused = None, None
    try:
        flat = plan_graph(graph, cluster, options, progress=progress, reference=reference)
    except (Infeasible, ClusterError) as error:  # nothing fits, or unlike nodes have no mesh
        refused = error
    asked = options.search == "auto" and not (options.pins or options.forbidden) and cluster.size > 1
    if not always and (flat is not None or not asked):
        if flat is None:
            assert refused is not None
            raise refused
        return flat, None
    say("searching pipelines")
    try:
        joint = find_pipelines(graph, cluster, options)
    except Infeasible as error:
        if flat is None and refused is not None:
            remedy = refused.remedy.removesuffix(PIPELINES_NOT_SEARCHED)
            raise Infeasible(refused.message, f"{remedy}Pipelines: {error.message}") from None
        assert flat is not None
        return replace(flat, notes=(*flat.notes, error.message)), None
    if flat is not None and flat.prediction.step_seconds <= joint.best.step_seconds:
        return _beside(flat, joint), joint
    try:
        found, said = joint.fastest(reference)
    except (LoweringError, PlanError) as error:
        if flat is None:
            raise
        text = f"a pipeline of {joint.best.step_seconds:.4g} s a step was found that cannot be run: {error.message}"
        return replace(_beside(flat, joint), notes=(*flat.notes, text)), joint
    if flat is not None and flat.prediction.step_seconds <= found.prediction.step_seconds:
        return _beside(flat, joint, said), joint
    shape = (("stage", len(found.stages)), ("micro-batch", found.microbatches))
    rows: tuple[Candidate, ...] = (Candidate("auto", shape, found.prediction),)
    if flat is not None:
        rows += (replace(flat.candidates[0], name="one mesh"), *flat.candidates[1:])
        found = replace(found, proof=_both(found.proof, flat.proof))
    return replace(found, candidates=(*rows, *joint.candidates(said)[1:])), joint


def _beside(flat: Plan, joint: Joint, said: Simulated | None = None) -> Plan:
    """A plan on one mesh, with what was found out about pipelines."""
    about = Proof(0.0, 0.0, False, joint.best.search_seconds, joint.best.scope, joint.best.bound_seconds)
    both = _both(flat.proof, about)
    scope = f"{flat.proof.scope.replace('pipelines, ', '')}; the step also over {about.scope}"
    proof = replace(flat.proof, seconds=both.seconds, step_bound=both.step_bound, scope=scope)
    return replace(flat, candidates=(*flat.candidates, *joint.candidates(said)), proof=proof)


def _both(mine: Proof, theirs: Proof) -> Proof:
    """What holds of the steps of both spaces."""
    scope = f"{mine.scope}; and {theirs.scope.replace('pipelines, ', '')}"
    step = min(mine.step_bound, theirs.step_bound)
    return replace(mine, seconds=mine.seconds + theirs.seconds, step_bound=step, scope=scope)


def _counts(batch: int) -> list[int]:
    found = []
    for most in COUNTS:
        divisors = [count for count in range(2, min(most, batch) + 1) if batch % count == 0]
        found += divisors[-1:]
    if not found:
        raise LoweringError(f"A batch of {batch} has no equal micro-batches.", "Plan with a larger batch.")
    return sorted(set(found))


def _candidate(name: str, plan: JointPlan | str, said: Prediction | str | None = None) -> Candidate:
    if isinstance(plan, str):
        return Candidate(name, (("stage", 1),), None, plan)
    if isinstance(said, str):
        return Candidate(name, shape_of(plan), None, said)
    return Candidate(name, shape_of(plan), said or _prediction(plan))


def shape_of(plan: JointPlan) -> tuple[tuple[str, int], ...]:
    """A pipeline in the words of a mesh: its stages and its micro-batches."""
    return (("stage", len(plan.stages)), ("micro-batch", plan.microbatches))


def _prediction(plan: JointPlan) -> Prediction:
    busiest = max(stage.seconds * plan.microbatches + stage.closing_seconds for stage in plan.stages)
    memory = max(stage.memory_bytes for stage in plan.stages)
    return Prediction(plan.step_seconds, busiest, memory, plan.boundary_bytes, 0.0, True)


def _delivered(joint: Joint, found: JointPlan, reference: str) -> Plan:
    graph, cluster, options = joint.graph, joint.cluster, joint.options
    cut = microbatches(graph, found.microbatches)
    micro = cut.graphs[found.microbatch]
    run = longest_run(micro)
    assert run is not None  # it was priced by its blocks
    cuts = [operators_of(graph, micro, run, stage) for stage in found.stages]
    parts = stage_graphs(micro, cuts)
    twins, shared = Twins(micro, run), held_by_several(parts)
    for name in sorted(shared):
        holding = {s.mesh.sizes for s, part in zip(found.stages, parts, strict=True) if name in part.graph.parameter_of}
        if len(holding) > 1:
            raise LoweringError(
                f"stages on meshes of unlike sizes ({' and '.join(map(str, sorted(holding)))}) share {name}.",
                "Plan without stages, or untie that parameter.",
            )
    stages = []
    for stage, part, names in zip(found.stages, parts, cuts, strict=True):
        strategy = stage_strategy(stage, part, twins, shared)
        ranks = tuple(range(stage.first_device, stage.first_device + stage.devices))
        decisions = decided(part.graph, strategy, stage.mesh)
        stages.append(Stage(tuple(names), ranks, strategy, decisions))
    make = gpipe if found.schedule == "gpipe" or cut.tail is not None else one_f_one_b
    order: Schedule = make(len(stages), found.microbatches)
    devices = sum(stage.devices for stage in found.stages)
    if devices <= MOST_PLAYED:
        check(Pipeline.of(graph, stages, found.microbatches, order))
    proof = Proof(0.0, 0.0, False, found.search_seconds, found.scope, found.bound_seconds)
    plan = Plan(
        model=reference,
        signature=Signature.of(graph),
        cluster=cluster,
        strategy=stages[0].strategy,
        search="pipeline",
        optimizer=options.optimizer,
        prediction=_prediction(found),
        proof=proof,
        calibration=found.stages[0].mesh.calibration,
        candidates=joint.candidates(),
        notes=(*graph.notes, SUMMED, *([f"{devices} of {cluster.size} devices are used"] * (devices < cluster.size))),
        asked=Asked(options.memory_limit, tuple(options.pins), tuple(options.forbidden)),
        captured=graph,
        decisions=stages[0].decisions,
        stages=tuple(stages),
        microbatches=found.microbatches,
        schedule=order,
    )
    plan.check(graph)
    if devices > MOST_PLAYED:
        text = f"its {devices} ranks were not played together: parallelize() does that before the first step"
        return replace(plan, notes=(*plan.notes, text))
    return _simulated(plan, graph, limit_of(cluster.device, options.memory_limit, options.ignore_device_memory))


def _simulated(plan: Plan, graph: Graph, limit: float) -> Plan:
    """The same with what the simulation of all ranks says beside the sums; refused where that does not fit."""
    timeline = simulate_plan_pipeline(plan, graph)
    peak = max(one.memory_bytes for one in timeline.stages)
    if peak > limit:
        raise LoweringError(
            f"simulated, a device of this pipeline needs {bytes_text(peak)}, more than {bytes_text(limit)}.",
            "Ask for a little less memory (--memory), or for more devices.",
        )
    stages = tuple(replace(s, prediction=one) for s, one in zip(plan.stages, timeline.stages, strict=True))
    text = f"by sums, in which nothing overlaps and nothing waits, a step takes {seconds_text(plan.prediction.step_seconds)}"
    prediction = replace(plan.prediction, step_seconds=timeline.seconds, memory_bytes=peak)
    proof = replace(plan.proof, step_bound=min(plan.proof.step_bound, timeline.seconds))
    return replace(plan, stages=stages, prediction=prediction, proof=proof, notes=(*plan.notes, text))
