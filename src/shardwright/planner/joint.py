"""Pipelines beside plans on one mesh: micro-batches of the captured graph, the joint search, and its answer as a plan.

The graph of a micro-batch is cut from the captured one (:mod:`shardwright.program.microbatches`), so nothing is captured
twice. The joint search (:mod:`shardwright.search.joint.pipelines`) answers with runs of blocks and a strategy for a model of
three blocks, or with stages between ideals of a general graph and a strategy for all of it; here every operator of a stage
takes its split (in a run of blocks that of its twin among the three), every parameter its layout, and the whole is checked
as the runtime will check it. The search goes by sums, in which nothing overlaps; a pipeline that may be the plan is
simulated on all its ranks, and its simulated step decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from time import perf_counter
from typing import NamedTuple

from shardwright.cluster import Cluster
from shardwright.errors import ClusterError, Infeasible, LoweringError, PlanError, ProblemError, ShardwrightError
from shardwright.graph import Graph
from shardwright.graph.shorten import longest_run, shortened
from shardwright.planner.cutting import microbatch_counts
from shardwright.planner.dealing_out import with_shares
from shardwright.planner.delivering import deliver
from shardwright.planner.judging import NEARLY, judge
from shardwright.planner.options import Options, Progress
from shardwright.planner.planning import PIPELINES_NOT_SEARCHED, plan_graph
from shardwright.planner.proving import checked, summed_proof, warn
from shardwright.planner.staging import Composed, expected, shape_of
from shardwright.plans import Candidate, Plan, Proof
from shardwright.plans.proof import STEP
from shardwright.plans.spaces import PIPELINE
from shardwright.program.microbatches import batch_of, microbatches
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.pipelines import BASELINES, JointPlan, Model, NothingToGain, Pipelines
from shardwright.search.joint.readings import mostly_blocks
from shardwright.search.limits import more_room
from shardwright.units import bytes_text, seconds_text

ALWAYS, PROMISING, NEVER = "always", "promising", "never"

ONE_MESH = "one mesh"
"""The name of the best plan without stages, beside a pipeline."""

GAIN = 0.05
"""Pipelines that nobody asked for are searched where they could be faster by this share."""

LARGE = 1_000_000_000
"""So they are on several nodes of models with as many bytes of parameters: what smaller ones send hardly matters."""

FEW_BLOCKS, MANY_BLOCKS = 4, 16
"""Of a run of so many blocks only a few are cut into micro-batches to be priced."""

COUNTS = (4, 16, 64)
"""Numbers of micro-batches that are tried: for each, the largest divisor of the batch that is no larger."""

LESS = (0.9, 0.8)
"""Shares of the memory to search under where the sums of the fastest pipeline leave out too much of it."""
CORRECTIONS = 8
"""Searches with what the simulation said of the bytes of pipelines that were taken to fit and do not."""
FEW_CORRECTIONS = 2
"""So many of them in every other order of passes."""

Judged = Mapping[str, Composed]
"""By name, pipelines that were simulated."""

SUMMED = (
    "pipelines were searched, bounded and, but for those that could be the plan, compared by sums of their operators"
)


class TooLargeSimulatedError(LoweringError):
    """A pipeline that was taken to fit does not, simulated; ``stage_bytes`` are what the devices of each stage need."""

    stage_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Joint:
    """What the joint search came to for one model: the fastest pipeline in 1F1B, those of the recipes, the fastest in
    ``others`` (by order of passes), and how to deliver one."""

    graph: Graph
    cluster: Cluster
    options: Options
    space: Pipelines
    best: JointPlan
    recipes: Mapping[str, JointPlan | str]
    others: Mapping[str, JointPlan] = field(default_factory=dict)

    @property
    def room(self) -> float:
        """Bytes that a device may use."""
        return self.options.room(self.cluster.device)

    @cached_property
    def proof(self) -> Proof:
        """What is proved of the steps of all pipelines of the space, by sums; none that was found may lie below."""
        known = {PIPELINE: self.best, **self.recipes, **self.others}
        found = {name: one for name, one in known.items() if isinstance(one, JointPlan)}
        return summed_proof(self.space, self.best, found, self.room)

    def candidates(self, judged: Judged | None = None) -> tuple[Candidate, ...]:
        """Rows of the comparison: the best pipeline and every recipe's, as sums or as they were ``judged`` to be; and those
        in other orders of passes that were simulated."""
        judged = judged or {}
        found = {PIPELINE: self.best, **self.recipes, **{n: p for n, p in self.others.items() if n in judged}}
        return tuple(
            Candidate(name, (("stage", 1),), None, plan)
            if isinstance(plan, str)
            else judged.get(name, self.proposal(plan, name)).row()
            for name, plan in found.items()
        )

    def under(self, limits: Sequence[float]) -> list[JointPlan]:
        """The fastest pipelines within so many bytes per device each, where there are any; blocks are priced once."""
        plans = []
        for limit in limits:
            try:
                plans.append(self.space.best(limit))
            except Infeasible:
                continue
        return plans

    def proposal(self, found: JointPlan, name: str = "", ratio: float = 0.0) -> Composed:
        """A pipeline as a proposal; what is proved of all pipelines holds for a recipe's too. ``ratio``: simulating it is
        expected to change its sums so."""
        devices = sum(found.groups)
        fewer = [f"{devices} of {self.cluster.size} devices are used"] * (devices < self.cluster.size)
        text = f"by sums, in which nothing overlaps and nothing waits, a step takes {seconds_text(found.step_seconds)}"
        notes = (SUMMED, *fewer, text)
        return Composed(
            name=name or found.schedule,
            shape=shape_of(found),
            expected=expected(found),
            unhidden=max(NEARLY * found.unhidden_seconds, ratio * found.step_seconds),
            proof=self.proof,
            notes=notes,
            graph=self.graph,
            batch_norm=self.options.batch_norm,
            found=found,
        )

    def deliver(self, found: JointPlan, reference: str = "") -> Plan:
        """A pipeline as a plan that the runtime can run, checked.

        Raises
        ------
        LoweringError, PlanError
            When the runtime could not run it, or it does not fit; the message says why.
        """
        plan = deliver(self.graph, self.cluster, self.options, self.proposal(found), reference)
        if not plan.prediction.fits:
            peak = plan.prediction.memory_bytes
            error = TooLargeSimulatedError(
                f"simulated, a device of this pipeline needs {bytes_text(peak)}, more than {bytes_text(self.room)}.",
                more_room(self.cluster.device, self.room, peak),
            )
            error.stage_bytes = tuple(s.prediction.memory_bytes for s in plan.stages if s.prediction is not None)
            raise error
        plan = replace(plan, search=PIPELINE, candidates=self.candidates())
        return replace(plan, proof=checked(plan.proof, plan, found.schedule))

    def simulated(self, proposal: Composed, reference: str = "") -> Composed:
        """A proposal with the plan that it comes to and its prediction, or with the reason why it cannot be run."""
        try:
            plan = self.deliver(proposal.found, reference)
        except (LoweringError, PlanError) as error:
            return replace(proposal, refusal=error)
        return replace(proposal, plan=plan, prediction=plan.prediction)

    def fastest(
        self, reference: str = "", beat: float = inf, say: Progress | None = None
    ) -> tuple[Plan | None, Judged]:
        """The pipeline whose simulated step is shortest, as a plan, and every one that was simulated.

        Sums leave out what overlaps and what waits, so every pipeline is simulated whose step may be below ``beat`` and
        the best simulated one, were all traffic of its parameters hidden; nothing is found where none is below ``beat``.
        Where the fastest does not fit, those found under a little less memory are tried. Then other orders of passes
        compete, those that were searched and those of the best so far with the same strategies: the most promising of each
        that is faster, if simulating changes it as it changed the best (where nothing was simulated: if all its traffic
        hides). Where none is, it stays 1F1B. What does not fit is searched again with the bytes that the simulation found.

        Raises
        ------
        LoweringError, PlanError
            When some may be below and none can be run; the message is about the first.
        """
        known = {PIPELINE: self.best, **{n: p for n, p in self.recipes.items() if isinstance(p, JointPlan)}}
        judged: dict[str, Composed] = {}
        tried: dict[tuple[object, ...], Composed] = {}

        def simulated(proposal: Composed) -> Composed:
            stages = [
                (s.last_block, s.first_device, id(s.strategy), s.recomputed_blocks, s.lightly_blocks)
                for s in proposal.found.stages
            ]
            key = (proposal.found.microbatch, proposal.found.schedule if len(stages) > 1 else "", *stages)
            if key not in tried:
                if say is not None:
                    say(f"simulating a pipeline of {len(stages)} stages: {proposal.name}")
                tried[key] = self.simulated(proposal, reference)
            return replace(tried[key], name=proposal.name)

        def consider(proposals: Iterable[Composed]) -> list[Composed]:
            """Judge them; those that were not simulated before."""
            nonlocal beat
            before = len(tried)
            for found in judge(proposals, simulated, beat):
                other, beat = judged.get(found.name), min(beat, found.seconds)
                slower = other is not None and not other.refusal and other.seconds <= found.seconds
                judged[found.name] = other if other is not None and slower else found
            return list(tried.values())[before:]

        def until_it_fits(
            fresh: Sequence[Composed], most: int, ratio: float, search: Callable[[Pipelines], JointPlan | None]
        ) -> None:
            space = self.space
            for _ in range(most):
                refused = [one for one in fresh if one.refusal is not None][-1:]
                if not refused or not isinstance(refused[0].refusal, TooLargeSimulatedError):
                    return
                space = space.corrected(_what_they_need(refused[0].found, refused[0].refusal))
                found = search(space)
                fresh = [] if found is None else consider([self.proposal(found, refused[0].name, ratio)])

        ranked = sorted(known.items(), key=lambda pair: pair[1].step_seconds)
        fresh = consider(self.proposal(found, name) for name, found in ranked)
        for share in LESS:
            for found in self.under([share * self.room]) if self._refused(judged) else ():
                fresh += consider([self.proposal(found, PIPELINE)])
        if self._refused(judged):
            until_it_fits(fresh, CORRECTIONS, 0.0, Pipelines.best_or_none)
        run = [one for one in tried.values() if one.refusal is None]
        winner = min(run, key=lambda one: one.seconds, default=None)
        pipeline = None if self._refused(judged) else judged.get(PIPELINE)
        for ratio, found in self._in_other_orders(winner, pipeline, beat):
            search = partial(Pipelines.ordered, order=found.schedule)
            until_it_fits(consider([self.proposal(found, ratio=ratio)]), FEW_CORRECTIONS, ratio, search)
        winner = min(tried.values(), key=lambda one: one.seconds, default=None)
        if winner is None:
            return None, judged
        if winner.plan is None:
            assert winner.refusal is not None
            raise winner.refusal
        notes = (*winner.plan.notes, *self._orders(winner, judged))
        return replace(winner.plan, candidates=(winner.row("auto"),), notes=notes), judged

    def _refused(self, judged: Judged) -> bool:
        """Whether the fastest pipeline was simulated and cannot be run."""
        return PIPELINE in judged and judged[PIPELINE].refusal is not None

    def _orders(self, winner: Composed, judged: Judged) -> list[str]:
        """A note: which order of passes was taken, and what the others take."""
        summed = {"1f1b": self.best.step_seconds, **{name: plan.step_seconds for name, plan in self.others.items()}}
        told = {name: f"{seconds_text(seconds)} by sums" for name, seconds in summed.items()}
        for name, one in judged.items():
            if name == PIPELINE or name in OTHERS:
                text = seconds_text(one.seconds) if one.refusal is None else one.refusal.message
                told["1f1b" if name == PIPELINE else name] = text
        shown = [f"{name} {text}" for name, text in told.items() if name != winner.found.schedule]
        if len(winner.found.stages) == 1 or not shown:
            return []
        return [f"the passes run in the order {winner.found.schedule}; other orders: {', '.join(shown)}"]

    def _in_other_orders(
        self, winner: Composed | None, pipeline: Composed | None, beat: float
    ) -> list[tuple[float, JointPlan]]:
        """What is worth simulating in other orders of passes, the most promising first: if simulating changes it as it
        changed the pipeline from which it comes, by the first number."""
        known = [plan for plan in (self.best, *self.recipes.values()) if isinstance(plan, JointPlan)]
        like = known if winner is None else [winner.found]
        changed = 0.0 if winner is None else winner.changed
        ours = changed if pipeline is None else pipeline.seconds / self.best.step_seconds
        same = (self.space.same_in(name, plan) for plan in like for name in OTHERS)
        expected = [(ours, plan) for plan in self.others.values()] + [(changed, plan) for plan in filter(None, same)]
        promising = [
            (ratio * plan.step_seconds, plan.step_seconds, ratio, plan)
            for ratio, plan in expected
            if self.proposal(plan, ratio=ratio).unhidden < beat
        ]
        first: dict[str, tuple[float, JointPlan]] = {}  # of every order
        for _, _, ratio, plan in sorted(promising, key=lambda one: one[:2]):
            first.setdefault(plan.schedule, (ratio, plan))
        return list(first.values())


def _what_they_need(found: JointPlan, error: TooLargeSimulatedError) -> dict[int, tuple[float, float]]:
    """By strategy (its id), what a block of each stage holds beyond its price for a micro-batch under way, and saves by
    recomputing: the search assumes layouts in which results are kept, which a program may have to keep in others. What
    stages without recomputed blocks hold beyond it lies within blocks; where some are recomputed, these save less."""
    more: dict[int, tuple[float, float]] = {}
    blocks, recomputed = Counter[int](), Counter[int]()  # of a group of devices, which may run several stages
    for stage in found.stages:
        blocks[stage.first_device] += stage.last_block - stage.first_block
        recomputed[stage.first_device] += stage.recomputed_blocks + stage.lightly_blocks
    for stage, needed in zip(found.stages, error.stage_bytes, strict=True):
        excess = (needed - stage.memory_bytes) / max(stage.holds, 1)
        held, saved = more.get(id(stage.strategy), (0.0, 0.0))
        if excess <= 0.0:
            continue
        if again := recomputed[stage.first_device]:
            more[id(stage.strategy)] = held, min(saved, -excess / again)
        else:
            each = excess / blocks[stage.first_device]
            more[id(stage.strategy)] = max(held, each), saved if saved < 0.0 else max(saved, each)
    return more


def find_pipelines(
    graph: Graph, cluster: Cluster, options: Options, names: Sequence[str] = BASELINES, below: float = inf
) -> Joint:
    """Search pipelines of a captured graph, and those of the recipes ``names``; of micro-batches whose computation alone
    keeps all devices busy for ``below`` seconds, none.

    Raises
    ------
    Infeasible
        When the model has no pipeline here: nothing to cut apart, no micro-batches, or nothing that fits; it says which.

    Example
    -------
    >>> find_pipelines(graph, parse_cluster("8xH100"), Options()).best.step_seconds  # doctest: +SKIP
    """
    started = perf_counter()
    if options.constrained:
        raise Infeasible(
            "Pipelines are not searched under pins and prohibitions.",
            "Leave them out, or say how many stages: --stages 4.",
        )
    pieces = _pieces(graph, options.batch_norm)
    try:
        space = Pipelines(
            _model(graph, cluster, options) or Model(pieces.graph_at),
            cluster,
            batch=pieces.batch,
            microbatch_sizes=pieces.sizes,
            conditions=options.conditions,
            max_axes=options.max_axes,
            below=below,
        )
    except (LoweringError, ProblemError) as error:
        raise Infeasible(f"There is no pipeline of this model: {error.message}", error.remedy) from None
    best, recipes, others = space.compared(names)
    return Joint(
        graph, cluster, options, space, replace(best, search_seconds=perf_counter() - started), recipes, others
    )


def _model(graph: Graph, cluster: Cluster, options: Options) -> Model | None:
    """A deep model by a few of its blocks, all that pricing looks at; nothing where it is more than a run of them."""
    run, short = longest_run(graph), shortened(graph, FEW_BLOCKS)
    if run is None or short is None or run.count < MANY_BLOCKS:
        return None
    left = longest_run(short)
    if left is None or (left.start, left.period, left.count) != (run.start, run.period, FEW_BLOCKS):
        return None  # another run is longer than what is left of this one
    pieces = _pieces(short, options.batch_norm)
    if not mostly_blocks(pieces.graph_at(pieces.sizes[0]), cluster, options.optimizer, run.count):
        return None
    return Model(pieces.graph_at, run.count)


class _Pieces(NamedTuple):
    """The micro-batches that are tried: their sizes, and the graph of one."""

    batch: int
    sizes: tuple[int, ...]
    graph_at: Callable[[int], Graph]


def _pieces(graph: Graph, batch_norm: str) -> _Pieces:
    if not graph.training:
        raise Infeasible("There are no pipelines of a model in evaluation mode.", "Call model.train() before planning.")
    try:
        batch = batch_of(graph)
        counts = microbatch_counts(batch, COUNTS)
    except LoweringError as error:
        raise Infeasible(f"There is no pipeline of this model: {error.message}", error.remedy) from None
    if not counts:
        raise Infeasible(
            f"There is no pipeline of this model: a batch of {batch} has no equal micro-batches.",
            "Plan with a larger batch.",
        )
    sizes = tuple(batch // count for count in counts)
    return _Pieces(batch, sizes, lambda size: microbatches(graph, batch // size, batch_norm).graphs[size])


def plan_jointly(
    graph: Graph,
    cluster: Cluster,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    reference: str = "",
    pipelines: str = ALWAYS,
) -> tuple[Plan, Joint | None]:
    """The faster of the best plan on one mesh and the best pipeline, and what was found out about pipelines.

    A pipeline that the runtime cannot run is never the plan; a note says what it would take and what is in the way.
    ``pipelines``: search them ``always``, ``never``, or where they are ``promising``: nothing fits on one mesh, or there is
    none (unlike nodes); or a :data:`LARGE` model has several nodes, or what fits recomputes, and computation alone would
    take so much less time that they could be faster by :data:`GAIN`.

    Example
    -------
    >>> plan_jointly(graph, parse_cluster("8xH100"))[0].stages                                   # doctest: +SKIP
    """
    if pipelines not in (ALWAYS, PROMISING, NEVER):
        raise ShardwrightError(f"There is no {pipelines!r} for pipelines.", f"Known: {ALWAYS}, {PROMISING}, {NEVER}.")
    options, say = options or Options(), progress or (lambda text: None)
    asked = options.search == "auto" and not options.constrained and cluster.size > 1
    flat, refused = None, None
    try:
        flat = plan_graph(graph, cluster, options, progress=progress, reference=reference)
        if asked:
            flat = with_shares(flat, graph, cluster, options, progress, reference)
    except (Infeasible, ClusterError) as error:  # nothing fits, or unlike nodes have no mesh
        if pipelines == NEVER:
            raise
        refused = error
    if refused is not None and pipelines == PROMISING and not asked:
        raise refused
    below = inf
    if flat is not None and pipelines != ALWAYS:
        spread = len(cluster.nodes) > 1 and graph.parameter_bytes >= LARGE
        if pipelines == NEVER or not asked or not (spread or flat.stages[0].strategy.recomputed):
            return flat, None
        below = (1 - GAIN) * flat.prediction.step_seconds
    say("searching pipelines")
    try:
        joint = find_pipelines(graph, cluster, options, below=below)
    except Infeasible as error:
        if flat is None and refused is not None:
            remedy = refused.remedy.removesuffix(PIPELINES_NOT_SEARCHED)
            raise Infeasible(refused.message, f"{remedy}Pipelines: {error.message}") from None
        assert flat is not None
        told = pipelines == ALWAYS or isinstance(error, NothingToGain)
        return replace(flat, notes=(*flat.notes, *([error.message] if told else []))), None
    beat = inf if flat is None else flat.prediction.step_seconds
    try:
        found, judged = joint.fastest(reference, beat, say)
    except (LoweringError, PlanError) as error:
        if flat is None:
            raise
        text = f"a pipeline of {joint.best.step_seconds:.4g} s a step was found that cannot be run: {error.message}"
        return replace(_beside(flat, joint), notes=(*flat.notes, text)), joint
    if flat is not None and (found is None or beat <= found.prediction.step_seconds):
        return _beside(flat, joint, judged), joint
    assert found is not None  # it need not be below anything
    rows = found.candidates
    if flat is not None:
        rows += (replace(flat.candidates[0], name=ONE_MESH), *flat.candidates[1:])
        found = replace(found, proof=found.proof.beside(flat.proof.about(STEP)))
    return _warned(replace(found, candidates=(*rows, *joint.candidates(judged)[1:])), joint), joint


def beside_one_mesh(
    plan: Plan,
    cluster: Cluster,
    options: Options | None = None,
    *,
    graph: Graph,
    progress: Progress | None = None,
) -> Plan:
    """A pipeline that was asked for, with the best plan on one mesh and the recipes in its comparison.

    >>> [row.name for row in beside_one_mesh(plan, cluster, graph=graph).candidates]                # doctest: +SKIP
    ['1f1b, 16 micro-batches', 'one mesh', 'data-parallel', 'zero-1', 'zero-2', 'fsdp', 'megatron']
    """
    try:
        flat = plan_graph(graph, cluster, options or Options(), progress=progress)
    except ShardwrightError as refused:  # nothing fits, or unlike nodes have no mesh
        rows = [Candidate(ONE_MESH, plan.stages[0].strategy.axes, None, refused.message)]
    else:
        rows = [replace(flat.candidates[0], name=ONE_MESH), *flat.candidates[1:]]
    return replace(plan, candidates=(*plan.candidates, *rows))


def _beside(flat: Plan, joint: Joint, judged: Judged | None = None) -> Plan:
    """A plan on one mesh, with what was found out about pipelines."""
    proof = flat.proof.beside(joint.proof)
    return _warned(replace(flat, candidates=(*flat.candidates, *joint.candidates(judged)), proof=proof), joint)


def _warned(plan: Plan, joint: Joint) -> Plan:
    """The plan, once it was said that what was taken for a bound on pipelines is none."""
    if joint.proof.dropped:
        warn(plan)
    return plan
