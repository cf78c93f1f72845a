"""Does a plan compute the same numbers as one device? The original eager module against the program, step by step.

Rank 0 trains the unmodified module (not the exported one, not our graph) with AdamW, in float64 and, where the model is in
float32, in float32 too; then all ranks train the program from the same weights on the same batch. Compared are the loss of
every step, every gradient of every step, and every parameter and buffer at the end
(:mod:`shardwright.runtime.compare` says how far they may differ).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright._torch_compat import map_tree
from shardwright.cluster import Cluster, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.lowering.collectives import Ledger, counting
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.runtime.compare import Verification, compare
from shardwright.runtime.launch import run_locally
from shardwright.runtime.parallelize import parallelize
from shardwright.runtime.precision import all_double
from shardwright.runtime.prepare import widened, without_dropout
from shardwright.runtime.recorded import Run, train


@dataclass(frozen=True)
class References:
    """One process: the truth in float64 and, for a model in float32, its own run; ``start`` are the first weights."""

    truth: Run
    one: Run | None
    start: Mapping[str, Tensor]


def reference_runs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int) -> References:
    """Train copies of the unmodified model on this process; the model itself stays as it is."""
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    double = _dtype(model) == torch.float64

    def run(wide: bool) -> Run:
        twin, (own_args, own_kwargs) = copy.deepcopy(model), map_tree(_cloned, (tuple(args), dict(kwargs)))
        if wide:
            twin, own_args, own_kwargs = widened(twin, own_args, own_kwargs)
        with all_double(wide):
            return train(twin, own_args, own_kwargs, steps, keep=True)

    return References(run(wide=True), None if double else run(wide=False), start)


def check(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: Union[Plan, Strategy],
    *,
    steps: int = 3,
    mesh: DeviceMesh | None = None,
    graph: Graph | None = None,
    references: References | None = None,
) -> Verification | None:
    """Compare, inside a process group, on every rank of the plan; rank 0 gets the answer, the others ``None``.

    ``references`` saves rank 0 the runs on one process where several plans of one model are compared.
    """
    first, dtype = dist.get_rank() == 0, _dtype(model)
    with all_double(dtype == torch.float64):
        parallel = parallelize(model, plan, args, kwargs, mesh=mesh, graph=graph, keep=True)
    if first and references is None:
        references = reference_runs(model, args, kwargs, steps)
    with counting() as performed:
        run = train(parallel, tuple(args), kwargs, steps, keep=first)
    if references is None or not first:
        return None
    return Verification(
        tuple(compare(references.truth, run, references.start, references.one)),
        tuple(run.losses),
        str(dtype).removeprefix("torch."),
        per_step(performed, steps),
    )


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.float32)


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
    without_dropout(model)
    return widened(model, args, kwargs) if double else (model, args, kwargs)


def _verify_rank(build: Build, plan: Plan, steps: int, double: bool) -> Verification | None:
    model, args, kwargs = prepared(build, double)
    return check(model, tuple(args), kwargs, plan, steps=steps)
