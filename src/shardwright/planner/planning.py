"""The one function that walks the whole way, from a model to the simulated winner.

Capture the model, factor the cluster into meshes, state and solve the choice problem on each, price every baseline by
the same rules, simulate the best few, and keep the fastest that fits; where none does, search again with the activations
of repeated blocks recomputed. The sum that the search minimises ignores overlap, so the search also runs with parameter
traffic discounted, and one axis at a time; the simulator decides. The proof that comes with the plan is the solver's lower
bound on the summed seconds over every mesh tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from shardwright.cluster import Cluster, Mesh, meshes, parse_cluster
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.planner.trials import Found, Trials, collection_paused
from shardwright.plans import Candidate, Plan, Proof
from shardwright.plans.plan import Asked, Signature
from shardwright.search.alternatives import replicated
from shardwright.search.constraints import meant_meshes
from shardwright.search.labels import label_loops
from shardwright.search.limits import check_limits, limit_of, no_blocks, shortage
from shardwright.search.strategies import LEAST_MEMORY, Described, check_name

SCOPE = "splits of every operator, repeated blocks alike, summed seconds"
DEFAULT_BASELINES = ("data-parallel", "fsdp", "megatron")
OVERLAPS = (0.8,)
"""Shares of hidden parameter traffic the exact search is also run with; the simulator picks among the answers."""

ANOTHER = "recursive"
"""A search that is nearly free and whose answer, hardly ever better by the sum, now and then overlaps better."""

FEW_MESHES = 3
"""Up to this many meshes are all searched; more are first ranked by their optimum without a memory limit."""

WORTHWHILE = 1.1
"""A mesh whose bound exceeds the best sum found by this factor is not searched (overlap may be worth a tenth)."""

CLOSE = 1.25
"""Candidates up to this much slower than the best are tried with gathered parameters kept until backward."""

FEWER_ARE_FASTER = "devices are faster than all of them; --all-devices (fewer_devices=False) insists on all"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to plan. ``pins`` and ``forbidden`` are user constraints (:mod:`shardwright.search.constraints`)."""

    search: str = "auto"
    baselines: Sequence[str] = DEFAULT_BASELINES
    optimiser: str = "adamw"
    max_axes: int = 2
    time_limit: float = 10.0
    gap: float = 0.01
    """A search under a memory limit may end once its answer is proved to be within this share of the best."""
    memory_limit: float | None = None
    ignore_device_memory: bool = False
    """Plan as if devices had all the memory in the world (the papers' comparisons do)."""
    pins: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    fewer_devices: bool = True
    recompute: str = "auto"
    """Recompute repeated blocks' activations in backward: ``blocks`` always, ``none`` never, ``auto`` if nothing fits."""

    def __post_init__(self) -> None:
        for name in (self.search, *self.baselines):
            check_name(name)
        check_limits(self.memory_limit, self.time_limit)
        if self.recompute not in ("auto", "none", "blocks"):
            raise ShardwrightError(f"There is no way to recompute {self.recompute!r}.", "Known: auto, none, blocks.")


def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    progress: Progress | None = None,
    reference: str = "",
    **options: Any,
) -> Plan:
    """Find the fastest split of ``model`` over ``cluster``.

    Parameters
    ----------
    model, args, kwargs
        The unmodified module and example inputs (on the meta device if it is large).
    cluster
        A :class:`Cluster` or its name: ``"8xH200"``, ``"4x8xA100-80GB"``, ``"local:2"``, a TOML file.
    options
        The fields of :class:`Options`: ``search="auto"`` searches everything, a baseline's name restricts the search to
        strategies of that kind; ``baselines`` are priced beside the plan found.

    Raises
    ------
    Infeasible
        When no strategy fits into the devices' memory.

    Examples
    --------
    >>> import torch
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(1024, 1024), torch.empty(64, 1024)
    >>> plan(model, (x,), cluster="2xH100").prediction.fits
    True
    """
    from shardwright.frontend import capture

    say = progress or (lambda text: None)
    chosen = Options(**options)
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    say("capturing the model")
    return plan_graph(capture(model, args, kwargs), cluster, chosen, progress=say, reference=reference)


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    reference: str = "",
) -> Plan:
    """Plan a captured graph; see :func:`plan`."""
    with collection_paused():  # what a plan is made of lives until it is made
        return _plan(graph, cluster, options or Options(), progress, reference)


def _plan(graph: Graph, cluster: Cluster, options: Options, progress: Progress | None, reference: str) -> Plan:
    say = progress or (lambda text: None)
    started = perf_counter()
    say("describing the operators")
    described = describe_graph(graph)
    if options.recompute == "blocks" and not described.blocks:
        raise no_blocks(graph.training)
    shapes = meant_meshes(meshes(cluster, options.max_axes), options.pins, options.forbidden)
    if max(mesh.devices for mesh in shapes) == 1:
        options = replace(options, baselines=())  # nothing to cut: all recipes are the same there
    found, notes = _search_all(described, shapes, options, say)
    fitting = {n for n, one in found.items() if one.prediction.fits and options.search != LEAST_MEMORY}
    if options.recompute == "auto" and options.search not in fitting and described.blocks:
        say("searching with recomputed blocks")
        rest = [name for name in options.baselines if name not in fitting]
        again, notes = _search_all(described, shapes, replace(options, baselines=rest, recompute="blocks"), say)
        for name, one in again.items():
            found[name] = min(one, found.get(name, one), key=lambda f: f.ranked(options.search))
    best = found.get(options.search)
    if options.search == "auto" and (best is None or not best.prediction.fits):
        say("nothing fits; searching for what needs least")
        blocks = "blocks" if described.blocks and options.recompute != "none" else "none"
        least = replace(options, search=LEAST_MEMORY, baselines=(), recompute=blocks)
        smallest, seen = _search_all(described, shapes, least, say)
        if LEAST_MEMORY in smallest:
            best = found["auto"] = replace(smallest[LEAST_MEMORY], name="auto")
            notes |= seen
    open_search = options.search in ("auto", LEAST_MEMORY) and not (options.pins or options.forbidden)
    eligible = [f for n, f in found.items() if open_search or n == options.search]
    winner = min(eligible, key=lambda f: f.ranked(options.search), default=None)
    if best is None or winner is None:
        why = notes.get(options.search, "there is nothing to search.")
        raise Infeasible(
            f"No {options.search} strategy of this model fits {cluster.name}: {why}", notes.get(":remedy", "")
        )
    if not winner.prediction.fits:
        device, peak = shapes[0].device, winner.prediction.memory_bytes
        limit = limit_of(device, options.memory_limit, options.ignore_device_memory)
        raise shortage(options.search, cluster.name, device, limit, peak, options.recompute)
    if options.search == "auto":
        close = [f for f in eligible if f.prediction.step_seconds <= CLOSE * winner.prediction.step_seconds]
        winner = min((_trials(described, options).keeping(f) for f in close), key=lambda f: f.rank)
    found[options.search] = winner
    remarks = [] if winner.name == options.search else [f"the simulated winner is the {winner.name} strategy"]
    result = Plan(
        model=reference,
        signature=Signature.of(graph),
        cluster=cluster,
        strategy=winner.searched.strategy,
        search=options.search,
        optimiser=options.optimiser,
        prediction=winner.prediction,
        proof=_proof(best, notes, perf_counter() - started),
        calibration=winner.mesh.calibration,
        candidates=tuple(
            _candidate(n, found, notes, shapes) for n in dict.fromkeys([options.search, *options.baselines])
        ),
        replicated=replicated(winner.searched.formulation),
        notes=tuple(filter(None, [*graph.notes, *remarks, winner.note])),
        asked=Asked(options.memory_limit, tuple(options.pins), tuple(options.forbidden)),
        captured=graph,
    )
    if options.fewer_devices and options.search != LEAST_MEMORY and _communication_bound(winner):
        result = _perhaps_fewer(graph, cluster, options, result, say)
    return result


def describe_graph(graph: Graph) -> Described:
    """The rules and labels every search on this graph shares."""
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    return Described(graph, rules, label_loops(graph, rules))


def _search_all(
    described: Described, shapes: Sequence[Mesh], options: Options, say: Progress
) -> tuple[dict[str, Found], dict[str, str]]:
    """The best of every name over all meshes; ``notes`` holds why a name found nothing, and the proof."""
    found: dict[str, Found] = {}
    notes: dict[str, str] = {}
    trials = _trials(described, options)
    for name in dict.fromkeys([options.search, *options.baselines]):
        tried: list[Found] = []
        bounds, costs = [], []
        for mesh, floor in _promising(trials, shapes, name, say):
            sums = [one.prediction.sum_seconds for one in tried if one.prediction.fits]
            if sums and floor > WORTHWHILE * min(sums):
                continue
            say(f"searching {name} on {_mesh_text(mesh)}")
            try:
                tried.append(trials.search(mesh, name))
            except Infeasible as error:
                notes.setdefault(name, error.message)
                notes.setdefault(":remedy", error.remedy)
        # What fits comes first: what does not fit after all is only worth correcting where it is faster.
        for one in sorted(tried, key=lambda f: (not f.prediction.fits, f.prediction.step_seconds)):
            result = trials.corrected(one, found.get(name))
            found[name] = trials.better(found[name], result) if name in found else result
            if name == options.search:
                bounds.append(result.searched.solution.lower_bound)
                costs.append((not result.prediction.fits, result.searched.solution.cost))
        if costs:
            notes |= {":bound": repr(float(min(bounds))), ":cost": repr(float(min(costs)[1]))}
        for overlap in OVERLAPS if name == "auto" and name in found else ():
            found[name] = trials.with_overlap(found[name], overlap)
        if name == "auto" and name in found:
            found[name] = trials.with_another(found[name], ANOTHER)
        if name in found and not (name == "auto" and found[name].prediction.fits):  # that is simulated when it has won
            found[name] = trials.exactly(found[name])
    return found, notes


def _trials(described: Described, options: Options) -> Trials:
    return Trials(
        described,
        optimiser=options.optimiser,
        memory_limit=options.memory_limit,
        ignore_device_memory=options.ignore_device_memory,
        recompute=described.blocks if options.recompute == "blocks" else (),
        constrained=("auto", ANOTHER, options.search),
        pins=options.pins,
        forbidden=options.forbidden,
        time_limit=options.time_limit,
        gap=options.gap,
    )


def _promising(trials: Trials, shapes: Sequence[Mesh], name: str, say: Progress) -> list[tuple[Mesh, float]]:
    """Meshes by what they could at best give: the optimum without a memory limit, which bounds the one with it."""
    if len(shapes) <= FEW_MESHES:
        return [(mesh, 0.0) for mesh in shapes]
    floors = []
    for mesh in shapes:
        say(f"bounding {name} on {_mesh_text(mesh)}")
        floors.append((mesh, trials.floor(mesh, name)))
    return sorted(floors, key=lambda pair: pair[1])


def _mesh_text(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.names)


def _proof(best: Found, notes: Mapping[str, str], seconds: float) -> Proof:
    """What the search proved about the sum it minimises; the simulator may prefer a plan with a larger sum."""
    cost = float(notes[":cost"])
    bound = min(float(notes[":bound"]), cost)
    scope = SCOPE + ", blocks recomputed" * bool(best.note)
    return Proof(cost, bound, cost <= bound * (1 + 1e-6), seconds, scope)


def _communication_bound(found: Found) -> bool:
    """Fewer devices can only be faster where communication outweighs computation."""
    return found.prediction.exposed_seconds > 0.5 * found.prediction.step_seconds


def _perhaps_fewer(graph: Graph, cluster: Cluster, options: Options, result: Plan, say: Progress) -> Plan:
    """Half the devices, and half of those, as long as that is faster."""
    smaller = _half(cluster)
    if smaller is None:
        return result
    say(f"trying {smaller.name}, since communication dominates")
    try:
        other = plan_graph(graph, smaller, replace(options, baselines=()), progress=say, reference=result.model)
    except Infeasible:
        return result
    if other.prediction.step_seconds >= result.prediction.step_seconds:
        return result
    note = f"{other.strategy.devices} of {cluster.size} {FEWER_ARE_FASTER}"
    notes = (note, *(text for text in other.notes if FEWER_ARE_FASTER not in text))
    whole = replace(result.candidates[0], name=f"{options.search} on all {cluster.size} devices")
    return replace(other, candidates=(other.candidates[0], whole, *result.candidates[1:]), notes=notes)


def _half(cluster: Cluster) -> Cluster | None:
    nodes = cluster.nodes
    if len(nodes) > 1 and len(nodes) % 2 == 0:
        return replace(cluster, name=f"{len(nodes) // 2} nodes of {cluster.name}", nodes=nodes[: len(nodes) // 2])
    if len(nodes) == 1 and nodes[0].devices % 2 == 0:
        count = nodes[0].devices // 2
        return replace(cluster, name=f"{count} devices of {cluster.name}", nodes=(replace(nodes[0], devices=count),))
    return None


def _candidate(name: str, found: Mapping[str, Found], notes: Mapping[str, str], shapes: Sequence[Mesh]) -> Candidate:
    if name not in found:
        return Candidate(name, shapes[0].names, None, notes.get(name, "does not apply"))
    return Candidate(name, found[name].mesh.names, found[name].prediction, found[name].note)
