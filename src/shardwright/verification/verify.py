"""Does a plan compute the same numbers as one device? The original eager module against the program, step by step.

All ranks train the program; rank 0 also runs the unmodified module (not the exported one, not our graph) by itself from the
same weights on the same batch. Compared are the loss of every step, every gradient of every step, every parameter after
every step and the buffers at the end (:mod:`shardwright.verification.compare` says how far they may differ).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright._torch_compat import map_tree
from shardwright.cluster import Cluster, parse_cluster
from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.lowering.collectives import Ledger, counting
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.runtime.launch import run_locally
from shardwright.runtime.parallelize import parallelize
from shardwright.verification.compare import TIMES, Comparison, Verification, compare, distance
from shardwright.verification.decisions import Decisions, Jump, Question, jumps
from shardwright.verification.kinks import beside_kinks, from_its_own_side
from shardwright.verification.precision import all_double
from shardwright.verification.prepare import widened, without_dropout
from shardwright.verification.recorded import Run, retraced, train
from shardwright.verification.yardstick import drawn_again

Tensors = Mapping[str, Tensor]


def truth_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int) -> Run:
    """The unmodified model trained on this process in float64; the model itself stays as it is."""
    twin, own_args, own_kwargs = _twin(model, args, kwargs, wide=True)
    with all_double():
        return train(twin, own_args, own_kwargs, steps, keep=True)


def judged(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run, truth: Run | None = None
) -> list[Comparison]:
    """A run from the weights of ``model`` against the model on this process, in the run's precision."""
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if _dtype(model) == torch.float64:
        truth = truth or truth_of(model, args, kwargs, len(run.losses))
        _finite(truth)
        return compare(truth, run, start)

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
    found = drawn_again(compare(truth, run, start, one), run, errors_at)
    return beside_kinks(found, run, answers, gradients_at)


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
    for before in run.before:
        with all_double(wide), Decisions() as decisions:
            step = retraced(*twin, Run(before=[before]))
        asked.append(decisions.questions)
        found.losses += step.losses
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
) -> Verification | None:
    """Compare, inside a process group, on every rank of the plan; rank 0 gets the answer, the others ``None``.

    ``truth`` (:func:`truth_of`) saves rank 0 the run on one process where several plans of a float64 model are compared.
    """
    first, dtype = dist.get_rank() == 0, _dtype(model)
    with all_double(dtype == torch.float64):
        parallel = parallelize(model, plan, args, kwargs, mesh=mesh, graph=graph, keep=True)
    with counting() as performed:
        run = train(parallel, tuple(args), kwargs, steps, keep=first)
    if not first:
        return None
    return Verification(
        tuple(judged(model, tuple(args), kwargs, run, truth)),
        tuple(run.losses),
        str(dtype).removeprefix("torch."),
        per_step(performed, steps),
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


Build = Callable[[], tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]]


def verify(
    build: Build,
    *,
    cluster: Union[Cluster, str] = "local:2",
    search: str = "auto",
    steps: int = 3,
    dtype: str = "float32",
    seconds: float = 1800.0,
    plan: Plan | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, Verification]:
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
        ``"float32"`` or ``"float64"``; in double precision everything must agree within 1e-9.
    plan
        A plan to verify in place of a new one.

    Examples
    --------
    >>> plan, answer = verify(functools.partial(build_my_model, 12), cluster="local:4")       # doctest: +SKIP
    >>> answer.agrees                                                                         # doctest: +SKIP
    True
    """
    say = progress or (lambda text: None)
    double = dtype == "float64"
    if plan is None:
        model, args, kwargs = prepared(build, double)
        say("capturing the model")
        with all_double(double):
            graph = capture(model, args, kwargs)
        plan = _planned(graph, parse_cluster(cluster) if isinstance(cluster, str) else cluster, search, say)
        del model
    processes = plan.strategy.devices
    say(f"training {steps} steps on {processes} processes and on one")
    answers = run_locally(_verify_rank, processes, build, plan, steps, double, seconds=seconds)
    assert isinstance(answers[0], Verification)
    return plan, answers[0]


def _planned(graph: Graph, cluster: Cluster, search: str, say: Callable[[str], None]) -> Plan:
    from shardwright.planner import Options, plan_graph  # only here: running a plan needs no solver

    options = Options(search=search, baselines=(), fewer_devices=False)
    return plan_graph(graph, cluster, options, progress=say)


def prepared(build: Build, double: bool) -> tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """The model to compare, built from a fixed seed, without dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, args, kwargs = build()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunError(
            f"{type(model).__name__} has no parameter to train, so there is no gradient to compare.",
            "Give a model with parameters that require gradients.",
        )
    without_dropout(model)
    return widened(model, args, kwargs) if double else (model, args, kwargs)


def _verify_rank(build: Build, plan: Plan, steps: int, double: bool) -> Verification | None:
    model, args, kwargs = prepared(build, double)
    return check(model, tuple(args), kwargs, plan, steps=steps)
