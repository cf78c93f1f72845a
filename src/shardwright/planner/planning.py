"""From a captured graph to the simulated winner on one mesh.

Factor the cluster into meshes, state and solve the choice problem on each, price every recipe by
the same rules, simulate all answers, and keep the fastest that fits. Where memory binds, search again with the activations
of repeated blocks recomputed; where communication may outweigh computation, on fewer devices. The proof that comes with the
plan bounds what every candidate was judged by (:mod:`shardwright.planner.proving`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf
from operator import or_
from time import perf_counter

from shardwright.cluster import Cluster, Mesh, meshes, meshes_and_line
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.garbage import collection_paused
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.planner.delivering import deliver
from shardwright.planner.options import DEFAULT_BASELINES, Options, Progress
from shardwright.planner.outcomes import ANOTHER, Outcome, bounds, search_by_name
from shardwright.planner.proving import prove, space_of
from shardwright.planner.trials import LEAST_UNHIDDEN, Found, Trials
from shardwright.plans import Candidate, Plan
from shardwright.plans.spaces import LIGHT, NOTHING, WHOLE
from shardwright.search.alternatives import replicated
from shardwright.search.baselines import BASELINES, TWINS
from shardwright.search.constraints import check_asked, meant_meshes
from shardwright.search.labels import label_loops
from shardwright.search.limits import limit_of, no_blocks, shortage
from shardwright.search.strategies import LEAST_MEMORY, Described

AGAIN = {LIGHT: "what is cheap of all blocks", WHOLE: "all blocks"}
"""What is recomputed, the cheaper first."""

CLOSE = 1.25
"""Candidates up to this much slower than the best are tried with gathered parameters kept until backward."""

FEW = 3
"""So many of them of deep models, whose steps take long to simulate."""

FEWER_ARE_FASTER = "devices are faster than all of them; --all-devices (fewer_devices=False) insists on all"

PIPELINES_NOT_SEARCHED = "Pipelines were not searched: --stages auto does."


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    reference: str = "",
) -> Plan:
    """Plan a captured graph on one mesh, the fastest that fits.

    Raises
    ------
    Infeasible
        When no strategy fits into the devices' memory.
    """
    with collection_paused():  # what a plan is made of lives until it is made
        return _plan(graph, cluster, options or Options(), progress, reference)


@dataclass(frozen=True, eq=False)
class _Round:
    """All searches that recompute in the same way: outcomes by name."""

    recompute: str
    trials: Trials
    outcomes: Mapping[str, Outcome]


def _plan(graph: Graph, cluster: Cluster, options: Options, progress: Progress | None, reference: str) -> Plan:
    say = progress or (lambda text: None)
    started = perf_counter()
    check_asked(graph, options.pins, options.forbidden)
    say("describing the operators")
    described = describe_graph(graph)
    if options.recompute in AGAIN and not described.blocks:
        raise no_blocks(graph.training)
    shapes = meant_meshes(_meshes(cluster, options), options.pins, options.forbidden)
    several = max(mesh.devices for mesh in shapes) > 1
    if not several:
        options = replace(options, baselines=())  # nothing to cut: all recipes are the same there
    shown = tuple(dict.fromkeys([options.search, *options.baselines]))
    open_search = options.search in ("auto", LEAST_MEMORY) and not (options.pins or options.forbidden)
    names = tuple(dict.fromkeys([*shown, *_unasked(options.search)])) if several and open_search else shown
    first = options.recompute if options.recompute in AGAIN else NOTHING
    rounds = [_round(described, shapes, options, names, first, inf, say)]
    eligible = _eligible(rounds, options.search, open_search)
    for way, what in AGAIN.items():
        again = _worth_recomputing(rounds[0], eligible, shapes, options, way)
        if again:
            say(f"searching with {what} recomputed")
            fastest = min((f.seconds for f in eligible if f.fits), default=inf)
            rounds.append(_round(described, shapes, options, again, way, fastest, say))
            eligible = _eligible(rounds, options.search, open_search)
    trials = rounds[0].trials
    winner = trials.best(eligible, options.search) if eligible else None
    if winner is None or not winner.fits:
        eligible = [trials.exactly(f) if f.fits else f for f in eligible]  # some did, at a glance
        eligible += _smallest(rounds, shapes, options, say) if options.search == "auto" else []
        if not any(found.fits for found in eligible):
            raise _nothing_fits(rounds, eligible, shapes, options, cluster.name)
        winner = trials.best(eligible, options.search)
    elif options.search == "auto":
        kept = _kept(trials, eligible, winner)
        eligible, winner = [*eligible, *kept], trials.best([winner, *kept], "auto")
    fitting = [found for found in [*eligible, winner] if found.fits]
    step, searched = winner.seconds, [r.trials for r in rounds if options.search in r.outcomes]
    proved = reduce(or_, [bounds(trials, shapes, options.search, step) for trials in searched])
    ways = [one.recompute for one in rounds if options.search in one.outcomes]
    alike = all(trials.blocks_alike(mesh, options.search) for mesh in shapes)
    where = space_of(shapes, ways, options, alike=alike, training=graph.training)
    remarks = [] if winner.name == options.search else [f"the simulated winner is the {winner.name} strategy"]
    delivered = partial(deliver, graph, cluster, options)
    result = replace(
        delivered(winner, reference),
        proof=prove(where, proved, fitting, perf_counter() - started, delivered),
        candidates=tuple(_candidate(name, rounds, winner, options.search, shapes) for name in shown),
        replicated=replicated(winner.searched.formulation),
        notes=tuple(filter(None, [*graph.notes, *remarks, winner.note])),
    )
    # A strategy that was asked for by name is that on all devices: on one, every name means the same.
    smaller = _half(cluster) if options.fewer_devices and options.search == "auto" else None
    if smaller is not None and _could_be_faster(trials, smaller, options, result.prediction.step_seconds):
        result = _perhaps_fewer(graph, cluster, smaller, options, result, say)
    return result


def _meshes(cluster: Cluster, options: Options) -> Sequence[Mesh]:
    return (meshes_and_line if options.one_axis else meshes)(cluster, options.max_axes)


def describe_graph(graph: Graph) -> Described:
    """The rules and labels every search on this graph shares."""
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    return Described(graph, rules, label_loops(graph, rules))


def _unasked(search: str) -> Sequence[str]:
    """The recipes that take part whether anybody asks to see them or not."""
    return [name for name in BASELINES if name not in TWINS] if search == "auto" else DEFAULT_BASELINES


def _round(
    described: Described,
    shapes: Sequence[Mesh],
    options: Options,
    names: Sequence[str],
    recompute: str,
    beat: float,
    say: Progress,
) -> _Round:
    """Search under all names; those that nobody asked to see only as far as they may take less than ``beat`` seconds. Where
    nothing of the whole space keeps the limit, no recipe does, and none is asked but those whose own refusal is shown."""
    trials = Trials(
        described,
        optimizer=options.optimizer,
        memory_limit=options.memory_limit,
        ignore_device_memory=options.ignore_device_memory,
        recompute=described.blocks if recompute != NOTHING else (),
        lightly=recompute == LIGHT,
        constrained=("auto", ANOTHER, options.search),
        pins=options.pins,
        forbidden=options.forbidden,
        time_limit=options.time_limit,
        gap=options.gap,
        fastest=options.search != LEAST_MEMORY,
    )
    shown, outcomes = (options.search, *options.baselines), dict[str, Outcome]()
    everything = options.search == "auto" and not (options.pins or options.forbidden)
    for name in names:
        whole = outcomes.get("auto") if everything else None
        if whole is not None and whole.impossible and not (name in shown and recompute == NOTHING):
            outcomes[name] = replace(whole, name=name)
            continue
        outcomes[name] = search_by_name(trials, shapes, name, say, inf if name in shown else beat)
        beat = min([beat, *(found.seconds for found in outcomes[name].fitting)])
    return _Round(recompute, trials, outcomes)


def _eligible(rounds: Sequence[_Round], search: str, open_search: bool) -> list[Found]:
    """Every candidate that may be the plan: where nothing restricts the search, those of the recipes too."""
    outcomes = [o for one in rounds for name, o in one.outcomes.items() if open_search or name == search]
    return [found for outcome in outcomes for found in outcome.candidates]


def _worth_recomputing(
    plain: _Round, eligible: Sequence[Found], shapes: Sequence[Mesh], options: Options, way: str
) -> list[str]:
    """The searches to repeat with blocks recomputed in this way: those that found nothing that fits, and those held back by
    memory for which the time that recomputing takes leaves anything to gain."""
    if options.recompute != "auto" or not plain.trials.described.blocks:
        return []
    lacking = [name for name, outcome in plain.outcomes.items() if outcome.held_back and not outcome.fitting]
    fitting = [found.seconds for found in eligible if found.fits]
    held_back = plain.outcomes[options.search].held_back and options.search not in lacking
    if options.search == LEAST_MEMORY:
        # The search's count leaves things out, so recipes take part in the choice.
        return list(plain.outcomes) if way == WHOLE else []
    if held_back and fitting and not plain.trials.deep:
        again = Trials(
            plain.trials.described,
            optimizer=options.optimizer,
            recompute=plain.trials.described.blocks,
            lightly=way == LIGHT,
            ignore_device_memory=True,
            constrained=plain.trials.constrained,
            pins=options.pins,
            forbidden=options.forbidden,
            time_limit=options.time_limit,
            gap=options.gap,
        )
        if min(again.floor(mesh, options.search, LEAST_UNHIDDEN) for mesh in shapes) < min(fitting):
            lacking.append(options.search)
    return lacking


def _smallest(rounds: Sequence[_Round], shapes: Sequence[Mesh], options: Options, say: Progress) -> list[Found]:
    """What needs least memory: where the search's count, which leaves things out, led to nothing that fits, it may."""
    say("nothing fits; searching for what needs least")
    first = rounds[0].trials
    least = replace(options, search=LEAST_MEMORY, baselines=(), memory_limit=None, ignore_device_memory=True)
    blocks = bool(first.described.blocks) and options.recompute != NOTHING
    asked = [LEAST_MEMORY] if options.pins or options.forbidden else [LEAST_MEMORY, *DEFAULT_BASELINES]
    way = NOTHING if not blocks else LIGHT if options.recompute == LIGHT else WHOLE
    smallest = _round(first.described, shapes, least, asked, way, inf, say)
    seen = [smallest.trials.exactly(f) for outcome in smallest.outcomes.values() for f in outcome.candidates]
    limited = [(f, f.prediction) for f in seen if f.prediction is not None]
    return [replace(f, prediction=replace(p, fits=p.memory_bytes <= first.limit(f.mesh))) for f, p in limited]


def _nothing_fits(
    rounds: Sequence[_Round], seen: Sequence[Found], shapes: Sequence[Mesh], options: Options, where: str
) -> Infeasible:
    """What to tell a user for whom nothing fits: how much the smallest needs, or why there is no strategy at all."""
    refusals = [r.outcomes[options.search].refusal for r in rounds if options.search in r.outcomes]
    if not seen:
        why = next((refusal for refusal in refusals if refusal), Infeasible("there is nothing to search."))
        return Infeasible(f"No {options.search} strategy of this model fits {where}: {why.message}", why.remedy)
    device, peak = shapes[0].device, min(found.memory_bytes for found in seen)
    limit = limit_of(device, options.memory_limit, options.ignore_device_memory)
    short = shortage(options.search, where, device, limit, peak, options.recompute)
    stages = rounds[0].trials.described.blocks
    if options.search == "auto" and stages and max(mesh.devices for mesh in shapes) > 1:
        return Infeasible(short.message, f"{short.remedy} {PIPELINES_NOT_SEARCHED}")
    return short


def _kept(trials: Trials, eligible: Iterable[Found], winner: Found) -> list[Found]:
    """Close candidates with gathered parameters kept until backward, as far as there is room."""
    near = CLOSE * winner.seconds
    close = [f for f in eligible if f.fits and f.seconds <= near and f.strategy.regathered]
    close.sort(key=lambda f: f.seconds, reverse=True)
    close = [*{trials.alike(f.mesh, f.searched): f for f in close}.values()][::-1]  # several searches may come to one
    best, tried = winner.seconds, list[Found]()
    for found in close[:FEW] if trials.deep else close:
        if trials.unhidden(found.mesh, found.name, found.searched) < best:
            tried += trials.keeping(found, best)
            best = min([best, *(kept.seconds for kept in tried if kept.fits)])
    return tried


def _could_be_faster(trials: Trials, smaller: Cluster, options: Options, seconds: float) -> bool:
    """Whether fewer devices could take less time: not where their computation alone takes longer."""
    try:
        shapes = meant_meshes(_meshes(smaller, options), options.pins, options.forbidden)
        return min(trials.floor(mesh, options.search, LEAST_UNHIDDEN, limited=False) for mesh in shapes) < seconds
    except ShardwrightError:  # what is asked for has no meaning there
        return False


def _perhaps_fewer(
    graph: Graph, cluster: Cluster, smaller: Cluster, options: Options, result: Plan, say: Progress
) -> Plan:
    """Half the devices, and half of those, as long as computation leaves room for that to be faster."""
    say(f"trying {smaller.name}, since communication may dominate")
    try:
        other = plan_graph(graph, smaller, replace(options, baselines=()), progress=say, reference=result.model)
    except Infeasible:
        return result
    mine, theirs = result.proof, other.proof
    both = replace(mine.beside(theirs), cost=min(mine.cost, theirs.cost))
    if other.prediction.step_seconds >= result.prediction.step_seconds:
        return replace(result, proof=both)
    note = f"{other.devices} of {cluster.size} {FEWER_ARE_FASTER}"
    notes = (note, *(text for text in other.notes if FEWER_ARE_FASTER not in text))
    whole = replace(result.candidates[0], name=f"{options.search} on all {cluster.size} devices")
    return replace(other, candidates=(other.candidates[0], whole, *result.candidates[1:]), notes=notes, proof=both)


def _half(cluster: Cluster) -> Cluster | None:
    nodes = cluster.nodes
    if len(nodes) > 1 and len(nodes) % 2 == 0:
        return replace(cluster, name=f"{len(nodes) // 2} nodes of {cluster.name}", nodes=nodes[: len(nodes) // 2])
    if len(nodes) == 1 and nodes[0].devices % 2 == 0:
        count = nodes[0].devices // 2
        return replace(cluster, name=f"{count} devices of {cluster.name}", nodes=(replace(nodes[0], devices=count),))
    return None


def _candidate(name: str, rounds: Sequence[_Round], winner: Found, search: str, shapes: Sequence[Mesh]) -> Candidate:
    """A row of the comparison: the plan itself for the search, the best of its kind for a recipe."""
    outcomes = [one.outcomes[name] for one in rounds if name in one.outcomes]
    seen = [found for outcome in outcomes for found in outcome.candidates]
    if not seen and name != search:
        refusal = next((outcome.refusal for outcome in outcomes if outcome.refusal), None)
        return Candidate(name, shapes[0].names, None, refusal.message if refusal else "does not apply")
    best = winner if name == search else rounds[0].trials.about(seen, name, winner.seconds)
    return best.row(name)
