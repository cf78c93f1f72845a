"""Compositions of stages timed in one order of passes, event by event, and improved by that.

The exact composition (:mod:`~shardwright.search.joint.compose`) minimises what filling and draining a pipeline once takes,
closing seconds spread over the micro-batches. The step differs a little from that: gradient sums of later stages run
beside the draining of earlier ones, and how a stage is best run depends on which stage is the slowest. So what was composed
is changed by one block or by neighbours' devices as long as the step gets shorter; of few compositions all are timed. The
order is 1F1B or another (:mod:`~shardwright.search.joint.orders`); where it has two stages for a group of devices, a run of
the composition is what a group has, half of it in each of its stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwright.search.joint._kernels import last_backwards
from shardwright.search.joint.found import JointPlan, JointStage
from shardwright.search.joint.orders import down_and_up, order_of, stages_per_group
from shardwright.search.joint.recomputing import freed_by

if TYPE_CHECKING:
    from shardwright.search.joint.cuts import PricedCuts
    from shardwright.search.joint.space import Row, Space

MOST_CHANGES = 20_000
"""So many stages, in all small changes of a composition, are timed at most."""
FEW = 2_000
"""Up to so many compositions all of them are timed."""


class Run(NamedTuple):
    """What a group of devices has before its strategy is chosen: from cut to cut, on so many units of devices."""

    start: int
    end: int
    units: int


class Choice(NamedTuple):
    """A group with its strategy: seconds of a micro-batch in each of its stages, seconds after the last one, blocks that
    recompute wholly and lightly, micro-batches held."""

    row: Row
    parts: tuple[float, ...]
    closing: float
    wholly: int
    lightly: int
    held: float

    @property
    def seconds(self) -> float:
        return sum(self.parts)


class Place(NamedTuple):
    """Where a group stands: units of devices after it, groups after it, all groups, and whether the way from the last back
    to the first is a slow one."""

    after: int
    behind: int
    groups: int
    far_round: bool


class Timed:
    """Compositions of some rows timed in one order; stages are chosen once."""

    def __init__(self, space: Space, rows: Sequence[Row], schedule: str = "1f1b") -> None:
        self.space, self.rows, self.schedule = space, rows, schedule
        self.stages_each, self.v = stages_per_group(schedule), down_and_up(schedule)
        self._chosen: dict[tuple[object, ...], tuple[Choice, ...]] = {}
        self._placed: dict[tuple[Run, Place], tuple[Choice, ...]] = {}

    def kind(self, run: Run) -> np.ndarray:
        """What a group's prices depend on, as columns."""
        return self.space.cutting.kinds(np.array([run.start]), np.array([run.end]), both_ends=self.v)

    def kinds(self, run: Run) -> list[np.ndarray]:
        """The same of each of its stages."""
        whole = self.kind(run)
        if self.stages_each == 1:
            return [whole]
        (count,), (first,), (last,) = whole
        return [np.array([[count - count // 2], [first], [0]]), np.array([[count // 2], [0], [last]])]

    def choices(self, run: Run, place: Place) -> tuple[Choice, ...]:
        """How a group may be run: the fastest a micro-batch, and those that close faster, none worse in both."""
        if (run, place) not in self._placed:
            self._placed[run, place] = self._choices(run, place)
        return self._placed[run, place]

    def _choices(self, run: Run, place: Place) -> tuple[Choice, ...]:
        space = self.space
        if not space.cutting.nested[run.start, run.end]:
            return ()
        kind = self.kind(run)
        if self.stages_each > 1 and kind[0, 0] < self.stages_each:
            return ()
        borders = self._borders(run, place)
        passes = self._passes(place)
        key = (
            kind.tobytes(),
            run.units,
            str(borders),
            passes,
            place.after % run.units,
            *self._where(place.after, run.units),
        )
        if key not in self._chosen:
            kinds, found = self.kinds(run), []
            for row in self.rows:
                if row.units != run.units or not row.low <= place.after <= row.high - run.units:
                    continue
                if place.after % row.align:
                    continue
                held = float(passes)
                if self.stages_each > 1:  # all passes are taken for those of the stage that holds more
                    flying = [row.price.held.of(*own)[0] for own in kinds]
                    held *= float(max(flying) / max(sum(flying), 1.0))
                more, wholly, lightly = (float(x[0, 0]) for x in space.recomputed(row, kind, np.array([held])))
                if math.isfinite(more):
                    parts = tuple(
                        float(row.price.seconds.of(*own)[0] + more * share)
                        + sum(2 * row.one_hop(size, far) for size, far in ends)
                        for own, share, ends in zip(kinds, _shares(kinds), borders, strict=True)
                    )
                    closing = float(row.price.closing.of(*kind)[0])
                    if math.isfinite(sum(parts)):
                        found.append(Choice(row, parts, closing, int(wholly), int(lightly), held))
            found.sort(key=lambda choice: (choice.seconds, choice.closing))
            kept: list[Choice] = []
            for choice in found:
                if not kept or choice.closing < kept[-1].closing:
                    kept.append(choice)
            self._chosen[key] = tuple(kept)
        return self._chosen[key]

    def _passes(self, place: Place) -> int:
        """Forward passes that a group holds at once."""
        if self.schedule == "1f1b" or place.groups == 1:
            return place.behind + 1
        if self.schedule == "gpipe":
            return self.space.microbatches
        order = order_of(self.schedule, place.groups, self.space.microbatches)
        return order.in_flight[place.groups - 1 - place.behind]

    def _borders(self, run: Run, place: Place) -> list[list[tuple[float, bool]]]:
        """Per stage of a group, of each of its borders to other groups: the bytes that cross it, and whether they do so over
        a slow link."""
        far, first, last = self.space.far, place.behind == place.groups - 1, place.behind == 0
        cutting = self.space.cutting
        received, sent = (
            float(size[0]) for size in cutting.borders(cutting.kinds(*np.array([[run.start], [run.end]])))
        )
        before = [] if first else [(received, bool(far[place.after + run.units]))]
        behind = [] if last else [(sent, bool(far[place.after]))]
        if self.stages_each == 1:
            return [[*before, *behind]]
        if self.v:
            return [[*before, *behind], [*behind, *before]]
        round_ = [(max(received, sent), place.far_round)]
        return [[*before, *(behind or round_)], [*(before or round_), *behind]]

    def _where(self, after: int, units: int) -> tuple[bool, ...]:
        """In which parts of a line of unlike devices a stage stands."""
        parts = sorted({(row.low, row.high) for row in self.rows})
        return tuple(low <= after and after + units <= high for low, high in parts)

    def stages(self, runs: Sequence[Run]) -> list[tuple[Choice, ...]] | None:
        """The ways to run every group of a composition; nothing where one has none."""
        found, after, groups = [], 0, len(runs)
        if groups == 1 and self.schedule not in ("1f1b", "gpipe"):
            return None  # every order of one stage is the same
        if self.stages_each > 1 and not self.space.cutting.halves:
            return None
        used = sum(run.units for run in runs)
        far_round = self.stages_each > 1 and bool(self.space.far[1:used].any())
        for behind, run in enumerate(reversed(runs)):
            if after + run.units > self.space.devices:
                return None
            choices = self.choices(run, Place(after, behind, groups, far_round))
            if not choices:
                return None
            found.append(choices)
            after += run.units
        return found[::-1]

    def step(self, chosen: Sequence[Choice]) -> float:
        """Seconds of a step."""
        microbatches, groups = self.space.microbatches, len(chosen)
        if self.schedule in ("1f1b", "gpipe"):
            warm = np.arange(groups, 0, -1) if self.schedule == "1f1b" else np.full(groups, microbatches)
            ends = last_backwards(np.array([c.seconds for c in chosen]), microbatches, np.minimum(warm, microbatches))
        else:
            order = order_of(self.schedule, groups, microbatches)
            ends = order.ends([chosen[d].parts[k // groups] for k, d in enumerate(order.device_of)])
        return float((ends + [c.closing for c in chosen]).max())

    def at_least(self, ways: Sequence[tuple[Choice, ...]]) -> float:
        """What no step undercuts whose groups are run in one of these ways each: a group works through its micro-batches and
        closes after the first of them was brought to it, through the first stages of those before it."""
        m, filled, least = self.space.microbatches, 0.0, 0.0
        for choices in ways:
            least = max(least, filled + min(m * c.seconds + c.closing for c in choices))
            filled += min(c.parts[0] for c in choices) / 3.0
        return least

    def timed(self, runs: Sequence[Run], below: float = math.inf) -> tuple[float, list[Choice]] | None:
        """The step of a composition, every stage run as is best for it alone or, one by one, for the step; nothing where it
        has none, or none ``below`` so many seconds."""
        ways = self.stages(runs)
        if ways is None or self.at_least(ways) >= below:
            return None
        m = self.space.microbatches
        chosen = [min(choices, key=lambda c: c.seconds + c.closing / m) for choices in ways]
        best = self.step(chosen)
        for place, choices in enumerate(ways):
            for other in choices if len(choices) > 1 else ():
                changed = [*chosen[:place], other, *chosen[place + 1 :]]
                if other is chosen[place] or m * other.seconds + other.closing >= best:
                    continue
                if (seconds := self.step(changed)) < best:
                    best, chosen = seconds, changed
        return best, chosen

    def fastest_of_few(self) -> list[Run] | None:
        """The composition with the shortest step, where there are so few that all can be timed."""
        last, powers = self.space.cuts - 1, [1 << k for k in range(self.space.devices.bit_length())]
        most, nested = min(self.space.most, last), self.space.cutting.nested
        ways, count = nested[0].astype(float), 0.0  # chains of cuts that lead to each
        for stages in range(1, most + 1):
            count += ways[last] * len(powers) ** stages
            if count > FEW:
                return None
            ways = ways @ nested
        best: tuple[float, list[Run]] | None = None
        for stages in range(1, most + 1):
            for cuts, units in itertools.product(
                _chains(nested, [0], stages), itertools.product(powers, repeat=stages)
            ):
                runs = [Run(*two, own) for two, own in zip(itertools.pairwise(cuts), units, strict=True)]
                found = self.timed(runs, math.inf if best is None else best[0])
                if found is not None and (best is None or found[0] < best[0]):
                    best = found[0], runs
        return None if best is None else best[1]

    def fastest_of_even(self) -> list[Run] | None:
        """Of the compositions in which all groups have as many devices and as much to do, the one with the shortest step."""
        return self._even

    @cached_property
    def _even(self) -> list[Run] | None:
        space, best = self.space, (math.inf, list[Run]())
        for count in (count for count in range(1, space.most + 1) if space.devices % count == 0):
            cuts, units = space.cutting.even(count), space.devices // count
            if cuts is not None:
                runs = [Run(*two, units) for two in itertools.pairwise(cuts)]
                if (found := self.timed(runs, best[0])) is not None and found[0] < best[0]:
                    best = found[0], runs
        return best[1] or None

    def improved(self, runs: Sequence[Run], most: int = MOST_CHANGES) -> JointPlan | None:
        """What small changes of a composition come to, as long as they make the step shorter."""
        best, left, here = self.timed(runs), most // len(runs), list(runs)
        while best is not None and left > 0:
            for other in _changes(here, self.space.cutting):
                left -= 1
                found = self.timed(other, best[0])
                if found is not None and found[0] < best[0] * (1 - 1e-12):
                    best, here = found, other
                    break
                if left <= 0:
                    break
            else:
                break
        return self.plan(here)

    def plan(self, runs: Sequence[Run]) -> JointPlan | None:
        """A composition as a plan; nothing where it does not fit."""
        found = self.timed(runs)
        if found is None:
            return None
        space, (seconds, chosen), groups = self.space, found, len(runs)
        cutting = space.cutting
        unhidden = self.step([self._unhidden(run, choice) for run, choice in zip(runs, chosen, strict=True)])
        device_of = (
            range(groups) if self.stages_each == 1 else order_of(self.schedule, groups, space.microbatches).device_of
        )
        first_of = [sum(run.units for run in runs[:place]) * space.unit for place in range(groups)]
        stages, begins = [], 0
        for number, group in enumerate(device_of):
            run, choice, part = runs[group], chosen[group], number // groups
            price, kind, own = choice.row.price, self.kind(run), self.kinds(run)
            less, meanwhile = freed_by(price, kind, choice.wholly, choice.lightly, choice.held)
            memory = price.resting.of(*kind) + price.held.of(*kind) * choice.held - less + meanwhile
            shares = _shares(own)
            wholly, lightly = _dealt(choice, shares[0])[part]
            ends = cutting.number(run.end) if self.stages_each == 1 else begins + int(own[part][0, 0])
            stages.append(
                JointStage(
                    first_block=begins,
                    last_block=ends,
                    first_device=first_of[group],
                    mesh=price.mesh,
                    strategy_name=price.name,
                    strategy=price.strategy,
                    recomputed_blocks=wholly,
                    lightly_blocks=lightly,
                    holds=math.ceil(choice.held),
                    seconds=choice.parts[part],
                    closing_seconds=choice.closing * shares[part],
                    memory_bytes=float(memory[0]),
                    operators=cutting.operators(run.start, run.end),
                )
            )
            begins = ends
        received, sent_on = cutting.borders(cutting.kinds(*np.array([[run.start, run.end] for run in runs]).T))
        sent = 2 * self.stages_each * space.microbatches * float((received + sent_on).max())
        sent /= min(stage.devices for stage in stages)
        return JointPlan(
            tuple(stages), space.size, space.microbatches, self.schedule, seconds, 0.0, 0.0,
            sent * (len(stages) > 1), unhidden,
        )  # fmt: skip

    def _unhidden(self, run: Run, choice: Choice) -> Choice:
        """A choice were all traffic of its parameters hidden."""
        traffic = [float(choice.row.price.traffic.of(*own)[0]) for own in self.kinds(run)]
        return choice._replace(parts=tuple(t - a for t, a in zip(choice.parts, traffic, strict=True)), closing=0.0)


def _chains(nested: np.ndarray, begun: Sequence[int], stages: int) -> Iterator[list[int]]:
    """Every way to lead on to the last cut in so many stages."""
    if stages == 1:
        if nested[begun[-1], -1]:
            yield [*begun, len(nested) - 1]
        return
    for cut in map(int, np.flatnonzero(nested[begun[-1]])):
        yield from _chains(nested, [*begun, cut], stages - 1)


def _shares(kinds: Sequence[np.ndarray]) -> list[float]:
    """Which part of a group's blocks each of its stages has."""
    counts = [int(own[0, 0]) for own in kinds] if len(kinds) > 1 else [1]
    return [count / sum(counts) for count in counts]


def _dealt(choice: Choice, share: float) -> list[tuple[int, int]]:
    """Blocks that recompute wholly and lightly in each stage of a group, of whose blocks the first has this share."""
    wholly = math.ceil(choice.wholly * share)
    lightly = math.ceil((choice.wholly + choice.lightly) * share) - wholly
    return [(wholly, lightly), (choice.wholly - wholly, choice.lightly - lightly)]


def _changes(runs: Sequence[Run], cutting: PricedCuts) -> Iterator[list[Run]]:
    """Small changes of a composition: blocks or pieces from one stage to another, devices of neighbours swapped, neighbours
    made one, a stage on more or fewer devices or cut in two."""
    stages = len(runs)
    pairs = sorted(itertools.permutations(range(stages), 2), key=lambda pair: abs(pair[0] - pair[1]))
    for giver, taker in pairs:
        low, high, by = min(giver, taker), max(giver, taker), 1 if giver > taker else -1
        places = [cutting.next_to(run.end, by) for run in runs[low:high]]  # where every border between them may go
        for number in range(max(map(len, places)) if all(places) else 0):
            moved, ends = list(runs), [one[number % len(one)] for one in places]
            for k, end in enumerate(ends, low):
                moved[k] = moved[k]._replace(end=end)
                moved[k + 1] = moved[k + 1]._replace(start=end)
            if all(cutting.nested[run.start, run.end] for run in moved[low : high + 1]):
                yield moved
    for k, (one, other) in enumerate(itertools.pairwise(runs)):
        if one.units != other.units:
            yield [*runs[:k], one._replace(units=other.units), other._replace(units=one.units), *runs[k + 2 :]]
        for units in {one.units, other.units, 2 * max(one.units, other.units)}:
            yield [*runs[:k], Run(one.start, other.end, units), *runs[k + 2 :]]
    for k, run in enumerate(runs):
        for units in (2 * run.units, run.units // 2):
            if units:
                yield [*runs[:k], run._replace(units=units), *runs[k + 1 :]]
        inside = map(int, np.flatnonzero(cutting.nested[run.start] & cutting.nested[:, run.end]))
        for units, cut in itertools.product((run.units, run.units // 2), inside):
            if units:
                yield [*runs[:k], Run(run.start, cut, units), Run(cut, run.end, units), *runs[k + 1 :]]
