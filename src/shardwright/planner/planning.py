"""From a captured graph to the simulated winner on one mesh.

Factor the cluster into meshes, state and solve the choice problem on each, price every recipe by
the same rules, simulate all answers, and keep the fastest that fits. Where memory binds, search again with the activations
of repeated blocks recomputed, then recompute no more of them than memory asks for; where communication may outweigh
computation, on fewer devices. The proof that comes with the plan bounds what every candidate was judged by
(:mod:`shardwright.planner.proving`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf
from operator import or_
from time import perf_counter

from shardwright.cluster import Cluster, Mesh
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.garbage import collection_paused
from shardwright.graph import Graph
from shardwright.planner.delivering import deliver
from shardwright.planner.options import DEFAULT_BASELINES, Options, Progress
from shardwright.planner.outcomes import Outcome, bounds, search_by_name
from shardwright.planner.proving import prove
from shardwright.planner.recomputing import recomputing_less
from shardwright.planner.trials import LEAST_UNHIDDEN, Found, Trials
from shardwright.plans import Candidate, Plan, SearchSpace
from shardwright.plans.spaces import LIGHT, NOTHING, SOME, WHOLE
from shardwright.search.alternatives import replicated
from shardwright.search.baselines import BASELINES, TWINS
from shardwright.search.conditions import LEAST_MEMORY
from shardwright.search.constraints import check_asked
from shardwright.search.formulate import Described, describe_graph
from shardwright.search.limits import no_blocks, shortage

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
class _Task:
    """What is searched by whom: one space on some meshes; whose rows are shown; who is told how far it is."""

    described: Described
    shapes: Sequence[Mesh]
    options: Options
    space: SearchSpace
    say: Progress

    @property
    def search(self) -> str:
        return self.options.search

    @property
    def several(self) -> bool:
        """Whether there is anything to cut."""
        return max(mesh.devices for mesh in self.shapes) > 1

    @property
    def recipes_compete(self) -> bool:
        """Whether recipes may be the plan: where everything is searched and nothing restricts it."""
        return self.search in ("auto", LEAST_MEMORY) and not self.options.constrained

    @property
    def shown(self) -> tuple[str, ...]:
        """The searches that somebody asked to see."""
        return tuple(dict.fromkeys([self.search, *self.options.baselines]))


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
    described, shapes = describe_graph(graph), options.meshes(cluster)
    if options.recompute in AGAIN and not described.blocks:
        raise no_blocks(graph.training)
    task = _Task(described, shapes, options, options.space(shapes, graph.training), say)
    if not task.several:
        task = replace(task, options=replace(options, baselines=()))  # nothing to cut: all recipes are the same there
    unasked = _unasked(options.search) if task.several and task.recipes_compete else ()
    names = tuple(dict.fromkeys([*task.shown, *unasked]))
    first = options.recompute if options.recompute in AGAIN else NOTHING
    rounds = [_round(task, names, first)]
    eligible = _eligible(task, rounds)
    for way, what in AGAIN.items():
        again = _worth_recomputing(task, rounds[0], eligible, way)
        if again:
            say(f"searching with {what} recomputed")
            rounds.append(_round(task, again, way, _fastest_recipe(task, rounds[0].outcomes)))
            eligible = _eligible(task, rounds)
    trials = rounds[0].trials
    winner = trials.best(eligible, options.search) if eligible else None
    if winner is None or not winner.fits:
        eligible = [trials.exactly(f) if f.fits else f for f in eligible]  # some did, at a glance
        eligible += _smallest(task, trials) if options.search == "auto" else []
        if not any(found.fits for found in eligible):
            raise _nothing_fits(task, rounds, eligible, cluster.name)
        winner = trials.best(eligible, options.search)
    elif options.search == "auto":
        kept = _kept(trials, eligible, winner)
        eligible, winner = [*eligible, *kept], trials.best([winner, *kept], "auto")
    less = _recomputing_less(task, trials, eligible, winner)
    eligible, winner = [*eligible, *less], trials.best([winner, *less], options.search)
    fitting = [found for found in [*eligible, winner] if found.fits]
    step, searched = winner.seconds, [r.trials for r in rounds if options.search in r.outcomes]
    likely = sorted(shapes, key=lambda mesh: mesh != winner.mesh)
    proved = reduce(or_, [bounds(trials, likely, options.search, step) for trials in searched])
    ways = dict.fromkeys(one.recompute for one in rounds if options.search in one.outcomes)
    alike = all(trials.blocks_alike(mesh, options.search) for mesh in shapes)
    if winner in less:  # no number of recomputed blocks computes less than none of them, in any memory
        ways[SOME], proved = None, proved | bounds(rounds[0].trials, shapes, options.search, limited=False)
    where = replace(task.space, recompute=tuple(ways), alike=alike)
    remarks = [] if winner.name == options.search else [f"the simulated winner is the {winner.name} strategy"]
    delivered = partial(deliver, graph, cluster, task.options)
    result = replace(
        delivered(winner, reference),
        proof=prove(where, proved, fitting, perf_counter() - started, delivered),
        candidates=tuple(_candidate(task, name, rounds, winner) for name in _rows(task, rounds)),
        replicated=replicated(winner.searched.formulation),
        notes=tuple(filter(None, [*graph.notes, *remarks, winner.note])),
    )
    # A strategy that was asked for by name is that on all devices: on one, every name means the same.
    smaller = _half(cluster) if options.fewer_devices and options.search == "auto" else None
    if smaller is not None and _could_be_faster(trials, smaller, task.options, result.prediction.step_seconds):
        result = _perhaps_fewer(graph, cluster, smaller, task.options, result, say)
    return result


def _unasked(search: str) -> Sequence[str]:
    """The recipes that take part whether anybody asks to see them or not."""
    return [name for name in BASELINES if name not in TWINS] if search == "auto" else DEFAULT_BASELINES


def _round(task: _Task, names: Sequence[str], recompute: str, beat: float = inf) -> _Round:
    """Search under all names; recipes that nobody asked to see only as far as they may be the fastest of all recipes, of
    which one is known that takes ``beat`` seconds. Where nothing of the whole space keeps the limit, no recipe does, and
    none is asked but those whose own refusal is shown."""
    trials = Trials(task.described, task.space.recomputing(recompute), task.options.conditions)
    outcomes = dict[str, Outcome]()
    for name in names:
        whole = outcomes.get("auto") if task.search == "auto" and not task.options.constrained else None
        if whole is not None and whole.impossible and not (name in task.shown and recompute == NOTHING):
            outcomes[name] = replace(whole, name=name)
            continue
        outcomes[name] = search_by_name(trials, task.shapes, name, task.say, inf if name in task.shown else beat)
        beat = min(beat, _fastest_recipe(task, {name: outcomes[name]}))
    return _Round(recompute, trials, outcomes)


def _fastest_recipe(task: _Task, outcomes: Mapping[str, Outcome]) -> float:
    """Seconds of the fastest that fits and is a recipe's, not what is searched for."""
    recipes = (outcome for name, outcome in outcomes.items() if name != task.search)
    return min((found.seconds for outcome in recipes for found in outcome.fitting), default=inf)


def _rows(task: _Task, rounds: Sequence[_Round]) -> list[str]:
    """The searches of the comparison: those that were asked for, and whichever other recipe is faster than all of these."""
    if not task.options.baselines:
        return list(task.shown)
    names = dict.fromkeys(name for one in rounds for name in one.outcomes if name != task.search)
    seconds = {
        name: min(_fastest_recipe(task, {name: one.outcomes[name]}) for one in rounds if name in one.outcomes)
        for name in names
    }
    fastest = min(seconds, key=lambda name: (seconds[name], name not in task.shown), default="")
    return list(dict.fromkeys([*task.shown, *([fastest] if seconds.get(fastest, inf) < inf else [])]))


def _eligible(task: _Task, rounds: Sequence[_Round]) -> list[Found]:
    """Every candidate that may be the plan."""
    outcomes = [o for one in rounds for name, o in one.outcomes.items() if task.recipes_compete or name == task.search]
    return [found for outcome in outcomes for found in outcome.candidates]


def _worth_recomputing(task: _Task, plain: _Round, eligible: Sequence[Found], way: str) -> list[str]:
    """The searches to repeat with blocks recomputed in this way: those that found nothing that fits, and those held back by
    memory for which the time that recomputing takes leaves anything to gain."""
    if task.options.recompute != "auto" or not task.described.blocks:
        return []
    if task.search == LEAST_MEMORY:
        # The search's count leaves things out, so recipes take part in the choice.
        return list(plain.outcomes) if way == WHOLE else []
    lacking = [name for name, outcome in plain.outcomes.items() if outcome.held_back and not outcome.fitting]
    fitting = [found.seconds for found in eligible if found.fits]
    held_back = plain.outcomes[task.search].held_back and task.search not in lacking
    if held_back and fitting and not plain.trials.deep:
        again = Trials(task.described, task.space.recomputing(way), plain.trials.conditions.without_limit())
        if min(again.floor(mesh, task.search, LEAST_UNHIDDEN) for mesh in task.shapes) < min(fitting):
            lacking.append(task.search)
    return lacking


def _smallest(task: _Task, first: Trials) -> list[Found]:
    """What needs least memory: where the search's count, which leaves things out, led to nothing that fits, it may."""
    task.say("nothing fits; searching for what needs least")
    options = task.options
    least = replace(options, search=LEAST_MEMORY, baselines=(), memory_limit=None, ignore_device_memory=True)
    blocks = bool(task.described.blocks) and options.recompute != NOTHING
    asked = [LEAST_MEMORY] if options.constrained else [LEAST_MEMORY, *DEFAULT_BASELINES]
    way = NOTHING if not blocks else LIGHT if options.recompute == LIGHT else WHOLE
    smallest = _round(replace(task, options=least), asked, way)
    seen = [smallest.trials.exactly(f) for outcome in smallest.outcomes.values() for f in outcome.candidates]
    limited = [(f, f.prediction) for f in seen if f.prediction is not None]
    return [replace(f, prediction=replace(p, fits=p.memory_bytes <= first.limit(f.mesh))) for f, p in limited]


def _nothing_fits(task: _Task, rounds: Sequence[_Round], seen: Sequence[Found], where: str) -> Infeasible:
    """What to tell a user for whom nothing fits: how much the smallest needs, or why there is no strategy at all."""
    refusals = [r.outcomes[task.search].refusal for r in rounds if task.search in r.outcomes]
    if not seen:
        why = next((refusal for refusal in refusals if refusal), Infeasible("there is nothing to search."))
        return Infeasible(f"No {task.search} strategy of this model fits {where}: {why.message}", why.remedy)
    device, peak = task.shapes[0].device, min(found.memory_bytes for found in seen)
    short = shortage(task.search, where, device, task.options.room(device), peak, task.options.recompute)
    if task.search == "auto" and task.described.blocks and task.several:
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


def _recomputing_less(task: _Task, trials: Trials, eligible: Iterable[Found], winner: Found) -> list[Found]:
    """Close candidates whose blocks all recompute, with only as many of them as memory asks for."""
    if task.options.recompute != "auto" or task.search == LEAST_MEMORY:
        return []
    close = [f for f in eligible if f.fits and f.seconds <= CLOSE * winner.seconds and f.strategy.recomputed]
    close.sort(key=lambda f: f.seconds)
    close = [*{trials.alike(f.mesh, f.searched): f for f in reversed(close)}.values()][::-1]
    best, tried = winner.seconds, list[Found]()
    for found in close[: 1 if trials.deep else FEW]:
        tried += recomputing_less(trials, found, best)
        best = min([best, *(less.seconds for less in tried if less.fits)])
    return tried


def _could_be_faster(trials: Trials, smaller: Cluster, options: Options, seconds: float) -> bool:
    """Whether fewer devices could take less time: not where their computation alone takes longer."""
    try:
        floors = (trials.floor(m, options.search, LEAST_UNHIDDEN, limited=False) for m in options.meshes(smaller))
        return min(floors) < seconds
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


def _candidate(task: _Task, name: str, rounds: Sequence[_Round], winner: Found) -> Candidate:
    """A row of the comparison: the plan itself for the search, the best of its kind for a recipe."""
    outcomes = [one.outcomes[name] for one in rounds if name in one.outcomes]
    seen = [found for outcome in outcomes for found in outcome.candidates]
    if not seen and name != task.search:
        refusal = next((outcome.refusal for outcome in outcomes if outcome.refusal), None)
        return Candidate(name, task.shapes[0].names, None, refusal.message if refusal else "does not apply")
    best = winner if name == task.search else rounds[0].trials.about(seen, name, winner.seconds)
    return best.row(name)
