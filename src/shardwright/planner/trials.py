"""One search on one mesh, tried out: stated once, solved under the device's memory, simulated, and corrected.

The search counts memory at two moments only and by estimate; the exact curve of its answer tells how much that missed.
Where the answer does not fit after all, the limit is lowered by as much and the same problem solved again, so every
round excludes the answer before it. The problem of a mesh is stated once for the bound without a limit and for every round.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite

from shardwright.cluster import Mesh
from shardwright.errors import Infeasible
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner.glance import SLACK, glance
from shardwright.plans import Prediction
from shardwright.search.choose import evaluate
from shardwright.search.constraints import constraints
from shardwright.search.formulation import Formulation
from shardwright.search.keeping import keep_gathered
from shardwright.search.limits import limit_of
from shardwright.search.options import Restriction
from shardwright.search.strategies import LEAST_MEMORY, Described, Searched, find_strategy, state
from shardwright.simulator import simulate

MEMORY_ROUNDS = 5
"""How often a search is repeated with a corrected limit before giving up on the device's memory."""


@dataclass(frozen=True, eq=False)
class Found:
    """The outcome of one search on one mesh, simulated; where not ``exact``, at a glance only so far."""

    name: str
    mesh: Mesh
    searched: Searched
    prediction: Prediction
    exact: bool = True

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits comes before what does not, then the faster (the smaller where nothing fits, or that is asked for)."""
        return self.ranked(self.name)

    def ranked(self, search: str) -> tuple[bool, float]:
        """The rank this would have as an answer to another search."""
        p = self.prediction
        return (not p.fits, p.step_seconds if p.fits and search != LEAST_MEMORY else p.memory_bytes)

    @property
    def note(self) -> str:
        blocks = self.searched.strategy.recomputed
        return f"activations of {len(blocks)} blocks ({blocks[0]}, …) are recomputed in backward" if blocks else ""


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection meanwhile: a step's events are many, live long and refer to nothing in circles."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def predict(
    graph: Graph, strategy: Strategy, mesh: Mesh, optimiser: str, summed: float | None, limit: float | None = None
) -> Prediction:
    """Simulate one step of a strategy; ``summed`` are its seconds by the search (those of the step's events otherwise)."""
    with collection_paused():
        timeline = simulate(graph, strategy, mesh, training=graph.training, optimiser=optimiser)
        return Prediction(
            step_seconds=timeline.seconds,
            sum_seconds=float(timeline.walk.seconds if summed is None else summed),
            memory_bytes=float(timeline.peak_bytes),
            communication_bytes=float(timeline.communication_bytes),
            exposed_seconds=timeline.exposed_seconds,
            fits=bool(timeline.peak_bytes <= (mesh.device.usable_memory if limit is None else limit)),
        )


class Trials:
    """Searches on one graph under the same conditions; problems stated for one are kept for the next.

    ``pins`` and ``forbidden`` bind the searches in ``constrained`` only (a baseline is what it is).
    """

    def __init__(
        self,
        described: Described,
        *,
        optimiser: str = "adamw",
        memory_limit: float | None = None,
        ignore_device_memory: bool = False,
        recompute: Sequence[str] = (),
        constrained: Sequence[str] = (),
        pins: Sequence[str] = (),
        forbidden: Sequence[str] = (),
        time_limit: float = 10.0,
        gap: float = 0.0,
    ) -> None:
        self.described, self.optimiser, self.recompute = described, optimiser, tuple(recompute)
        self.memory_limit, self.ignore_device_memory = memory_limit, ignore_device_memory
        self.constrained, self.pins, self.forbidden = constrained, pins, forbidden
        self.time_limit, self.gap = time_limit, gap
        self._stated: dict[tuple[Mesh, str, float], Formulation] = {}

    def limit(self, mesh: Mesh) -> float:
        return limit_of(mesh.device, self.memory_limit, self.ignore_device_memory)

    def floor(self, mesh: Mesh, name: str) -> float:
        """What the search could at best give on a mesh: the bound of its optimum without a memory limit."""
        return self._solve(mesh, name, 0.0, None).solution.lower_bound

    def search(self, mesh: Mesh, name: str, overlap: float = 0.0) -> Found:
        """What the search finds on a mesh by its own count of memory, simulated: it may not fit after all.

        Raises
        ------
        Infeasible
            When the search itself finds nothing within the limit.
        """
        return self._attempt(mesh, name, overlap, self.limit(mesh))

    def corrected(self, found: Found, known: Found | None = None, overlap: float = 0.0) -> Found:
        """A result that does not fit, searched again under a limit lowered by what its memory over time has shown.

        Ends early at an answer that needs more memory and yet is slower than what is ``known`` to fit. Gives the best of all
        rounds: the smallest where nothing fits.
        """
        better = known.prediction if known is not None and known.prediction.fits else None
        best = last = self._surely(found, better)
        for _ in range(MEMORY_ROUNDS - 1):
            here = last.prediction
            if here.fits or found.name == LEAST_MEMORY or (better and here.step_seconds > better.step_seconds):
                break
            counted = evaluate(last.searched.formulation.problem, last.searched.solution.answer).peak
            allowed = counted - (here.memory_bytes - self.limit(found.mesh))
            if not counted:
                break
            try:
                last = self._surely(self._attempt(found.mesh, found.name, overlap, allowed), better)
            except Infeasible:
                break
            best = self.better(best, last)
        return best

    def _surely(self, found: Found, better: Prediction | None) -> Found:
        """The same, simulated event by event where a glance cannot tell whether it fits (and that matters)."""
        near = abs(found.prediction.memory_bytes / self.limit(found.mesh) - 1.0) < SLACK
        slower = better is not None and found.prediction.step_seconds > (1.0 + SLACK) * better.step_seconds
        return self.exactly(found) if near and not slower else found

    def better(self, one: Found, other: Found) -> Found:
        """The better of two by rank, simulated event by event where both fit and a glance cannot tell."""
        if one.prediction.fits and other.prediction.fits and not (one.exact and other.exact):
            seconds = one.prediction.step_seconds, other.prediction.step_seconds
            if max(seconds) < (1.0 + SLACK) * min(seconds):
                one, other = self.exactly(one), self.exactly(other)
        return min(one, other, key=lambda f: f.rank)

    def exactly(self, found: Found) -> Found:
        """The same, every event simulated."""
        if found.exact:
            return found
        graph, strategy, summed = self.described.graph, found.searched.strategy, found.prediction.sum_seconds
        prediction = predict(graph, strategy, found.mesh, self.optimiser, summed, self.limit(found.mesh))
        return replace(found, prediction=prediction, exact=True)

    def _attempt(self, mesh: Mesh, name: str, overlap: float, allowed: float) -> Found:
        """Searched, and simulated at a glance where the model is deep and its blocks are all split alike."""
        searched = self._solve(mesh, name, overlap, allowed)
        graph, cost, limit = self.described.graph, float(searched.solution.cost), self.limit(mesh)
        prediction = None
        if name != LEAST_MEMORY and searched.formulation.within.fold:
            prediction = glance(graph, searched.strategy, mesh, self.optimiser, cost, limit)
        if prediction is not None:
            return Found(name, mesh, searched, prediction, exact=False)
        return Found(name, mesh, searched, predict(graph, searched.strategy, mesh, self.optimiser, cost, limit))

    def with_overlap(self, best: Found, overlap: float) -> Found:
        """The better of a result and what the same search finds with parameter traffic discounted."""
        try:
            return self._instead(best, self.corrected(self.search(best.mesh, best.name, overlap), best, overlap))
        except Infeasible:
            return best

    def with_another(self, best: Found, name: str) -> Found:
        """The better of a result and what another search finds on its mesh; not tried on deep models, judged at a glance."""
        try:
            return self._instead(best, self.search(best.mesh, name)) if best.exact else best
        except Infeasible:
            return best

    def _instead(self, best: Found, other: Found) -> Found:
        stated = best.searched.formulation  # price by the sum proper, so that every cost in a table means the same
        cost = evaluate(stated.problem, stated.choice(other.searched.strategy)).cost
        other = replace(other, name=best.name, prediction=replace(other.prediction, sum_seconds=cost))
        return self.better(best, other)

    def keeping(self, found: Found) -> Found:
        """The same with gathered parameters kept until backward as memory allows, if the simulator finds that faster.

        Exact, whatever was known before.
        """
        limit, searched = self.limit(found.mesh), found.searched
        room = limit * (1.0 if found.exact else 1.0 - SLACK / 2) - found.prediction.memory_bytes
        strategy = keep_gathered(self.described.graph, self.described.rules, searched.strategy, room)
        if strategy is None:
            return self.exactly(found)
        prediction = predict(self.described.graph, strategy, found.mesh, self.optimiser, None, limit)
        other = replace(found, searched=replace(searched, strategy=strategy), prediction=prediction, exact=True)
        faster = prediction.fits and prediction.step_seconds <= found.prediction.step_seconds
        return other if faster else min(self.exactly(found), other, key=lambda f: f.rank)

    def _solve(self, mesh: Mesh, name: str, overlap: float, memory_limit: float | None) -> Searched:
        within = Restriction(name)
        if name in self.constrained:
            within = constraints(self.described.graph, mesh.names, self.pins, self.forbidden)
        key = (mesh, name, overlap)
        if key not in self._stated:
            self._stated[key] = state(
                self.described,
                mesh,
                name,
                optimiser=self.optimiser,
                overlap=overlap,
                recompute=self.recompute,
                within=within,
            )
        return find_strategy(
            self.described,
            mesh,
            name,
            optimiser=self.optimiser,
            memory_limit=memory_limit if memory_limit is None or isfinite(memory_limit) else None,
            within=within,
            time_limit=self.time_limit,
            gap=self.gap,
            stated=self._stated[key],
        )
