"""The one function that walks the whole way, from a model to the simulated winner.

Capture the model, factor the cluster into meshes, state and solve the choice problem on each, price every baseline by
the same rules, simulate the best few, and keep the fastest that fits. The proof that comes with the plan is the solver's
lower bound on the summed seconds over every mesh tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from shardwright.cluster import Cluster, Mesh, meshes, parse_cluster
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import OpRules
from shardwright.operators.strategy import Strategy
from shardwright.plans import Candidate, Plan, Prediction, Proof
from shardwright.plans.plan import Signature
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import Formulation, formulate
from shardwright.search.labels import Labels, label_loops
from shardwright.search.solution import Solution
from shardwright.simulator import simulate

SCOPE = "splits of every operator, repeated blocks alike, summed seconds"
DEFAULT_BASELINES = ("data-parallel", "fsdp", "megatron")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """The outcome of one search on one mesh."""

    name: str
    mesh: Mesh
    strategy: Strategy
    prediction: Prediction
    solution: Solution[np.ndarray]
    formulation: Formulation


def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    search: str = "auto",
    baselines: Sequence[str] = DEFAULT_BASELINES,
    optimiser: str = "adamw",
    max_axes: int = 2,
    time_limit: float = 60.0,
    progress: Progress | None = None,
    reference: str = "",
) -> Plan:
    """Find the fastest split of ``model`` over ``cluster``.

    Parameters
    ----------
    model, args, kwargs
        The unmodified module and example inputs (on the meta device if it is large).
    cluster
        A :class:`Cluster` or its name: ``"8xH200"``, ``"4x8xA100-80GB"``, ``"local:2"``, a TOML file.
    search
        ``"auto"`` searches everything; a baseline's name restricts the search to strategies of that kind.
    baselines
        Names to price beside the plan found.

    Raises
    ------
    Infeasible
        When no strategy fits into the devices' memory.
    """
    from shardwright.frontend import capture

    say = progress or (lambda text: None)
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    say("capturing the model")
    graph = capture(model, args, kwargs)
    return plan_graph(
        graph,
        cluster,
        search=search,
        baselines=baselines,
        optimiser=optimiser,
        max_axes=max_axes,
        time_limit=time_limit,
        progress=say,
        reference=reference,
    )


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    *,
    search: str = "auto",
    baselines: Sequence[str] = DEFAULT_BASELINES,
    optimiser: str = "adamw",
    max_axes: int = 2,
    time_limit: float = 60.0,
    progress: Progress | None = None,
    reference: str = "",
) -> Plan:
    """Plan a captured graph; see :func:`plan`."""
    say = progress or (lambda text: None)
    started = perf_counter()
    say("describing the operators")
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    labels = label_loops(graph, rules)
    shapes = meshes(cluster, max_axes)
    names = list(dict.fromkeys([search, *baselines]))
    found: dict[str, Found] = {}
    notes: dict[str, str] = {}
    bounds: list[float] = []
    for name in names:
        best: Found | None = None
        for mesh in shapes:
            if name == "megatron" and len(mesh.sizes) > 2:
                continue
            say(f"searching {name} on {_mesh_text(mesh.names)}")
            try:
                result = search_mesh(graph, mesh, name, optimiser, rules, labels, time_limit)
            except Infeasible as error:
                notes[name] = error.message
                continue
            if name == search:
                bounds.append(result.solution.lower_bound)
            if best is None or _rank(result) < _rank(best):
                best = result
        if best is not None:
            found[name] = best
    if search not in found:
        raise Infeasible(
            f"No {search} strategy of this model fits {cluster.name}: {notes.get(search, 'nothing to search')}",
            "Use more devices, a smaller batch, or a cluster with more memory.",
        )
    winner = min((f for n, f in found.items() if search in (n, "auto")), key=_rank)
    solved = found[search]
    proof = Proof(
        cost=solved.solution.cost,
        lower_bound=min(bounds),
        optimal=solved.solution.optimal and solved.solution.lower_bound <= min(bounds) * (1 + 1e-9),
        seconds=perf_counter() - started,
        scope=SCOPE,
    )
    return Plan(
        model=reference,
        signature=Signature.of(graph),
        cluster=cluster,
        strategy=winner.strategy,
        search=search,
        optimiser=optimiser,
        prediction=winner.prediction,
        proof=proof,
        calibration=winner.mesh.calibration,
        candidates=tuple(_candidate(n, found, notes, shapes) for n in names),
        replicated=_replicated(graph, rules, winner),
        notes=() if winner.name == search else (f"the simulated winner is the {winner.name} strategy",),
    )


def search_mesh(
    graph: Graph,
    mesh: Mesh,
    name: str,
    optimiser: str,
    rules: Mapping[str, OpRules],
    labels: Labels,
    time_limit: float,
) -> Found:
    """The best strategy of one kind on one mesh.

    The search's memory row is an estimate; where the exact curve of its answer exceeds the device, the limit is
    tightened by the excess and the search repeated.
    """
    limit = float(mesh.device.usable_memory)
    budget = limit
    for _ in range(4):
        formulation = formulate(
            graph,
            mesh,
            optimiser=optimiser,
            memory_limit=budget,
            within=restriction(name, len(mesh.sizes)),
            rules=rules,
            labels=labels,
        )
        solution = solve(formulation.problem, time_limit=time_limit)
        strategy = formulation.strategy(solution.answer)
        prediction = predict(graph, strategy, mesh, optimiser, solution.cost)
        if prediction.fits:
            break
        budget -= prediction.memory_bytes - limit
        if budget <= 0:
            break
    return Found(name, mesh, strategy, prediction, solution, formulation)


def predict(graph: Graph, strategy: Strategy, mesh: Mesh, optimiser: str, summed: float) -> Prediction:
    """Simulate one step of a strategy."""
    timeline = simulate(graph, strategy, mesh, optimiser=optimiser)
    return Prediction(
        step_seconds=timeline.seconds,
        sum_seconds=summed,
        memory_bytes=float(timeline.peak_bytes),
        communication_bytes=float(timeline.communication_bytes),
        exposed_seconds=timeline.exposed_seconds,
        fits=timeline.peak_bytes <= mesh.device.usable_memory,
    )


def _rank(result: Found) -> tuple[bool, float]:
    return (not result.prediction.fits, result.prediction.step_seconds)


def _candidate(name: str, found: Mapping[str, Found], notes: Mapping[str, str], shapes: Sequence[Mesh]) -> Candidate:
    if name not in found:
        return Candidate(name, shapes[0].names, None, notes.get(name, "does not apply"))
    return Candidate(name, found[name].mesh.names, found[name].prediction)


def _replicated(graph: Graph, rules: Mapping[str, OpRules], winner: Found) -> tuple[tuple[str, str, float], ...]:
    """Operators that run whole for want of a rule, and the seconds each costs."""
    rows = []
    for op in graph.ops:
        if rules[op.name].origin != "replicated":
            continue
        node = winner.formulation.stands_for["op", op.name]
        seconds = float(winner.formulation.problem.costs[node].min()) / max(winner.formulation.nodes[node].times, 1)
        rows.append((op.name, f"{op.target}: {rules[op.name].reason}", seconds))
    return tuple(rows)


def _mesh_text(axes: Sequence[tuple[str, int]]) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes)


def check_search(name: str) -> None:
    """Refuse an unknown search or baseline name before any work is done."""
    restriction(name, 1)


__all__ = ["DEFAULT_BASELINES", "Found", "ShardwrightError", "plan", "plan_graph", "predict", "search_mesh"]
