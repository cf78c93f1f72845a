"""Candidate stages of Aceso's problems: which operators recompute, decided exactly from the fronts of the layers'
parts.

Within a layer only runs of at least two recomputed operators save anything, which leaves about a thousand patterns of
13 operators. A pattern costs seconds, saves megabytes per micro-batch held, and has a largest run, of which the stage
pays only the largest: a *cap* on it is fixed first, then the fronts of (seconds, megabytes) under that cap are summed
over the stage's layers. Caps come in brackets: for a bound, a bracket's patterns pay its lower end, for an answer its
upper end; a run that continues into the next layer's first operator counts only in answers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from bench.published.aceso import (
    ATTENTION_FACTORS,
    DEGREES,
    NEVER_RECOMPUTED,
    AcesoPlan,
    AcesoProblem,
    AcesoStage,
    activations,
    check,
    hop_ms,
)
from bench.published.anytime import Report, nobody
from bench.published.fronts import both, front, in_a_row, least_cost, least_costs, rough_costs, steps_of
from shardwright.errors import Infeasible
from shardwright.search.joint.compose import compose, may_be_below
from shardwright.search.joint.problem import (
    Candidates,
    Floats,
    Ints,
    PipelineProblem,
    StageTable,
    filled_and_drained,
    pack,
)
from shardwright.search.solution import Solution

FEW_CAPS = 5
AT_LEAST, WHATEVER_FOLLOWS, FIRST_IS_KEPT = range(3)  # what is known of runs that may go on into the next layer
Front = tuple[Floats, Floats]
NOTHING: Front = (np.zeros(1), np.zeros(1))


@lru_cache(maxsize=32)
def patterns(length: int) -> np.ndarray:
    """All ways to recompute in runs of at least two.

    >>> patterns(3).astype(int).tolist()
    [[0, 0, 0], [0, 1, 1], [1, 1, 0], [1, 1, 1]]
    """
    rows = [
        row
        for row in itertools.product((False, True), repeat=length)
        if all(len(run) != 1 for run in "".join("01"[x] for x in row).split("0"))
    ]
    return np.array(rows, dtype=bool).reshape(len(rows), length)


@dataclass(frozen=True)
class Part:
    """A layer's operators ``first``..``last`` (exclusive; one more than the layer has: the tail's first operator with
    it).
    """

    first: int
    last: int
    ends_stage: bool  # whether the stage ends with it


@dataclass(eq=False)
class Profile:
    """One (local micro-batch, tp): sums along the chain, and fronts of the layers' parts."""

    problem: AcesoProblem
    microbatch: int
    tp: int
    fronts: dict[tuple[Part, float, int], Front] = field(default_factory=dict)
    _priced: dict[Part, tuple[np.ndarray, Floats, Floats, Floats, Floats, Floats]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> Floats:
        return self.problem.rows(self.microbatch, self.tp)

    @cached_property
    def kept(self) -> Floats:
        return activations(self.problem, self.rows, 0)

    def priced_patterns(self, part: Part) -> tuple[np.ndarray, Floats, Floats, Floats, Floats, Floats]:
        """Patterns of a part; their milliseconds, megabytes saved, and largest run: surely, if it ends here, and at most."""
        first = len(self.problem.head) + (self.problem.layers - 1) * len(self.problem.layer)
        ops = slice(first + part.first, first + part.last)  # of the last layer, so that the tail may follow
        choices = patterns(part.last - part.first)
        names, kept = self.problem.operators[ops], self.kept[ops]
        choices = choices[~choices[:, [name in NEVER_RECOMPUTED for name in names]].any(axis=1)]
        milliseconds = choices @ self.rows[ops, 0] / 1e3
        together = choices[:, :-1] & choices[:, 1:]
        saved = together @ kept[:-1] if len(kept) > 1 else np.zeros(len(choices))
        run, surely, counted = (np.zeros(len(choices)) for _ in range(3))
        for i in range(len(kept) - 1):
            run = (run + kept[i]) * together[:, i]
            cut_off = i == len(kept) - 2 and names[i] in ATTENTION_FACTORS
            done = together[:, i] & (~together[:, i + 1] if i + 1 < together.shape[1] else True)
            if not (cut_off and part.ends_stage):
                counted = np.where(done, np.maximum(counted, run), counted)
            if not (cut_off and (part.ends_stage or part.last == len(self.problem.layer))):  # the stage may end with it
                surely = np.where(done, np.maximum(surely, run), surely)
        # The layer's last operator may be recomputed together with the next layer's first.
        at_most = counted
        if part.last == len(self.problem.layer) and not part.ends_stage and len(kept):
            at_most = np.maximum(counted, (run + kept[-1]) * choices[:, -1])
        return choices, milliseconds, saved, surely, counted, at_most

    def priced(self, part: Part) -> tuple[np.ndarray, Floats, Floats, Floats, Floats, Floats]:
        if part not in self._priced:
            self._priced[part] = self.priced_patterns(part)
        return self._priced[part]

    @cached_property
    def caps(self) -> Floats:
        """Upper ends of brackets, rising, from 0: what a layer's useful patterns need, and the most any part may."""
        found = {0.0}
        for last in (len(self.problem.layer), len(self.problem.layer) + 1):
            _, milliseconds, saved, surely, counted, at_most = self.priced(Part(0, last, False))
            for peaks in (surely, counted, at_most):
                found |= {p for p in set(peaks.tolist()) if p in peaks[_on_front(milliseconds, saved, peaks <= p)]}
        first = len(self.problem.head) + (self.problem.layers - 1) * len(self.problem.layer)
        return np.array(sorted({*found, float(self.kept[first : first + len(self.problem.layer) + 1].sum())}))

    @cached_property
    def few_caps(self) -> Floats:
        """Some of them, to begin with."""
        return self.caps[np.unique(np.linspace(0, len(self.caps) - 1, FEW_CAPS).round().astype(int))]

    def allowed(self, part: Part, cap: float, mode: int) -> np.ndarray:
        """Patterns whose runs stay under a cap: at least (for bounds), whatever follows, or if every first is kept."""
        choices, _, _, surely, counted, at_most = self.priced(part)
        if mode == WHATEVER_FOLLOWS:
            return at_most <= cap
        if mode == AT_LEAST:
            return surely <= cap
        fits = counted <= cap
        return fits & ~choices[:, 0] if part.first == 0 else fits

    def front_of(self, part: Part, cap: float, mode: int) -> Front:
        key = (part, cap, mode)
        if key not in self.fronts:
            _, milliseconds, saved, *_ = self.priced(part)
            allowed = self.allowed(part, cap, mode)
            self.fronts[key] = front(milliseconds[allowed], saved[allowed])
        return self.fronts[key]


def _on_front(cost: Floats, gain: Floats, allowed: np.ndarray) -> np.ndarray:
    index = np.nonzero(allowed)[0]
    order = index[np.lexsort((-gain[index], cost[index]))]
    best = np.maximum.accumulate(gain[order])
    return order[np.concatenate([[True], gain[order][1:] > best[:-1]])]


class StagePricer:
    """Least recomputing of every stage of one profile."""

    def __init__(self, problem: AcesoProblem, microbatch: int, tp: int) -> None:
        self.problem = problem
        self.profile = Profile(problem, microbatch, tp)
        rows, kept = self.profile.rows, self.profile.kept
        n = len(rows)
        self.base = np.concatenate([[0.0], np.cumsum(rows[:, 0] + rows[:, 1])]) / 1e3
        self.weights = np.concatenate([[0.0], np.cumsum(rows[:, 4])])
        self.kept = np.concatenate([[0.0], np.cumsum(kept)])
        self.into = np.array([hop_ms(mb, problem.bandwidth_within) for mb in rows[:, 2]])
        self.out = np.array([hop_ms(mb, problem.bandwidth_within) for mb in rows[:, 3]])
        # What a transfer takes longer between nodes. The first stage's input is read where it is.
        self.more_into = np.array([hop_ms(mb, problem.bandwidth_between) for mb in rows[:, 2]]) - self.into
        self.more_into[0] = 0.0
        self.more_out = np.array([hop_ms(mb, problem.bandwidth_between) for mb in rows[:, 3]]) - self.out
        # [i, j]: the largest reserved over i..j, both inclusive
        forward = np.maximum.accumulate(np.triu(np.broadcast_to(rows[:, 6], (n, n))), axis=1)
        backward = np.maximum.accumulate(np.triu(np.broadcast_to(rows[:, 7], (n, n))), axis=1)
        self.reserved = forward + backward
        self._layers: dict[tuple[float, int], list[Front]] = {}
        self._ends: dict[tuple[tuple[Part, ...], float, int], Front] = {}
        self._hulls: dict[tuple[Part, float, int], Floats] = {}

    def milliseconds(self, start: Ints, end: Ints) -> Floats:
        """Without recomputing, with both transfers inside a node."""
        return self.base[end] - self.base[start] + self.into[start] + self.out[end - 1]

    def parts(self, start: int, end: int) -> tuple[tuple[Part, ...], int]:
        """The parts of layers at the ends of a stage, and the number of whole layers between them."""
        length, head = len(self.problem.layer), len(self.problem.head)
        first, last = max(start - head, 0), min(end - head, length * self.problem.layers)
        with_tail = end - head > length * self.problem.layers and start - head < length * self.problem.layers
        if first >= last:
            return (), 0
        layer, phase = divmod(first, length)
        end_layer, end_phase = divmod(last, length)
        if with_tail:
            if layer == end_layer - 1:
                return (Part(phase, length + 1, False),), 0
            tail: tuple[Part, ...] = (Part(0, length + 1, False),)
            end_layer -= 1
        elif layer == end_layer:
            return (Part(phase, end_phase, True),), 0
        else:
            tail = (Part(0, end_phase, True),) if end_phase else ()
        if phase:
            return (Part(phase, length, not tail and end_layer == layer + 1), *tail), end_layer - layer - 1
        return tail, end_layer - layer

    def shapes(self, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Of many stages: a number that is equal where ``parts`` are, and the number of whole layers."""
        length, total = len(self.problem.layer), len(self.problem.layer) * self.problem.layers
        first, last = np.maximum(start - len(self.problem.head), 0), end - len(self.problem.head)
        with_tail = (last > total) & (first < total)
        last = np.minimum(last, total)
        layer, phase = first // length, first % length
        end_layer, end_phase = last // length, np.where(with_tail, length, last % length)
        end_layer = end_layer - with_tail
        single = (layer == end_layer) & (first < last)
        alone = (end_phase == 0) & (end_layer == layer + 1)
        whole = np.where((first >= last) | single, 0, end_layer - layer - (phase > 0))
        code = ((phase * (length + 1) + end_phase) * 2 + single) * 2 + alone
        return np.where(first >= last, -1, code), whole

    def layers(self, count: int, cap: float, mode: int) -> Front:
        known = self._layers.setdefault((cap, mode), [NOTHING])
        one = self.profile.front_of(Part(0, len(self.problem.layer), False), cap, mode)
        while len(known) <= count:
            known.append(both(*known[-1], *one))
        return known[count]

    def ends(self, parts: tuple[Part, ...], cap: float, mode: int) -> Front:
        key = (parts, cap, mode)
        if key not in self._ends:
            total = NOTHING
            for part in parts:
                total = both(*total, *self.profile.front_of(part, cap, mode))
            self._ends[key] = total
        return self._ends[key]

    def hull(self, parts: tuple[Part, ...], cap: float, mode: int) -> Front:
        """The hull steps of some parts together, the cheapest first."""
        found = [self._hull(part, cap, mode) for part in parts]
        steps = np.concatenate(found) if found else np.zeros((0, 2))
        steps = steps[np.argsort(steps[:, 0] / steps[:, 1], kind="stable")]
        return steps[:, 0], steps[:, 1]

    def _hull(self, part: Part, cap: float, mode: int) -> Floats:
        key = (part, cap, mode)
        if key not in self._hulls:
            self._hulls[key] = steps_of(*self.profile.front_of(part, cap, mode))
        return self._hulls[key]

    def excess(self, start: Ints, end: Ints, held: Ints) -> Floats:
        """Megabytes over the limit when nothing is recomputed."""
        weights = self.weights[end] - self.weights[start]
        reserved = np.where(end - start > 1, self.reserved[start, np.maximum(end - 2, 0)], 0.0)
        kept = self.profile.rows[start, 2] + self.kept[end] - self.kept[start]
        return 8 * weights + kept * held + np.maximum(reserved, weights) - self.problem.memory_mb

    def recomputing(self, start: Ints, end: Ints, held: Ints, *, exact: bool) -> tuple[Floats, Floats]:
        """Per stage and micro-batches held: the least milliseconds of recomputing with which it fits, and a bound on
        them.

        Roughly by hulls and few caps, or exactly by fronts and all caps.
        """
        excess = self.excess(start, end, held)
        answer = np.where(excess <= 0, 0.0, np.inf)
        bound = answer.copy()
        over = np.nonzero(excess > 0)[0]
        if not len(over):
            return answer, bound
        code, whole = self.shapes(start[over], end[over])
        _, examples, kind = np.unique(code, return_index=True, return_inverse=True)
        ids = [self.parts(int(start[over[e]]), int(end[over[e]]))[0] for e in examples]
        layer = Part(0, len(self.problem.layer), False)
        caps = self.profile.caps if exact else self.profile.few_caps
        for number, cap in enumerate(caps):
            lower = caps[number - 1] if number else 0.0
            modes = [(AT_LEAST, bound, lower), (WHATEVER_FOLLOWS, answer, cap)]
            for mode, table, price in [*modes, (FIRST_IS_KEPT, answer, cap)] if exact else modes:
                need = (excess[over] + price) / held[over]
                if exact:
                    ends = in_a_row([self.ends(parts, cap, mode) for parts in ids])
                    layers = in_a_row([self.layers(n, cap, mode) for n in range(int(whole.max()) + 1)])
                    paid = least_costs(ends, layers, kind, whole, need)
                else:
                    ends = in_a_row([self.hull(parts, cap, mode) for parts in ids])
                    steps = self._hull(layer, cap, mode)
                    paid = rough_costs(ends, steps, kind, whole, need)[:, 1 if mode == AT_LEAST else 0]
                table[over] = np.minimum(table[over], paid)
        return answer, bound

    def chosen(self, start: int, end: int, held: int) -> tuple[bool, ...]:
        """The operators to recompute: the choice behind ``recomputing``'s answer, found by retracing the sums."""
        flags = np.zeros(end - start, dtype=bool)
        excess = float(self.excess(np.array(start), np.array(end), np.array(held)))
        if excess <= 0:
            return tuple(flags.tolist())
        parts, whole = self.parts(start, end)
        layer = Part(0, len(self.problem.layer), False)
        costs = {}
        for cap, mode in itertools.product(self.profile.caps.tolist(), (WHATEVER_FOLLOWS, FIRST_IS_KEPT)):
            need = (excess + cap) / held
            costs[cap, mode] = least_cost(*self.ends(parts, cap, mode), *self.layers(whole, cap, mode), need)
        cap, mode = min(costs, key=lambda key: costs[key])
        need = (excess + cap) / held
        # In the order of the chain: a part at the beginning, whole layers, a part at the end.
        leading = [p for p in parts[:1] if p.first > 0 or (not whole and len(parts) == 1)]
        order = leading + [layer] * whole + [p for p in parts if p not in leading]
        position = max(start, len(self.problem.head)) - start
        rest = [self.profile.front_of(p, cap, mode) for p in order]
        following = [NOTHING]  # the front of all parts after each, the last first
        for other in reversed(rest[1:]):
            following.append(both(*following[-1], *other))
        for number, part in enumerate(order):
            after = following.pop()
            best = min(
                range(len(rest[number][0])),
                key=lambda k: rest[number][0][k] + _cheapest(after, need - rest[number][1][k]),
            )
            cost, saved = rest[number][0][best], rest[number][1][best]
            need -= saved
            choices, milliseconds, gains, *_ = self.profile.priced(part)
            fits = self.profile.allowed(part, cap, mode) & (milliseconds == cost) & (gains == saved)
            flags[position : position + part.last - part.first] = choices[int(np.argmax(fits))]
            position += part.last - part.first
        return tuple(flags.tolist())


def _cheapest(after: Front, need: float) -> float:
    index = int(np.searchsorted(after[1], need - 1e-9 * max(1.0, abs(need))))
    return float(after[0][index]) if index < len(after[1]) else np.inf


class MicrobatchSearch:
    """All plans with one micro-batch size."""

    def __init__(self, problem: AcesoProblem, microbatch: int) -> None:
        self.problem, self.microbatch = problem, microbatch
        self.options = [
            (tp, dp)
            for tp in DEGREES
            for dp in DEGREES
            if tp * dp <= problem.devices and microbatch % dp == 0 and (microbatch // dp, tp) in problem.profiles
        ]
        self.pricers = {o: StagePricer(problem, microbatch // o[1], o[0]) for o in self.options}
        self.microbatches = problem.global_batch // microbatch
        work = np.min([np.diff(p.base) * tp * dp for (tp, dp), p in self.pricers.items()], axis=0)
        self.work = np.concatenate([[0.0], np.cumsum(work)])
        self.least_total = float(np.min([np.diff(p.base) for p in self.pricers.values()], axis=0).sum())

    @property
    def work_bound(self) -> float:
        """Seconds: the devices' work, evenly spread, for all micro-batches but the first, and that one's way through."""
        return ((self.microbatches - 1) * self.work[-1] / self.problem.devices + self.least_total) / 1e3

    def solve(self, limit: float, report: Report = nobody) -> tuple[Solution[AcesoPlan] | None, float]:
        """A plan better than ``limit`` seconds if there is one, and a bound on all plans of this size.

        First with cuts between layers only: a good plan, so a limit. Then all stages are priced roughly; what by their
        bounds belongs to no plan better than the one found so is dropped; the rest is priced exactly.
        """
        best = self._at_layers(limit)
        cost = best.cost if best else limit
        if best:
            report(best)
        start, end = np.triu_indices(len(self.problem.operators) + 1, 1)
        tables = [self._rough(number, start, end, cost) for number in range(len(self.options))]
        rough = self._problem(tables)
        if not may_be_below(rough, cost * 1e3).any():
            return best, self._with_idle_devices(tables, cost)
        found = self._composed(rough, bounded=False)
        if found is not None and found.cost < cost:
            best, cost = found, found.cost
            report(best)
        useful = may_be_below(rough, cost * 1e3)
        if not useful.any():
            return best, self._with_idle_devices(tables, cost)
        rest = self._problem([self._exact(number, rough.candidates, useful) for number in range(len(self.options))])
        found = self._composed(rest, bounded=True)
        bound = cost if found is None else min(found.lower_bound, cost)
        if found is not None and found.cost < cost:
            best = found
        return best, min(bound, self._with_idle_devices(tables, cost))

    def _at_layers(self, limit: float) -> Solution[AcesoPlan] | None:
        """The best plan with cuts between layers only, roughly priced, if it is better than the limit."""
        head, length, total = len(self.problem.head), len(self.problem.layer), len(self.problem.operators)
        places = np.array([0, *range(head, head + self.problem.layers * length + 1, length), total])
        first, last = np.triu_indices(len(places), 1)
        tables = [self._rough(number, places[first], places[last], limit) for number in range(len(self.options))]
        found = self._composed(self._problem(tables), bounded=False)
        return found if found is not None and found.cost < limit else None

    def _problem(self, tables: list[StageTable]) -> PipelineProblem:
        cuts = len(self.problem.operators) + 1
        objective = filled_and_drained(self.microbatches)
        # Between nodes where the devices before (by the devices after: all others) fill whole nodes, and at the very end.
        before = self.problem.devices - np.arange(self.problem.devices + 1)
        far = (before > 0) & (before % self.problem.devices_per_node == 0)
        return PipelineProblem(self.problem.name, cuts, self.problem.devices, pack(tables), objective, far)

    def _with_idle_devices(self, tables: list[StageTable], cost: float) -> float:
        """Seconds, ``cost`` at most, that no plan undercuts which leaves devices idle.

        Nodes begin with a plan's first device, but compositions count devices from the last; with all devices in use both
        are the same. Other plans are bounded as if they were in one node.
        """
        devices = self.problem.devices - 1
        fitting = [table for table in tables if table.devices <= devices]
        if not fitting or self.problem.devices < self.problem.devices_per_node:
            return cost
        near = replace(self._problem(fitting), devices=devices, far=np.zeros(devices + 1, dtype=bool))
        if not may_be_below(near, cost * 1e3).any():
            return cost
        try:
            return min(cost, compose(near).lower_bound / 1e3)
        except Infeasible:
            return cost

    def _composed(self, problem: PipelineProblem, *, bounded: bool) -> Solution[AcesoPlan] | None:
        """The best plan of some candidate stages, with the bound of these candidates."""
        try:
            found = compose(problem, bounded=bounded)
        except Infeasible:
            return None
        stages = []
        for stage in found.answer:
            tp, dp = self.options[stage.label]
            flags = self.pricers[tp, dp].chosen(stage.start, stage.end, stage.holds)
            stages.append(AcesoStage(stage.start, stage.end, tp, dp, flags))
        plan = AcesoPlan(self.microbatch, tuple(stages))
        seconds, memory = check(self.problem, plan)
        whole = sum(stage.tp * stage.dp for stage in plan.stages) == self.problem.devices
        slower = whole and max(seconds) * 1e3 > found.cost * (1 + 1e-9)
        if max(memory) > self.problem.memory_mb * (1 + 1e-9) or slower:
            raise AssertionError(f"the plan's own rule disagrees with its price: {seconds}, {memory}")
        bound = min(found.lower_bound / 1e3, max(seconds))
        return Solution(plan, max(seconds), bound, bound >= max(seconds), found.seconds)

    def _rough(self, number: int, start: Ints, end: Ints, limit: float) -> StageTable:
        """The stages of one (tp, dp) that a plan under the limit may have: fast enough, leaving no more than others
        can do.
        """
        tp, dp = self.options[number]
        repeats = self.microbatches - 1
        slowest = (limit * 1e3 - self.least_total) / repeats if repeats else np.inf
        pricer, devices, total = self.pricers[tp, dp], tp * dp, len(self.problem.operators)
        base = pricer.milliseconds(start, end)
        useful = base <= slowest
        if np.isfinite(slowest):
            left = self.work[-1] - (self.work[end] - self.work[start])
            useful &= left <= slowest * (self.problem.devices - devices) * (1 + 1e-12)
        start, end, base = start[useful], end[useful], base[useful]
        most = self.problem.devices - devices + 1
        # The last stage holds one micro-batch, all others more.
        row, column = np.nonzero(np.arange(most)[None, :] < np.where(end == total, 1, most)[:, None])
        answer, bound = pricer.recomputing(start[row], end[row], column + 1, exact=False)
        return _table(pricer, start, end, devices, number, base, most, row, column, answer, bound, slowest)

    def _exact(self, number: int, rows: Candidates, useful: np.ndarray) -> StageTable:
        """The useful steps of one (tp, dp), priced exactly."""
        tp, dp = self.options[number]
        pricer, devices = self.pricers[tp, dp], tp * dp
        row_of = np.repeat(np.arange(len(rows.start)), np.diff(rows.first_step))
        before = np.concatenate([[0], rows.holds[:-1]])
        before[rows.first_step[:-1]] = 0
        steps = np.nonzero(useful & (rows.label == number))[0]
        candidates, row = np.unique(row_of[steps], return_inverse=True)
        start, end = rows.start[candidates], rows.end[candidates]
        most = self.problem.devices - devices + 1
        counts = rows.holds[steps] - before[steps]
        held = np.concatenate([[0], *(np.arange(before[s] + 1, rows.holds[s] + 1) for s in steps)])[1:].astype(np.int64)
        row = np.repeat(row, counts)
        answer, bound = pricer.recomputing(start[row], end[row], held, exact=True)
        base = pricer.milliseconds(start, end)
        return _table(pricer, start, end, devices, number, base, most, row, held - 1, answer, bound, np.inf)


def _table(
    pricer: StagePricer, start: Ints, end: Ints, devices: int, number: int, base: Floats, most: int, row: Ints,
    column: Ints, answer: Floats, bound: Floats, slowest: float,
) -> StageTable:  # fmt: skip
    """Prices of (row, column) as a table; what is slower than the limit is left out."""
    seconds, bounds = np.full((2, len(start), most), np.inf)
    fits = base[row] + bound <= slowest
    seconds[row[fits], column[fits]] = base[row[fits]] + answer[fits]
    bounds[row[fits], column[fits]] = base[row[fits]] + bound[fits]
    some = np.isfinite(bounds).any(axis=1)
    return StageTable(
        start[some], end[some], devices, seconds[some], bounds[some], label=number,
        far_in=pricer.more_into[start[some]], far_out=pricer.more_out[end[some] - 1],
    )  # fmt: skip
