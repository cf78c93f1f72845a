"""Does a plan compute the same numbers as one device? The original eager module against the program, step by step.

All ranks train the program; rank 0 also runs the unmodified module (not the exported one, not our graph) by itself from the
same weights on the same batch. Compared are, on every rank that holds them, the loss and all outputs of every step, every
gradient of every step (in the last one those of the inputs too), every parameter after every step and the buffers at the end
(:mod:`shardwright.verification.compare` says how far they may differ). This is done for the plan and for strategies that are
forced to cut (:mod:`shardwright.verification.forced`), in float64 first, where every mistake stands out of the rounding.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright._torch_compat import map_tree
from shardwright.cluster import Cluster, Mesh, meshes, parse_cluster
from shardwright.costs.deciding import ByPrice
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.lowering.collectives import Ledger, counting
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.plans.plan import Signature
from shardwright.program.microbatches import WHOLE
from shardwright.runtime.launch import run_locally
from shardwright.runtime.parallelize import parallelize
from shardwright.verification.compare import TIMES, Comparison, Verification, compare
from shardwright.verification.decisions import Decisions, Jump, Question, jumps
from shardwright.verification.forced import cut_by, forced_strategies, frugal
from shardwright.verification.gathering import distance
from shardwright.verification.kinks import beside_kinks, from_its_own_side
from shardwright.verification.precision import all_double, default_double
from shardwright.verification.prepare import Build, built, subject, widened
from shardwright.verification.recorded import Run, retraced, train
from shardwright.verification.streams import drawing, looked_at, variants
from shardwright.verification.yardstick import drawn_again

Tensors = Mapping[str, Tensor]


def truth_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int) -> Run:
    """The unmodified model trained on this process in float64; the model itself stays as it is."""
    twin, own_args, own_kwargs = _twin(model, args, kwargs, wide=True)
    with all_double():
        return train(twin, own_args, own_kwargs, steps, keep=True)


def judged(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    run: Run,
    truth: Run | None = None,
    inputs: bool = True,
) -> list[Comparison]:
    """A run from the weights of ``model`` against the model on this process, in the run's precision.

    ``inputs``: whether the run gives the gradients of its inputs.
    """
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if _dtype(model) == torch.float64:
        truth = truth or truth_of(model, args, kwargs, len(run.losses))
        _finite(truth)
        whole = compare(truth if inputs else _without_inputs(truth), run, start)
        if all(item.agrees for item in whole):
            return whole
        # AdamW may have made steps of rounding: then every step is judged from where the run began it, as strictly.
        along, _ = _traced(model, args, kwargs, run, wide=True)
        stepwise = compare(along if inputs else _without_inputs(along), run, start)
        return stepwise if all(item.agrees for item in stepwise) else whole

    def gradients_at(parameters: Tensors, turned: Sequence[Jump]) -> Tensors:
        with all_double(), Decisions(turned):
            return retraced(*_twin(model, args, kwargs, wide=True), Run(before=[dict(parameters)])).gradients[0]

    def alone(path: Run) -> tuple[Run, Run, list[list[Jump]]]:
        """The truth along a run's parameters, one process in the model's precision, and the answers it leaves open."""
        one, rounded = _traced(model, args, kwargs, path, wide=False)
        truth, exact = _traced(model, args, kwargs, path, wide=True)
        answers = [jumps(true, other, TIMES) for true, other in zip(exact, rounded, strict=True)]
        return truth, from_its_own_side(one, truth, answers, gradients_at), answers

    def errors_at(parameters: Tensors) -> dict[str, float]:
        truth, one, _ = alone(Run(before=[dict(parameters)]))
        return {name: distance(truth.gradients[0].get(name), own) for name, own in one.gradients[0].items()}

    truth, one, answers = alone(run)
    _finite(truth)
    if not inputs:
        truth, one = _without_inputs(truth), _without_inputs(one)
    found = drawn_again(compare(truth, run, start, one), run, errors_at)
    return beside_kinks(found, run, answers, gradients_at)


def _without_inputs(run: Run) -> Run:
    kept = [{name: x for name, x in step.items() if not name.startswith("input ")} for step in run.gradients]
    return replace(run, gradients=kept)


def _finite(truth: Run) -> None:
    for step, loss in enumerate(truth.losses, 1):
        if not math.isfinite(loss):
            raise RunError(
                f"The loss of step {step} is {loss} on one process in float64, so that nothing can be compared.",
                "Give a model and a batch that one process can train on, or fewer steps.",
            )


def _traced(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run, wide: bool
) -> tuple[Run, list[list[Question]]]:
    """The model on this process where every step starts from the parameters of ``run``, and what it decided per step."""
    twin = _twin(model, args, kwargs, wide)
    found, asked = Run(before=run.before, parameters=run.parameters), []
    for number, before in enumerate(run.before, 1):
        with all_double(wide), Decisions() as decisions:
            step = retraced(*twin, Run(before=[before]), inputs=number == len(run.before))
        asked.append(decisions.questions)
        found.losses += step.losses
        found.outputs += step.outputs
        found.gradients += step.gradients
        found.buffers = step.buffers
    return found, asked


def check(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: Union[Plan, Strategy],
    *,
    steps: int = 3,
    mesh: DeviceMesh | None = None,
    graph: Graph | None = None,
    truth: Run | None = None,
    name: str = "found",
    priced: Mesh | None = None,
) -> Verification | None:
    """Compare, inside a process group, on every rank of the plan; rank 0 gets the answer, the others ``None``.

    ``truth`` (:func:`truth_of`) saves rank 0 the run on one process where several plans of a float64 model are compared;
    ``priced`` are the prices that route changes of layout, where not the plan's.
    """
    first, dtype = dist.get_rank() == 0, _dtype(model)
    with all_double(dtype == torch.float64):
        decisions = None if priced is None else ByPrice(priced)
        asked: dict[str, Any] = {"mesh": mesh, "decisions": decisions, "outputs": "dtensor"}
        staged = isinstance(plan, Plan) and bool(plan.stages)
        if isinstance(plan, Plan) and plan.batch_norm != WHOLE:
            raise RunError(
                f"The plan asks for batch norms {plan.batch_norm}, which give other numbers than one process on the batch.",
                "Verify the model with one micro-batch, or compare with one process that takes the pieces in turn.",
            )
        parallel = parallelize(model, plan, args, kwargs, keep=True, graph=graph, **({} if staged else asked))
    with counting() as performed, default_double(dtype == torch.float64):  # as the graph was captured
        run = train(parallel, tuple(args), kwargs, steps, keep=first, together=True)
    if not first:
        return None
    strategy = plan.strategy if isinstance(plan, Plan) else plan
    return Verification(
        tuple(judged(model, tuple(args), kwargs, run, truth, inputs=not staged)),
        tuple(run.losses),
        str(dtype).removeprefix("torch."),
        per_step(performed, steps),
        name,
        None if staged else cut_by(parallel.graph, strategy),
    )


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.float32)


def _twin(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], wide: bool
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Copies of a model and its inputs, in float64 if ``wide``."""
    own_args, own_kwargs = map_tree(_cloned, (tuple(args), dict(kwargs)))
    twin = copy.deepcopy(model)
    return widened(twin, own_args, own_kwargs) if wide else (twin, own_args, own_kwargs)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def per_step(performed: Ledger, steps: int) -> dict[str, tuple[int, int]]:
    """What one step communicated: per kind, how often and how many bytes."""
    amounts: dict[str, tuple[int, int]] = {}
    for (kind, group), count in performed.steps.items():
        known = amounts.get(kind, (0, 0))
        amounts[kind] = (known[0] + count // steps, known[1] + performed.bytes[kind, group] // steps)
    return amounts


DTYPES = {"float64": (True,), "float32": (False,), "both": (True, False)}
"""In which precisions to compare; ``float32`` stands for the precision that the model is built in."""


@dataclass(frozen=True)
class Verified:
    """A plan and what was compared: the plan itself (``found``) and the strategies that are forced to cut.

    ``changes`` says in words what was done to the model and its inputs so that they can be compared.
    """

    plan: Plan
    runs: tuple[Verification, ...]
    changes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return bool(self.runs) and all(run.agrees for run in self.runs)

    @property
    def cuts(self) -> bool:
        """Whether anything was cut at all; on one process nothing can be."""
        return (
            self.plan.devices == 1
            or bool(self.plan.stages)
            or any(run.cut is not None and run.cut.operators for run in self.runs)
        )

    def as_dict(self) -> dict[str, Any]:
        about = {"agrees": self.agrees, "search": self.plan.search, "mesh": self.plan.strategy.axes}
        about |= {"processes": self.plan.devices, "changes": list(self.changes)}
        about["dtype"] = " and ".join(dict.fromkeys(run.dtype for run in self.runs))
        return {**about, "strategies": [run.as_dict() for run in self.runs]}


def verify(
    build: Build,
    *,
    cluster: Union[Cluster, str] = "local:2",
    search: str = "auto",
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
    dtype
        ``"float64"``, in which everything must agree within 1e-9, ``"float32"`` for the model's own precision, or
        ``"both"``: all strategies in double precision, then the plan as it will run.
    plan
        A plan to verify in place of a new one.
    forced
        Whether strategies that are forced to cut (batch, features, sequence, reductions, halos) are verified too.
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
        own = _planned(graphs[min(graphs)], known, search, say)
        plans = {d: replace(own, signature=Signature.of(g)) for d, g in graphs.items() if _fits(own, g)}
        plans |= {d: _planned(g, known, search, say) for d, g in graphs.items() if d not in plans}
    processes = next(iter(plans.values())).devices
    say(f"{'calling' if inference else 'training'} {steps} steps on {processes} processes and on one")
    asked = (steps, forced, plan is not None, inference)
    answers = run_locally(verify_rank, processes, build, plans, *asked, seconds=seconds)
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
    return {d: replace(plan, signature=Signature.of(g)) for d, g in graphs.items() if _fits(plan, g)}


def _planned(graph: Graph, cluster: Cluster, search: str, say: Callable[[str], None]) -> Plan:
    from shardwright.planner import Options, plan_graph  # only here: running a plan needs no solver

    options = Options(search=search, baselines=(), fewer_devices=False)
    return plan_graph(graph, cluster, options, progress=say)


def _fits(plan: Plan, graph: Graph) -> bool:
    """Whether a plan speaks of exactly the operators and sources of a graph (its dtypes may be others)."""
    strategy, names = plan.strategy, {op.name for op in graph.ops}
    if plan.stages:
        return names == {name for stage in plan.stages for name in stage.operators}
    return set(strategy.splits) == {op.name for op in graph.ops} and set(graph.sources) <= set(strategy.resting)


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
    first = dist.get_rank() == 0
    for double, plan in sorted(plans.items(), reverse=True):
        it = subject(build, double, planned)
        changes |= dict.fromkeys(it.changes)
        wanted: list[tuple[str, Union[Plan, Strategy]]] = [("found", plan)]
        forced = forced and not plan.stages
        if forced and plan.strategy.devices > 1 and double == max(plans):
            wanted += forced_strategies(it.graph, forced_mesh(plan.strategy.devices))
        truth = truth_of(it.model, it.args, it.kwargs, steps) if first and double else None
        for name, strategy in wanted:
            axes = strategy.strategy.axes if isinstance(strategy, Plan) else strategy.axes
            mesh, inputs = None if plan.stages else mesh_of_axes(axes), (it.model, it.args, it.kwargs)
            priced = frugal(forced_mesh(plan.strategy.devices)) if name != "found" else None
            asked: dict[str, Any] = {"mesh": mesh, "graph": it.graph, "truth": truth, "priced": priced}
            answer = check(*inputs, strategy, steps=steps, name=name, **asked)
            runs += [answer] if answer is not None else []
        if not all_agree(runs):  # what is wrong in double precision need not be looked at again
            break
    if forced and plan.strategy.devices > 1:
        runs += streams(build, plan.strategy.devices)
    return Verified(plan, tuple(runs), tuple(changes)) if first else None


def forced_mesh(devices: int) -> Mesh:
    """The mesh of forced strategies: two axes where the number of processes has two factors."""
    return meshes(parse_cluster(f"local:{devices}"), max_axes=2)[-1]


def streams(build: Build, devices: int) -> list[Verification]:
    """The random numbers that the model draws when it is cut along the batch, looked at; nothing if it draws none."""
    model, args, kwargs = built(build)
    graph = capture(model, args, kwargs)
    if not drawing(graph):
        return []
    strategy = next(iter(forced_strategies(graph, forced_mesh(devices))))[1]
    mesh, runs = mesh_of_axes(strategy.axes), []
    for name, variant in variants(graph, strategy):
        found = looked_at(model, args, kwargs, graph, variant, mesh)
        if found:
            dtype = str(_dtype(model)).removeprefix("torch.")
            runs.append(Verification(tuple(found), (), dtype, {}, f"random numbers, {name}", cut_by(graph, variant)))
    return runs


def all_agree(runs: Sequence[Verification]) -> bool:
    """Rank 0's opinion, known to all."""
    box = [all(run.agrees for run in runs)]
    dist.broadcast_object_list(box)
    return box[0]


@functools.lru_cache
def mesh_of_axes(axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """A mesh over all processes, made once: every new one costs process groups."""
    return init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))
