"""Does a plan compute the same numbers as one device? The original eager module against the program, step by step.

All ranks train the program; rank 0 also runs the unmodified module (not the exported one, not our graph) by itself from the
same weights on the same batch. Compared are, on every rank that holds them, the loss and all outputs of every step, every
gradient of every step (in the last one those of the inputs too), every parameter after every step and the buffers at the end
(:mod:`shardwright.verification.compare` says how far they may differ). This is done for the plan and for strategies that are
forced to cut (:mod:`shardwright.verification.forced`), in float64 first, where every mistake stands out of the rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.distributed as dist

from shardwright.cluster import Cluster, Mesh, meshes, parse_cluster
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.errors import PlanError, RunError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.lowering.collectives import Ledger
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.plans.plan import Signature
from shardwright.program.microbatches import WHOLE
from shardwright.runtime.launch import run_locally
from shardwright.runtime.parallelize import parallelize
from shardwright.verification.batches import Passes, Steps, shortened, told, varied
from shardwright.verification.compare import Verification
from shardwright.verification.draws import drawing
from shardwright.verification.forced import blocks_of, cut_by, forced_strategies, frugal
from shardwright.verification.forced_pipelines import MICROBATCHES, drawn_by_rows, forced_pipeline
from shardwright.verification.judging import dtype_of, judged, truth_of
from shardwright.verification.prepare import (
    Build,
    Subject,
    all_double,
    built,
    default_double,
    quieted,
    subject,
    widened,
)
from shardwright.verification.recorded import LOSS_SCALE, SMALL_UPDATES, Run, train, training_of
from shardwright.verification.shown import Shown
from shardwright.verification.streams import judged_draws, looked_at, variants

if TYPE_CHECKING:
    from shardwright.planner import Options, Pipelining


def check(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: Union[Plan, Strategy],
    *,
    steps: Union[int, Steps] = 3,
    graph: Graph | None = None,
    truth: Run | None = None,
    name: str = "found",
    priced: Mesh | None = None,
    shown: Shown | None = None,
) -> Verification | None:
    """Compare, inside a process group, on every rank of the plan; rank 0 gets the answer, the others ``None``.

    ``steps``: how many, or the batches of every step. ``truth`` (:func:`truth_of` the same steps, trained alike) saves
    rank 0 the run on one process where several plans of a float64 model are compared; ``priced`` are the prices that route
    changes of layout, where not the plan's; ``shown`` is the graph that returns its draws, which then are those of one
    process too.
    """
    first, dtype = dist.get_rank() == 0, dtype_of(model)
    if isinstance(plan, Plan) and plan.batch_norm != WHOLE:
        raise RunError(
            f"The plan asks for batch norms {plan.batch_norm}, which give other numbers than one process on the batch.",
            "Verify the model with one micro-batch, or compare with one process that takes the pieces in turn.",
        )
    if shown is not None:
        graph = shown.graph
        plan = replace(plan, signature=Signature.of(graph)) if isinstance(plan, Plan) else plan
    with all_double(dtype == torch.float64):
        asked: dict[str, Any] = {} if priced is None else {"decisions": PricedDecisions(priced)}
        whole = isinstance(plan, Strategy) or plan.whole
        asked |= {"outputs": "dtensor"} if whole else {}
        parallel = parallelize(model, plan, args, kwargs, keep=True, graph=graph, **asked)
        if isinstance(steps, int):
            steps = varied(model, parallel.graph, args, kwargs, steps, torch.is_grad_enabled())
    with default_double(dtype == torch.float64), torch.random.fork_rng(devices=[]):  # as the graph was captured
        torch.manual_seed(0)  # ranks of different stages have drawn different numbers before
        # Nothing goes back through what is computed of a whole batch before it is cut into micro-batches.
        inputs = parallel._pipeline.micro.prepared is None
        how = training_of(parallel.graph)
        run = train(parallel, steps, keep=first, together=True, shows=shown is not None, inputs=inputs, how=how)
    if not first:
        return None
    strategy = parallel.plan.stages[0].strategy if whole else None
    found = judged(model, steps, run, truth, inputs, how)
    if shown is not None:
        passes = [draws for step in run.draws for draws in step]
        found += judged_draws(shown.graph, shown.operators, strategy, passes)
    return Verification(
        tuple(found),
        tuple(run.losses),
        str(dtype).removeprefix("torch."),
        {} if run.sent is None else sent(run.sent),
        name,
        None if strategy is None else cut_by(parallel.graph, strategy),
    )


def sent(performed: Ledger) -> dict[str, tuple[int, int]]:
    """What was communicated: per kind, how often and how many bytes."""
    amounts: dict[str, tuple[int, int]] = {}
    for (kind, group), count in performed.steps.items():
        known = amounts.get(kind, (0, 0))
        amounts[kind] = (known[0] + count, known[1] + performed.bytes[kind, group])
    return amounts


DTYPES = {"float64": (True,), "float32": (False,), "both": (True, False)}
"""In which precisions to compare; ``float32`` stands for the precision that the model is built in."""


@dataclass(frozen=True)
class Verified:
    """A plan and what was compared: the plan itself (``found``) and the strategies that are forced to cut.

    ``compared`` says in words what the runs were given and did, ``changes`` what was done to the model and its inputs so
    that they can be compared.
    """

    plan: Plan
    runs: tuple[Verification, ...]
    changes: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return bool(self.runs) and all(run.agrees for run in self.runs)

    @property
    def cuts(self) -> bool:
        """Whether anything was cut at all; on one process nothing can be."""
        return (
            self.plan.devices == 1
            or not self.plan.whole
            or any(run.cut is not None and run.cut.operators for run in self.runs)
        )

    def as_dict(self) -> dict[str, Any]:
        about = {"agrees": self.agrees, "search": self.plan.search, "shape": self.plan.shape}
        about |= {"processes": self.plan.devices, "changes": list(self.changes)}
        about["compared"] = list(self.compared)
        about["dtype"] = " and ".join(dict.fromkeys(run.dtype for run in self.runs))
        return {**about, "strategies": [run.as_dict() for run in self.runs]}


def verify(
    build: Build,
    *,
    cluster: Union[Cluster, str] = "local:2",
    search: str = "auto",
    options: Options | None = None,
    stages: Pipelining | str | None = None,
    steps: int = 3,
    dtype: str = "both",
    seconds: float = 1800.0,
    plan: Plan | None = None,
    forced: bool = True,
    inference: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Verified:
    """Plan a model, train it on local processes and compare with one process.

    Parameters
    ----------
    build
        A picklable function that gives ``(model, args, kwargs)``, alike in every process (it is called with a fixed seed).
    cluster
        As many local processes are started as it has devices.
    search
        ``"auto"`` or the name of a baseline, as for :func:`shardwright.plan`.
    options
        What else is asked of the plan: pins, a memory limit, recomputation, ….
    stages
        The stages, micro-batches and schedule that are asked for, or ``"auto"``: the faster of one mesh and any pipeline.
    dtype
        ``"float64"``, in which everything must agree within 1e-9, ``"float32"`` for the model's own precision, or
        ``"both"``: all strategies in double precision, then the plan as it will run.
    plan
        A plan to verify in place of a new one.
    forced
        Whether strategies that are forced to cut (batch, features, sequence, reductions, halos), to recompute and to run as
        a pipeline are verified too.
    inference
        Call the model, without gradients, instead of training it: outputs and buffers are compared (``build`` gives a model
        in evaluation mode).

    Examples
    --------
    >>> answer = verify(functools.partial(build_my_model, 12), cluster="local:4")             # doctest: +SKIP
    >>> answer.agrees, str(answer.runs[0].cut)                                                # doctest: +SKIP
    (True, '47 of 49 operators, 99 % of the work')
    """
    say = progress or (lambda text: None)
    say("capturing the model")
    subjects = {double: subject(build, double, plan is not None) for double in DTYPES[dtype]}
    graphs = {double: found.graph for double, found in subjects.items()}
    del subjects
    known = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if plan is not None:
        plans = _given(plan, build, graphs)
    else:
        from shardwright.planner import Options

        asked = replace(options or Options(), search=search, baselines=(), fewer_devices=False)
        own = _planned(graphs[min(graphs)], known, asked, stages, say)
        plans = {d: _for(own, g) or _planned(g, known, asked, stages, say) for d, g in graphs.items()}
    processes = next(iter(plans.values())).devices
    say(f"{'calling' if inference else 'training'} {steps} steps on {processes} processes and on one")
    told_all = (steps, forced, plan is not None, inference)
    answers = run_locally(verify_rank, processes, build, plans, *told_all, seconds=seconds)
    assert isinstance(answers[0], Verified)
    return answers[0]


def _given(plan: Plan, build: Build, graphs: Mapping[bool, Graph]) -> dict[bool, Plan]:
    """A given plan for every precision in which it speaks of the same operators; it must be this model's in one of them."""
    real = []
    for double in sorted({False, *graphs}):  # a plan in the model's own precision is verified in float64 alone, too
        model, args, kwargs = built(build)
        with all_double(double):
            real.append(capture(*(widened(model, args, kwargs) if double else (model, args, kwargs))))
    if not any(Signature.of(graph) == plan.signature for graph in real):
        plan.check(real[0])
    return {d: fitting for d, g in graphs.items() if (fitting := _for(plan, g)) is not None}


def _planned(
    graph: Graph, cluster: Cluster, options: Options, stages: Pipelining | str | None, say: Callable[[str], None]
) -> Plan:
    from shardwright.planner import plan_graph, plan_jointly, plan_pipeline  # only here: running a plan needs no solver

    if stages is None:
        return plan_graph(graph, cluster, options, progress=say)
    if isinstance(stages, str):
        return plan_jointly(graph, cluster, options, progress=say)[0]
    return plan_pipeline(graph, cluster, stages, options, progress=say)


def _for(plan: Plan, graph: Graph) -> Plan | None:
    """The plan for a graph of other dtypes, where it speaks of exactly its operators and sources."""
    own = replace(plan, signature=Signature.of(graph))
    try:
        own.check(graph)
    except PlanError:
        return None
    return own


def verify_rank(
    build: Build, plans: Mapping[bool, Plan], steps: int, forced: bool, planned: bool = False, inference: bool = False
) -> Verified | None:
    """What :func:`verify` runs on every rank of a process group; rank 0 gets the answer."""
    with torch.set_grad_enabled(not inference):
        return _verified(build, plans, steps, forced, planned)


def _verified(build: Build, plans: Mapping[bool, Plan], steps: int, forced: bool, planned: bool) -> Verified | None:
    """``plans`` holds the plan to verify in double precision (true) and in the model's own (false), where there is one;
    ``planned`` says that the user gave it.
    """
    runs: list[Verification] = []
    changes: dict[str, None] = {}
    compared: dict[str, None] = {}
    first = dist.get_rank() == 0
    for double, plan in sorted(plans.items(), reverse=True):
        it = subject(build, double, planned)
        devices, forced = plan.devices, forced and plan.whole
        count = len(it.shown.operators) if it.shown is not None else 0
        if it.shown is not None and not plan.whole and not drawn_by_rows(it.shown.graph, plan.microbatches, count):
            it, count = quieted(it), 0
        changes |= dict.fromkeys(it.changes)
        batches = it.steps(steps)
        wanted: list[tuple[str, Union[Plan, Strategy]]] = [("found", plan)]
        if forced and devices > 1 and double == max(plans):
            others, words = forced_on(it, devices)
            wanted += others
            compared |= dict.fromkeys(words)
        compared |= dict.fromkeys(_given_in_words(batches, count, it.graph))
        own = first and double and it.shown is None
        truths = functools.cache(
            lambda passes: truth_of(it.model, shortened(batches, passes), training_of(it.graph))  # noqa: B023
        )
        for name, chosen in wanted:
            passes = PASSES.get(name, "one")
            answer = check(
                it.model,
                it.args,
                it.kwargs,
                chosen,
                steps=shortened(batches, passes),
                graph=it.graph,
                truth=truths(passes) if own else None,
                name=name,
                priced=frugal(forced_mesh(devices)) if isinstance(chosen, Strategy) else None,
                shown=it.shown,
            )
            runs += [answer] if answer is not None else []
        if not all_agree(runs):  # what is wrong in double precision need not be looked at again
            break
    if forced and devices > 1:
        runs += streams(build, devices, looked_at_already=it.shown is not None)
    return Verified(plan, tuple(runs), tuple(changes), tuple(compared)) if first else None


PIPELINE = "two stages, recomputed lightly"
PASSES: dict[str, Passes] = {"found": "all", "batch": "two", PIPELINE: "last"}
"""What of the batches a run is given; the others take one pass a step."""


def forced_on(it: Subject, devices: int) -> tuple[list[tuple[str, Union[Plan, Strategy]]], list[str]]:
    """What a model is forced to do on so many processes: strategies and a pipeline by name, and in words what they add."""
    graph, draws = (it.graph, 0) if it.shown is None else (it.shown.graph, len(it.shown.operators))
    wanted: list[tuple[str, Union[Plan, Strategy]]] = [*forced_strategies(graph, forced_mesh(devices))]
    if not graph.training:
        return wanted, []
    blocks = len(blocks_of(graph)[::2])
    pipeline, why = forced_pipeline(graph, devices, draws)
    if pipeline is not None:
        wanted.append((PIPELINE, pipeline))
    return wanted, [
        f"Where parameters are sharded {blocks} of {len(blocks_of(graph))} blocks are recomputed"
        if blocks
        else "Nothing is recomputed, as no module has several operators",
        f"The pipeline runs {MICROBATCHES} micro-batches a pass"
        if pipeline is not None
        else f"No pipeline is run: {why.rstrip('.')}",
    ]


def _given_in_words(batches: Steps, draws: int, graph: Graph) -> list[str]:
    """What every run was given."""
    scale = f", losses scaled by {LOSS_SCALE}" if torch.is_grad_enabled() else ""
    drawn = f"One process is given the random numbers that the others draw ({draws} operators), anew in every pass"
    small = "Updates are a thousandth of the usual, so that what the model decided on its data stays decided"
    careful = torch.is_grad_enabled() and training_of(graph) is SMALL_UPDATES
    return [told(batches) + scale] + [drawn] * bool(draws) + [small] * careful


def forced_mesh(devices: int) -> Mesh:
    """The mesh of forced strategies: two axes where the number of processes has two factors."""
    return meshes(parse_cluster(f"local:{devices}"), max_axes=2)[-1]


def streams(build: Build, devices: int, looked_at_already: bool = False) -> list[Verification]:
    """The random numbers that the model draws when it is cut along the batch, looked at; nothing if it draws none.

    ``looked_at_already``: the runs that were compared have shown what they draw where it is cut along all axes.
    """
    model, args, kwargs = built(build)
    graph = capture(model, args, kwargs)
    if not drawing(graph):
        return []
    strategy = next(iter(forced_strategies(graph, forced_mesh(devices))))[1]
    runs = []
    for name, variant in list(variants(graph, strategy))[looked_at_already:]:
        found = looked_at(model, args, kwargs, graph, variant)
        if found:
            dtype = str(dtype_of(model)).removeprefix("torch.")
            runs.append(Verification(tuple(found), (), dtype, {}, f"random numbers, {name}", cut_by(graph, variant)))
    return runs


def all_agree(runs: Sequence[Verification]) -> bool:
    """Rank 0's opinion, known to all."""
    box = [all(run.agrees for run in runs)]
    dist.broadcast_object_list(box)
    return box[0]
