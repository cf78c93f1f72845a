"""What the steps say about the speeds of the ranks, and whether to share the work anew.

A rank's work in a step is taken to be its slowness times (the rows it has + a fixed part, which it has whatever its rows:
what prices say that the axis does not cut, the update, seen by itself, and what else did not move with the rows when they
were moved). Over a window of steps the median of each rank's work gives the slownesses; rows dealt out by them
(:func:`shardwright.search.dealing.deal`) give a step that is expected, and work over summed speeds the one that is possible.
A rank so slow that its fixed part alone holds the others up is given no rows at all, where it can be left out. A window asks
for a move when nearly all of its steps
would gain by it, when its halves agree (what is still changing is not acted upon), when together they gain more than the
noise of single steps explains (the median of successive differences, which a change of level enters only once), and when
what is gained pays for the move within a stated number of steps. Short windows see large changes soon, long ones small
changes late. Right after a move, made because something had changed, less is asked of a window to correct it, once:
how fast ranks are with the work that they have now was an extrapolation before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.search.dealing import deal

Floats = NDArray[np.float64]
Seconds = Sequence[float] | Floats
"""Of every rank."""

NEARLY_ALL = 0.75
"""More than this part of a window's steps must gain by themselves: spikes come alone or in pairs."""
MOST_FIXED = 0.4
"""Of a rank's usual rows: more of its work is not believed to be fixed."""
DEAR = 0.12
"""Part of the step that leaving a rank out must save over the best shares with it."""
CORRECTION, CORRECTED_WITHIN = 3, 12
"""Steps that are enough to correct a move, and after it how many of them may be looked at for that."""
CORRECTING_CERTAINTY = 2.0
LEAST_NOISE = 0.01
"""Part of a step: clocks, caches and schedulers are never quieter for long."""


@dataclass(frozen=True)
class Rule:
    """When a move is worth making: it must save ``gain`` of the step, be ``certainty`` standard errors away from noise, and
    pay for itself within ``steps``."""

    gain: float = 0.04
    certainty: float = 5.0
    steps: int = 100
    windows: tuple[int, ...] = (4, 8, 16, 32)


@dataclass(frozen=True)
class Verdict:
    """What a window of steps asks for. Seconds are of a whole step, communication included.

    ``slowness`` is relative to the median rank (of two, the faster one), ``rank`` the one whose slowness has changed most,
    ``since`` which step.
    """

    rows: tuple[int, ...]
    slowness: tuple[float, ...]
    rank: int
    since: int
    seconds: float
    expected: float
    possible: float
    fixed: tuple[float, ...] = ()
    """Of every rank, what it does whatever its rows, in rows."""


class Speeds(NamedTuple):
    """How ranks and steps are by now: slownesses, the rank that is farthest from the others and since which step, the
    seconds of a step, and what they were if all work could be dealt out by speed."""

    slowness: tuple[float, ...]
    rank: int
    since: int
    seconds: float
    ideal: float


class _Step(NamedTuple):
    """One step as all ranks saw it."""

    number: int
    work: Floats
    waited: Floats
    others: float


@dataclass
class SpeedWatch:
    """The steps of some ranks that share ``rows``; each keeps one at least, or, where they are ``droppable``, none and is
    left out."""

    rows: tuple[int, ...]
    rule: Rule = field(default_factory=Rule)
    droppable: bool = False

    def __post_init__(self) -> None:
        length = max(self.rule.windows)
        self._steps: deque[_Step] = deque(maxlen=length)
        self._priced = self.fixed = np.zeros(len(self.rows))
        """Of every rank, work that does not depend on the rows, in rows: by prices, and by all that is known."""
        self._differences: deque[Floats] = deque(maxlen=4 * length)
        self._updates: deque[float] = deque(maxlen=length)
        self._learnt: float | None = None
        self._looks, self._correcting = 0, False
        self._before: tuple[Floats, tuple[int, ...]] | None = None
        self.slowness: tuple[float, ...] = (1.0,) * len(self.rows)
        """As it was known when the rows were last dealt out."""

    def add(self, step: int, work: Seconds, waited: Seconds, update: Seconds = (), others: float = 0.0) -> None:
        """The seconds of one step, of every rank; a step that some rank does not know is passed over.

        ``update``: the part of the work that comes after the backward pass, whatever the rows. ``others``: the longest work
        of ranks that share none of these rows and are waited for all the same.
        """
        seconds = np.asarray(work, float)
        if not (np.isfinite(seconds).all() and (seconds > 0).all() and np.isfinite(others)):
            return
        if self._steps:
            self._differences.append(np.abs(np.log(seconds / self._steps[-1].work)))
        self._steps.append(_Step(step, seconds, np.asarray(waited, float), others))
        if len(update):
            apart = np.asarray(update, float)
            self._updates.append(float((apart / (seconds - apart) * np.asarray(self.rows)).min()))

    def priced(self, fixed: Seconds) -> None:
        """What prices say of every rank's fixed part, in rows."""
        most = MOST_FIXED * sum(self.rows) / len(self.rows)
        self._priced = np.clip(np.nan_to_num(np.asarray(fixed, float)), 0.0, most)
        self._reckon()

    def _reckon(self) -> None:
        """What a move has taught counts more than prices."""
        known = self._priced if self._learnt is None else np.full(len(self.rows), self._learnt)
        self.fixed = np.maximum(known, median(self._updates) if self._updates else 0.0)

    @property
    def noise(self) -> float:
        """The spread of a single step's work around its level (the median of differences is 0.95 of it)."""
        if not self._differences:
            return inf
        return max(float(np.median(np.stack(self._differences))) / 0.954, LEAST_NOISE)

    @property
    def step_seconds(self) -> float | None:
        """What a step takes lately, working and waiting."""
        if len(self._steps) < min(self.rule.windows):
            return None
        work, waited, _ = self._window(min(self.rule.windows))
        return _whole(work, waited)

    @property
    def seen_slowness(self) -> tuple[float, ...]:
        """Of every rank lately, relative to the median rank."""
        levels = np.median(self._window(min(self.rule.windows))[0], axis=0)
        return tuple(_relative(levels / (np.asarray(self.rows) + self.fixed)).tolist())

    def verdict(self, move_seconds: float) -> Verdict | None:
        """The rows to deal out now, where that is worth ``move_seconds``; nothing where it is not."""
        known = len(self._steps)
        correcting = self._correcting and CORRECTION <= known <= CORRECTED_WITHIN
        if known < (CORRECTION if correcting else min(self.rule.windows)):
            return None
        self._looks += 1
        self._reckon()
        work, waited, others = self._window(known)
        noise = None
        for length in (known, *self.rule.windows) if correcting else self.rule.windows:
            if length > known or self._looks % max(length // 8, 1):
                continue  # a long window has not changed much since the last look
            window, beside = work[-length:], others[-length:]
            levels, floor = np.median(window, axis=0), float(np.median(beside))
            costs, now = levels / (np.asarray(self.rows) + self.fixed), max(float(levels.max()), floor)
            possible = max(self._possible(costs), floor)
            if 1 - possible / now < self.rule.gain:
                continue
            noise = self.noise if noise is None else noise
            rows = self._asked(window, beside, costs, 1 - possible / now, noise, move_seconds / now)
            if rows is not None:
                communication = max(_whole(window, waited[-length:]) - now, 0.0)  # what even the last rank waits for
                expected = max(self._expected(rows, costs), floor)
                return self._told(rows, costs, *(s + communication for s in (now, expected, possible)))
        return None

    def speeds(self, length: int) -> Speeds | None:
        """Of the last steps, once there are so many since the rows were dealt out and none of their halves differs."""
        if len(self._steps) < length:
            return None
        work, waited, others = self._window(length)
        if self._still_changing(work, self.noise):
            return None
        levels = np.median(work, axis=0)
        costs, now = levels / (np.asarray(self.rows) + self.fixed), max(float(levels.max()), float(np.median(others)))
        seconds = _whole(work, waited)
        # What every rank does in full would be done once.
        ideal = float((sum(self.rows) + self.fixed.mean()) / (1 / costs).sum()) + max(seconds - now, 0.0)
        slowness = _relative(costs)
        rank = int(np.argmax(np.abs(np.log(slowness))))
        return Speeds(tuple(slowness.tolist()), rank, self._since(rank, float(slowness[rank])), seconds, ideal)

    def _possible(self, costs: Floats) -> float:
        """Work over summed speeds: of all ranks, or of the fastest of them where others can be left out."""
        order = np.argsort(costs)
        seconds = (sum(self.rows) + np.cumsum(self.fixed[order])) / np.cumsum(1 / costs[order])
        return float(seconds.min() if self.droppable else seconds[-1])

    def _expected(self, rows: tuple[int, ...], costs: Floats) -> float:
        return max(float(costs[r] * (n + self.fixed[r])) for r, n in enumerate(rows) if n)

    def _dealt(self, costs: Floats) -> tuple[int, ...]:
        """The rows by speed; without a rank only where that is worth a dearer move."""
        return dealt(sum(self.rows), costs, self.fixed, DEAR if self.droppable else inf)

    def moved(self, rows: tuple[int, ...]) -> None:
        """The rows were dealt out anew: what is known of steps until now was known of other rows."""
        known = len(self._steps) >= CORRECTION and rows != self.rows
        length = min(self.rule.windows)
        self._before = (np.median(self._window(length)[0], axis=0), self.rows) if known else None
        # What corrects a move is not corrected itself.
        self._correcting = rows != self.rows and not (self._correcting and len(self._steps) <= CORRECTED_WITHIN)
        self.rows = rows
        self._steps.clear()

    def learn(self) -> None:
        """After a move: how much of the work did not move with the rows?"""
        length = min(self.rule.windows)
        if self._before is None or len(self._steps) < CORRECTION:
            return
        (work, rows), now = self._before, np.median(self._window(length)[0], axis=0)
        self._before = None
        # now / work = (fixed + rows now) / (fixed + rows before) on every rank. The least of their answers is taken, and not
        # too much of it: where it is too little a move falls short and the next one mends it, too much overshoots.
        slope, moved = now - work, np.asarray(self.rows) != np.asarray(rows)
        rest = work * np.asarray(self.rows) - now * np.asarray(rows)
        answers = rest[moved] / np.where(slope[moved] == 0, np.inf, slope[moved])
        self._learnt = float(np.clip(answers.min(initial=np.inf), 0.0, MOST_FIXED * sum(rows) / len(rows)))
        self._reckon()

    def _window(self, length: int) -> tuple[Floats, Floats, Floats]:
        steps = list(self._steps)[-length:]
        return (
            np.stack([s.work for s in steps]),
            np.stack([s.waited for s in steps]),
            np.array([s.others for s in steps]),
        )

    def _asked(
        self, work: Floats, others: Floats, costs: Floats, most: float, noise: float, move_steps: float
    ) -> tuple[int, ...] | None:
        """The rows that a window asks for, which could gain ``most`` of the step; a move takes as long as ``move_steps``."""
        correcting = self._correcting and len(work) <= CORRECTED_WITHIN
        certainty, part = (CORRECTING_CERTAINTY, 0.5) if correcting else (self.rule.certainty, NEARLY_ALL)
        needed = max(self.rule.gain, certainty * noise / sqrt(len(work)))
        if most < needed:
            return None
        rows = self._dealt(costs)
        share = np.asarray(rows)
        factors = np.where(share == 0, 0.0, share + self.fixed) / (np.asarray(self.rows) + self.fixed)
        levels, floor = np.median(work, axis=0), float(np.median(others))
        gain = 1 - max(float((levels * factors).max()), floor) / max(float(levels.max()), floor)
        if gain < needed or gain * self.rule.steps < move_steps:
            return None
        alone = 1 - np.maximum((work * factors).max(axis=1), others) / np.maximum(work.max(axis=1), others)
        if float((alone >= self.rule.gain).mean()) <= part:
            return None
        return None if self._still_changing(work, noise) else rows

    def _still_changing(self, work: Floats, noise: float) -> bool:
        """Whether the halves of a window differ by more than noise explains."""
        half = len(work) // 2
        shift = np.abs(np.log(np.median(work[half:], axis=0) / np.median(work[:half], axis=0)))
        return float(shift.max()) > max(self.rule.gain, self.rule.certainty * noise * sqrt(2 / half))

    def _told(self, rows: tuple[int, ...], costs: Floats, seconds: float, expected: float, possible: float) -> Verdict:
        slowness = _relative(costs)
        rank = int(np.argmax(np.abs(np.log(slowness / np.asarray(self.slowness)))))
        since = self._since(rank, float(slowness[rank]))
        fixed = tuple(self.fixed.tolist())
        return Verdict(rows, tuple(slowness.tolist()), rank, since, seconds, expected, possible, fixed)

    def _since(self, rank: int, slowness: float) -> int:
        """The first of the last steps in which the rank was nearer to its slowness now than to that before."""
        border = sqrt(slowness * self.slowness[rank])
        since = self._steps[-1][0]
        for step, work, *_ in reversed(self._steps):
            costs = work / (np.asarray(self.rows) + self.fixed)
            own = float(_relative(costs)[rank])
            if (own > border) != (slowness > border):
                break
            since = step
        return since


def _whole(work: Floats, waited: Floats) -> float:
    """Seconds of a step, whoever worked and whoever waited in it."""
    return float(np.median((work + waited).max(axis=1)))


def _relative(costs: Floats) -> Floats:
    """To the median rank: one slow rank of many does not make the others fast. Of an even number, the faster of the two."""
    return costs / float(np.sort(costs)[(len(costs) - 1) // 2])


def dealt(rows: int, costs: Seconds, fixed: Seconds, dear: float = inf) -> tuple[int, ...]:
    """Rows by speed, one at least for every rank; none for ranks without which a step is shorter by ``dear`` of it.

    >>> dealt(8, [1.0, 1.0, 9.0], [1.0] * 3), dealt(8, [1.0, 1.0, 9.0], [1.0] * 3, dear=0.04)
    ((4, 3, 1), (4, 4, 0))
    """

    def seconds(rank: int, count: int) -> float:
        return float(costs[rank] * (count + fixed[rank])) if count else 0.0

    def slowest(shares: Sequence[int]) -> float:
        return max(seconds(rank, count) for rank, count in enumerate(shares))

    every = deal(rows, len(costs), seconds, 1)
    if dear == inf:
        return every
    fewer = deal(rows, len(costs), lambda r, n: seconds(r, n) or costs[r] * 1e-9)
    return fewer if slowest(fewer) < slowest(every) * (1 - dear) else every
