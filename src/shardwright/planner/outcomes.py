"""All that one search by name comes to: every candidate on every mesh, tried out, and what no candidate can undercut.

The sum that a search minimises ignores overlap, so the exact search runs at several prices (as expected, with parameters'
traffic nearly free, as low as any execution gets) and the simulator decides between all answers. A search by another method
has one answer under the limit, and further ones where that does not fit after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from shardwright.cluster import Mesh
from shardwright.costs.gradient_addition import least_adding
from shardwright.errors import Infeasible, TooLarge
from shardwright.planner.judging import judge
from shardwright.planner.options import Progress
from shardwright.planner.trials import ENOUGH, LEAST_UNHIDDEN, Found, Trials
from shardwright.planner.varying import varied
from shardwright.planner.weighing import weighed
from shardwright.search.baselines import ALIASES, BASELINES
from shardwright.search.bills import EXPECTED, LEAST, Pricing
from shardwright.search.conditions import FASTEST, LEAST_MEMORY

HIDDEN = Pricing(traffic=0.2)
"""Parameters' traffic mostly hidden under computation; the simulator picks among the answers."""

ANOTHER = "recursive"
"""A search that is nearly free and whose answer, hardly ever better by the sum, now and then overlaps better."""

FEW_MESHES = 3
"""Up to this many meshes are all searched; more are first ranked by their optimum without a memory limit."""

WORTHWHILE = 1.1
"""A mesh whose bound exceeds the best sum found by this factor is not searched (overlap may be worth a tenth)."""

LITTLE = 0.05
"""How far below a known step a bound may lie without further work on it."""

ROUNDS = 5
"""How many answers of a search by another method are tried."""


@dataclass(frozen=True)
class Bounds:
    """No strategy that fits sums to fewer ``seconds``, none takes a shorter ``step``; infinite where none fits at all."""

    seconds: float
    step: float

    def __or__(self, other: Bounds) -> Bounds:
        """What holds in both spaces."""
        return Bounds(min(self.seconds, other.seconds), min(self.step, other.step))


NOTHING_FITS = Bounds(inf, inf)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What searching under one name came to.

    ``candidates`` are all that were simulated. ``held_back``: some answer was left out, or did not fit, for want of memory.
    ``refusal`` says why a mesh has no answer, where one has none; ``impossible``: nothing there is keeps the limit on any.
    """

    name: str
    candidates: tuple[Found, ...]
    meshes: tuple[Mesh, ...]
    held_back: bool = False
    refusal: Infeasible | None = None
    impossible: bool = False

    @property
    def fitting(self) -> tuple[Found, ...]:
        return tuple(found for found in self.candidates if found.fits)


def search_by_name(trials: Trials, meshes: Sequence[Mesh], name: str, say: Progress, beat: float = inf) -> Outcome:
    """Search under one name on every promising mesh and try all answers that may take less than ``beat`` seconds a step.

    A mesh on which no step can be shorter than one that is known is not searched; a recipe is not even stated there.

    >>> search_by_name(trials, meshes, "fsdp", print).fitting  # doctest: +SKIP
    """
    tried: list[Found] = []
    refusal: Infeasible | None = None
    held_back, without = False, set[Mesh]()
    for mesh, floor in _promising(trials, meshes, name, say, beat):
        fitting = [found for found in tried if found.fits]
        if fitting and floor > WORTHWHILE * min(found.sum_seconds for found in fitting):
            continue
        try:
            best = min([beat, *(found.seconds for found in fitting)])
            if trials.conditions.objective == FASTEST and best < inf and not trials.may_beat(mesh, name, best):
                continue
            say(f"searching {name} on {mesh_text(mesh)}")
            for found in _answers(trials, mesh, name, tried, beat):
                held_back |= not found.fits
                if found.prediction is not None:
                    tried.append(found)
        except (Infeasible, TooLarge) as error:
            refusal, held_back = refusal or Infeasible(error.message, error.remedy), True
            without |= {mesh} if isinstance(error, Infeasible) else set()
    if name == "auto" and tried and trials.deep:
        tried += _further(trials, tried, beat)
    impossible = not tried and without == set(meshes)
    return Outcome(name, tuple(dict.fromkeys(tried)), tuple(meshes), held_back, refusal, impossible)


def bounds(trials: Trials, meshes: Sequence[Mesh], name: str, known: float = 0.0, limited: bool = True) -> Bounds:
    """What no strategy of a search on any of the meshes undercuts, in any memory where that is not ``limited``; streams are
    weighed where computation alone leaves much to a step that is ``known``.

    What holds on all meshes is the least of their bounds: the first mesh, which should be the one likely to have it, is
    bounded as well as can be, the others only as far as they would be below.
    """
    found = NOTHING_FITS
    for mesh in meshes:
        adding = least_adding(trials.described.graph, mesh)
        step = trials.floor(mesh, name, LEAST_UNHIDDEN, limited, found.step - adding) + adding
        if step < min((1 - LITTLE) * known, found.step):
            step = weighed(trials, mesh, name, adding, min(known, found.step))
        found = found | Bounds(trials.floor(mesh, name, LEAST, limited, found.seconds - adding) + adding, step)
    return found


def mesh_text(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.names)


def _promising(
    trials: Trials, meshes: Sequence[Mesh], name: str, say: Progress, beat: float
) -> list[tuple[Mesh, float]]:
    """Meshes by what they could at best give: the optimum without a memory limit, which bounds the one with it."""
    if len(meshes) <= FEW_MESHES or beat < inf:  # where a step is known already, most meshes of a recipe drop out by it
        return [(mesh, 0.0) for mesh in meshes]
    floors = []
    for mesh in meshes:
        say(f"bounding {name} on {mesh_text(mesh)}")
        floors.append((mesh, trials.floor(mesh, name, EXPECTED, limited=False)))
    return sorted(floors, key=lambda pair: pair[1])


def _answers(trials: Trials, mesh: Mesh, name: str, known: Sequence[Found], beat: float) -> Iterator[Found]:
    """Answers on one mesh, simulated but for those that use too much by the search's own count."""
    if name == LEAST_MEMORY:
        yield trials.tried(trials.found(mesh, name, trials.solve(mesh, name, trials.limit(mesh))))
    elif name not in ("auto", *BASELINES, *ALIASES):
        for round_, searched in enumerate(trials.ladder(mesh, name, start=trials.limit(mesh))):
            found = trials.tried(trials.found(mesh, name, searched))
            yield found
            if found.fits or round_ + 1 == ROUNDS:
                return
    else:
        yield from _descend(trials, mesh, name, EXPECTED, known, beat)
        if name == "auto" and not trials.deep:
            yield from _descend(trials, mesh, name, HIDDEN, known, beat)
            yield from _another(trials, mesh)
            yield from _varied(trials, mesh, known, beat)


def _descend(
    trials: Trials, mesh: Mesh, name: str, pricing: Pricing, known: Sequence[Found], beat: float
) -> Iterator[Found]:
    """Answers under ever smaller limits, until one fits and sums are so far above it that no overlap makes up for that (a
    recipe's, and a deep model's: until one fits).

    What uses too much even by the search's count, which leaves things out, need not be tried; nor, where the ladder goes on
    anyway, what is slower without any traffic of parameters than the best that fits is with it.
    """
    beat, limit = min((found.seconds for found in known if found.fits), default=beat), trials.limit(mesh)
    first_is_enough, looked_at = name != "auto" or trials.deep, False

    def ladder() -> Iterator[Found]:
        nonlocal looked_at
        for searched in trials.ladder(mesh, name, pricing):
            bound = searched.solution.lower_bound / (1 + len(mesh.axes))  # as many streams, busy all the time
            unhidden = 0.0 if first_is_enough else trials.unhidden(mesh, name, searched)
            found = trials.found(mesh, name, searched, unhidden, bound)
            looked_at |= bound > beat or found.expected.memory_bytes <= limit
            yield found

    fits = any(found.fits for found in known)
    for found in judge(ladder(), trials.tried, beat, limit):
        yield found
        fits |= found.fits
        if found.fits and first_is_enough:
            return
    if not looked_at and not fits and (beat == inf or not trials.deep):
        # One may lie between two rungs; if none does, the search says what keeps it from that.
        searched = trials.solve(mesh, name, trials.limit(mesh), pricing, max(trials.conditions.gap, ENOUGH))
        yield trials.tried(trials.found(mesh, name, searched))


def _another(trials: Trials, mesh: Mesh) -> Iterator[Found]:
    """What another search finds there, if anything."""
    try:
        yield trials.tried(trials.found(mesh, ANOTHER, trials.solve(mesh, ANOTHER, inf)))
    except (Infeasible, TooLarge):
        return


def _varied(trials: Trials, mesh: Mesh, known: Sequence[Found], beat: float) -> Iterator[Found]:
    """Answers in which one parameter rests otherwise."""
    beat = min((found.seconds for found in known if found.fits), default=beat)
    proposals = (
        trials.found(mesh, "auto", searched, trials.unhidden(mesh, "auto", searched))
        for searched in varied(trials, mesh, (EXPECTED, HIDDEN))
    )
    yield from judge(proposals, trials.tried, beat, trials.limit(mesh))


def _further(trials: Trials, tried: Sequence[Found], beat: float) -> Iterator[Found]:
    """Of a deep model: what the search finds on the mesh of the best so far, parameters' traffic mostly hidden."""
    mesh = min(tried, key=lambda found: found.ranked("auto")).mesh
    try:
        yield from (f for f in _descend(trials, mesh, "auto", HIDDEN, tried, beat) if f.prediction is not None)
    except (Infeasible, TooLarge):
        return
