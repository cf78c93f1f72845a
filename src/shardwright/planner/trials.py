"""Strategies tried out: one search on one mesh, stated once and priced in several ways, its answers simulated.

The search counts memory at two moments only and by estimate; the exact curve of an answer tells whether it fits. So answers
under ever smaller limits are tried, each a little below what the one before uses. Where that ladder stands does not depend
on the memory there is, so whoever has more of it tries all that others try, and more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from shardwright.cluster import Mesh
from shardwright.errors import Infeasible, TooLarge
from shardwright.garbage import collection_paused
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.planner.glance import SLACK, deep, glance
from shardwright.planner.judging import NEARLY
from shardwright.planner.proposals import Laid, Proposal, on_one_mesh
from shardwright.planner.recomputing import recomputed_note
from shardwright.plans import Prediction, SearchSpace
from shardwright.plans.spaces import LIGHT, NOTHING
from shardwright.search.bills import EXPECTED, LEAST, Pricing
from shardwright.search.choose import evaluate, solve
from shardwright.search.conditions import LEAST_MEMORY, Conditions
from shardwright.search.constraints import constraints
from shardwright.search.formulate import Described
from shardwright.search.formulation import Formulation
from shardwright.search.keeping import gathered_copies, keep_gathered
from shardwright.search.narrowing import narrowed
from shardwright.search.options import Restriction
from shardwright.search.solution import Solution
from shardwright.search.strategies import METHOD_NAMES, Searched, find_strategy, least_compute, part_of, state
from shardwright.simulator import simulate
from shardwright.simulator.stages import unlike_places

UNHIDDEN = Pricing(traffic=0.0)
"""What cannot overlap: operators run one after the other, and whatever changes a tensor between two of them does so between
them; only parameters travel beside."""

LEAST_UNHIDDEN = replace(UNHIDDEN, least=True)
"""What cannot overlap, at prices that no execution undercuts: it bounds the step itself."""

RUNG, DEEP_RUNG = 0.85, 0.75
"""How much less memory than an answer uses the next one is allowed; deep models' trials take longest, so fewer are made."""

KEPT = (1.0, 0.75, 0.5, 0.25)
"""Shares of gathered parameters that stay until backward where there is room."""

ENOUGH = 0.03
"""How far from its optimum an answer under a smaller limit than the first may be: it is only one more to try."""

RUNG_WORK, RUNG_SECONDS = 4e8, 1.0
"""How many entries may be read in search of such an answer, about a second's; by methods that count nothing, how long."""

LARGE = 3000
"""A recipe with more options than this is bounded as slowly as it is searched."""

SHARES = (0.0, 0.1, 0.3)
"""Shares of parameters' traffic that recipes are bounded with: which of them tells most differs from one to the next."""

FLAT, NO_GAP = SearchSpace(), Conditions(gap=0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Found(Proposal):
    """The answer of one search on one mesh; where not ``exact``, it was simulated at a glance only."""

    mesh: Mesh
    searched: Searched
    exact: bool = True

    @property
    def strategy(self) -> Strategy:
        return self.searched.strategy

    def laid(self) -> Laid:
        return on_one_mesh(self.searched.formulation.graph, self.strategy)

    def ranked(self, search: str) -> tuple[bool, float, float]:
        """As an answer to a search: what fits first, then the faster (the smaller where nothing fits, or that is asked; of
        two that need as much, the faster)."""
        first = self.seconds if self.fits and search != LEAST_MEMORY else self.memory_bytes
        return not self.fits, first, self.seconds

    @property
    def note(self) -> str:
        return recomputed_note(self.strategy)


def predict(graph: Graph, strategy: Strategy, mesh: Mesh, optimizer: str, limit: float | None = None) -> Prediction:
    """Simulate one step of a strategy; ``limit`` are the bytes it may use (the device's otherwise). Of unlike devices the
    slowest says how long it takes, and each must have room for it.

    >>> predict(graph, strategy, mesh, "adamw").step_seconds
    """
    mesh = mesh.with_shares(strategy.shares)
    with collection_paused():  # a step's events are many, live long and refer to nothing in circles
        places = unlike_places(strategy, mesh)
        every = [simulate(graph, strategy, mesh, graph.training, optimizer, coordinate=place) for place in places]
        timeline = max(every, key=lambda one: one.seconds)
        rooms: list[float] = [mesh.at(place).device.usable_memory for place in places]
        if limit is not None:
            rooms = [min(limit, room) for room in rooms] if len(places) > 1 else [limit]
        return Prediction(
            step_seconds=timeline.seconds,
            sum_seconds=timeline.sum_seconds,
            memory_bytes=float(max(one.peak_bytes for one in every)),
            communication_bytes=float(timeline.communication_bytes),
            exposed_seconds=timeline.exposed_seconds,
            fits=all(one.peak_bytes <= room for one, room in zip(every, rooms, strict=True)),
        )


class Trials:
    """Searches in one space, of a single way to recompute, under the same conditions; problems stated for one are kept for
    the next. Pins and prohibitions bind the search that the space is of, and every method; a baseline is what it is.
    """

    def __init__(self, described: Described, space: SearchSpace = FLAT, conditions: Conditions = NO_GAP) -> None:
        self.described, self.space, self.conditions = described, space, conditions
        (way,) = space.recompute
        self.recompute = () if way == NOTHING else described.blocks
        self.lightly = way == LIGHT
        self._stated: dict[tuple[Mesh, str, Pricing], Formulation] = {}
        self._parts: dict[tuple[Mesh, str], Formulation | None] = {}
        self._tried: dict[tuple[Mesh, str, bytes], Found] = {}
        self._glances: dict[Hashable, Prediction | None] = {}
        self._exact: dict[Hashable, Prediction] = {}
        self._floors: dict[tuple[Mesh, str, Pricing], Solution[np.ndarray]] = {}
        self._limited: dict[tuple[Mesh, str, Pricing], tuple[float, np.ndarray]] = {}

    @cached_property
    def deep(self) -> bool:
        """Whether most candidates are judged at a glance."""
        return deep(self.described.graph)

    def limit(self, mesh: Mesh) -> float:
        return self.conditions.room(mesh.device)

    def stated(self, mesh: Mesh, name: str, pricing: Pricing = EXPECTED) -> Formulation:
        """The problem of a search on a mesh, its memory counted but not limited; stated once for all prices."""
        key = (mesh, name, pricing)
        if key not in self._stated and pricing != EXPECTED:
            self._stated[key] = self.stated(mesh, name).repriced(pricing)
        elif key not in self._stated:
            part = self._part(mesh, name)
            self._stated[key] = part if part is not None and part.within.plain else self._state(mesh, name)
        return self._stated[key]

    def _state(self, mesh: Mesh, name: str) -> Formulation:
        return state(
            self.described,
            mesh,
            name,
            optimizer=self.conditions.optimizer,
            recompute=self.recompute,
            lightly=self.lightly,
            within=self._within(mesh, name),
        )

    def _part(self, mesh: Mesh, name: str) -> Formulation | None:
        """The problem of a search as part of the whole one, where that is stated; of one that is not plain, right at the
        least prices only."""
        wide, key = self._stated.get((mesh, "auto", EXPECTED)), (mesh, name)
        if wide is None or not wide.within.everything:
            return None
        if key not in self._parts:
            within, described = part_of(mesh, name, self._within(mesh, name)), self.described
            at = lambda pricing: self.stated(mesh, "auto", pricing).problem
            found = narrowed(wide, within, described.labels, described.known[mesh], at)
            self._parts[key] = wide if within.everything else found
        return self._parts[key]

    def bounding(self, mesh: Mesh, name: str, pricing: Pricing) -> Formulation:
        """A problem whose optimum at these prices bounds what a search can find."""
        part = self._part(mesh, name) if pricing.least and name != "auto" else None
        if part is None or part.within.plain:
            return self.stated(mesh, name, pricing)
        return part.repriced(pricing)

    def _within(self, mesh: Mesh, name: str) -> Restriction:
        if name in METHOD_NAMES or name == self.space.search:
            return constraints(self.described.graph, mesh.names, self.space.pins, self.space.forbidden)
        return Restriction(name)

    def blocks_alike(self, mesh: Mesh, name: str) -> bool:
        """Whether a search on a mesh splits equal blocks alike."""
        return part_of(mesh, name, self._within(mesh, name)).fold

    def solve(
        self, mesh: Mesh, name: str, limit: float, pricing: Pricing = EXPECTED, gap: float | None = None
    ) -> Searched:
        """What the search finds on a mesh with at most so many bytes in use, by its own count.

        Raises
        ------
        Infeasible
            When nothing keeps the limit.
        """
        stated = self.stated(mesh, name, pricing)
        enough = 1.0 + sum(float(usage.amounts.max()) for usage in stated.problem.usages)
        conditions = replace(self.conditions, memory_limit=min(limit, enough))
        if gap is not None:
            seconds = min(conditions.time_limit, RUNG_SECONDS)
            conditions = replace(conditions, gap=gap, time_limit=seconds)
        work, within = None if gap is None else RUNG_WORK, self._within(mesh, name)
        return find_strategy(self.described, mesh, name, conditions, within=within, stated=stated, work_limit=work)

    def floor(
        self, mesh: Mesh, name: str, pricing: Pricing = LEAST, limited: bool = True, enough: float = inf
    ) -> float:
        """What no strategy of a search on a mesh that fits undercuts, at these prices; infinite where none can fit. Memory
        is not looked at where a bound without it is ``enough``."""
        return self.least(mesh, name, pricing, limited, enough)[0]

    def least(
        self, mesh: Mesh, name: str, pricing: Pricing, limited: bool = True, enough: float = inf
    ) -> tuple[float, np.ndarray]:
        """The same, and the choice that comes nearest to it."""
        stated, limit, key = self.bounding(mesh, name, pricing), self.limit(mesh), (mesh, name, pricing)
        seconds, gap = self.conditions.time_limit, self.conditions.gap
        if key not in self._floors:
            self._floors[key] = solve(replace(stated.problem, usages=(), usage_limit=None), time_limit=seconds, gap=gap)
        free = self._floors[key]
        used = evaluate(stated.problem, free.answer).peak
        if not limited or used <= limit or free.lower_bound >= enough:
            return free.lower_bound, free.answer
        if key not in self._limited:
            core, back = stated.reduced
            try:
                bounded = solve(replace(core, usage_limit=limit), time_limit=seconds, method="limited", gap=gap)
                self._limited[key] = max(free.lower_bound, bounded.lower_bound), back(bounded.answer)
            except Infeasible:
                self._limited[key] = inf, free.answer
            except TooLarge:  # no answer yet: what holds without a limit holds with one
                self._limited[key] = free.lower_bound, free.answer
        return self._limited[key]

    def may_beat(self, mesh: Mesh, name: str, seconds: float) -> bool:
        """Whether a step of a search on a mesh may be shorter than one that is known (which may have been a glance).

        Raises
        ------
        Infeasible
            When there is no such strategy.
        """
        known = seconds * (1 + SLACK * self.deep)
        within = self._within(mesh, name)
        if least_compute(self.described, mesh, name, within, self.recompute, self.lightly) >= known:
            return False  # told without stating the problem
        if name == "auto":
            return self.floor(mesh, name, LEAST_UNHIDDEN, limited=False) < known
        part = self._part(mesh, name) or self.stated(mesh, name)
        if part.problem.sizes.sum() > LARGE:
            return True
        # What cannot overlap takes no longer than the step, and with all traffic no longer than every stream in turn.
        streams = len(mesh.axes)
        return all(
            self.floor(mesh, name, Pricing(traffic=share, least=True), limited=False) < known * (1 + share * streams)
            for share in SHARES
        )

    def unhidden(self, mesh: Mesh, name: str, searched: Searched) -> float:
        """About what a step of an answer takes at least: its operators and what happens between them, one by one."""
        return NEARLY * evaluate(self.stated(mesh, name, UNHIDDEN).problem, searched.solution.answer).cost

    def ladder(self, mesh: Mesh, name: str, pricing: Pricing = EXPECTED, start: float = inf) -> Iterator[Searched]:
        """Answers of a search under ever smaller limits, from ``start`` on, until nothing keeps the limit; the last step is
        halved once, since what is least is seldom a whole step below the answer before."""
        limit, enough, rung = start, max(self.conditions.gap, ENOUGH), DEEP_RUNG if self.deep else RUNG
        above, last = inf, self.deep
        while True:
            try:
                searched = self.solve(mesh, name, limit, pricing, None if limit == start else enough)
            except Infeasible:
                if limit == start:
                    raise
                if last:
                    return
                limit, last = (limit + above) / 2, True
                continue
            yield searched
            if last and not self.deep:
                return
            above = min(self.counted(mesh, name, searched), limit)
            limit = rung * above

    def counted(self, mesh: Mesh, name: str, searched: Searched) -> float:
        """Bytes in use by the search's own count."""
        return evaluate(self.stated(mesh, name).problem, searched.solution.answer).peak

    def found(self, mesh: Mesh, name: str, searched: Searched, unhidden: float = 0.0, bound: float = 0.0) -> Found:
        """An answer, not yet simulated."""
        cost, counted = searched.solution.cost, self.counted(mesh, name, searched)
        expected = Prediction(cost, cost, counted, 0.0, 0.0, counted <= self.limit(mesh))
        return Found(
            name=name,
            shape=mesh.names,
            mesh=mesh,
            searched=searched,
            expected=expected,
            unhidden=unhidden,
            bound=bound,
        )

    def tried(self, found: Found) -> Found:
        """An answer simulated, at a glance where the model is deep and its blocks are all split alike; once for all."""
        mesh, name, searched = found.mesh, found.name, found.searched
        key = (mesh, name, np.asarray(searched.solution.answer).tobytes())
        if key not in self._tried:
            limit, prediction = self.limit(mesh), None
            if name != LEAST_MEMORY and searched.formulation.within.fold:
                prediction = self.glanced(mesh, searched)
            exact = prediction is None
            prediction = prediction or self.simulated(mesh, searched)
            found = replace(found, prediction=prediction, exact=exact)
            near = abs(prediction.memory_bytes / limit - 1.0) < SLACK
            self._tried[key] = self.exactly(found) if near else found  # a glance cannot tell whether that fits
        return self._tried[key]

    def glanced(self, mesh: Mesh, searched: Searched) -> Prediction | None:
        """At a glance, once for all searches that come to the same strategy."""
        key = self.alike(mesh, searched)
        if key not in self._glances:
            graph, limit = self.described.graph, self.limit(mesh)
            self._glances[key] = glance(graph, searched.strategy, mesh, self.conditions.optimizer, limit)
        return self._glances[key]

    def alike(self, mesh: Mesh, searched: Searched) -> Hashable:
        """What searches have in common that come to the same strategy (ZeRO-2 is FSDP with all it gathers kept)."""
        stated, strategy = searched.formulation, searched.strategy
        options = (node.options[pick] for node, pick in zip(stated.nodes, searched.solution.answer, strict=True))
        policies = (strategy.recomputed, strategy.lightly, strategy.regathered, strategy.whole_gradients)
        return (mesh, *policies, tuple(stated.within.arrives.items()), tuple(options))

    def exactly(self, found: Found) -> Found:
        """The same, every event simulated."""
        if found.exact:
            return found
        return replace(found, prediction=self.simulated(found.mesh, found.searched), exact=True)

    def simulated(self, mesh: Mesh, searched: Searched) -> Prediction:
        """Every event simulated, once for all searches that come to the same strategy."""
        key = self.alike(mesh, searched)
        if key not in self._exact:
            graph, limit = self.described.graph, self.limit(mesh)
            self._exact[key] = predict(graph, searched.strategy, mesh, self.conditions.optimizer, limit)
        return self._exact[key]

    def about(self, candidates: Sequence[Found], search: str, beat: float) -> Found:
        """The best answer to a search for a comparison with one that takes ``beat`` seconds: at a glance, where that tells
        which is faster."""
        first = min(candidates, key=lambda f: f.ranked(search))
        clear = first.seconds > (1 + SLACK) * beat
        return first if clear else self.best(candidates, search)

    def best(self, candidates: Sequence[Found], search: str) -> Found:
        """The best answer to a search, simulated event by event wherever a glance cannot tell."""
        ranked = sorted(candidates, key=lambda f: f.ranked(search))
        first = self.exactly(ranked[0])
        for other in ranked[1:]:
            if not other.fits and first.fits:
                break
            near = other.seconds < (1.0 + SLACK) * first.seconds
            if other.exact or near or other.fits > first.fits:
                first = min(first, self.exactly(other), key=lambda f: f.ranked(search))
        return first

    def keeping(self, found: Found, beat: float) -> Iterator[Found]:
        """The same with the largest share of the gathered parameters kept until backward that there is room for, simulated
        event by event; nothing of a deep model that would not take less than ``beat`` seconds were all of them kept.

        A smaller share only adds gathers to the streams, and no step is shorter for more to do in the same order: none is
        tried after one that fits, or that is too slow.
        """
        limit, graph, rules = self.limit(found.mesh), self.described.graph, self.described.rules
        if found.searched.formulation.within.fold:
            all_kept = replace(found.searched, strategy=replace(found.strategy, regathered=frozenset()))
            least = self.glanced(found.mesh, all_kept)
            if least is not None and least.step_seconds >= (1 + SLACK) * beat:
                return
        room = limit * (1.0 if found.exact else 1.0 - SLACK / 2) - found.memory_bytes
        total = sum(gathered_copies(graph, rules, found.strategy).values())
        for share in KEPT:
            strategy = keep_gathered(graph, rules, found.strategy, share * total) if share * total <= room else None
            if strategy is None:
                continue
            searched = replace(found.searched, strategy=strategy)
            kept = replace(found, searched=searched, prediction=self.simulated(found.mesh, searched), exact=True)
            yield kept
            if kept.fits or kept.seconds >= beat:
                return
