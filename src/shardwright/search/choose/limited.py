"""Choosing under a usage limit: a bound that rises, a choice that falls, until they meet or time is up.

Rounds of a fixed amount of work: one core raises the lower bound (`ascent`), the other improves choices (`walker`, and
`neighbourhoods` where holding a few nodes makes the rest easy), and at the end of a round they exchange the prices of
memory and the best known cost; so a run depends on the seed and the number of rounds, not on the clock. When the two are
close, options that no better choice can take are struck out, the reductions run again on what is left, and the rounds go
on with a smaller problem; when nothing is left, the choice is optimal. What is small and moves no more is closed by an
integer program, which has the second core to itself while choices are improved on. Parts that nothing joins
(`components`) are searched one after the other.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import count

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose.ascent import Ascent
from shardwright.search.choose.components import Component, separate, together
from shardwright.search.choose.cutting import price_by_elimination
from shardwright.search.choose.flat import Flat, flatten
from shardwright.search.choose.integer import solve_by_integer_program
from shardwright.search.choose.neighbourhoods import Neighbourhoods
from shardwright.search.choose.passes import round_messages
from shardwright.search.choose.problem import Problem, with_options
from shardwright.search.choose.progress import Progress
from shardwright.search.choose.reductions import check_peak, reduce_problem
from shardwright.search.choose.walker import Walker, with_penalties
from shardwright.search.choose.workspace import Back
from shardwright.search.solution import Solution

ROUND_WORK = 1.5e8  # matrix entries one round of the ascent reads
WALK_WORK = 0.8e8  # about the same time for the walker
ROUNDS_PER_START = 8
ROUNDS_PER_QUICK_START = 2  # where a gap is enough: many beginnings find a good choice sooner than long walks
QUICK_SWINGS = 4  # of the prices in a round, for the same reason
QUICK_SHARE = 0.25  # of a round's work, since the end is near
QUICK_PATIENCE = 60  # rounds without progress after which a wider gap is enough too
ROUNDS_PER_LOOK = 10
PATIENT_ROUNDS = 20
INTEGER_NODES = 2000  # of its search tree, where no time limit is given
INTEGER_ENTRIES = 50_000  # edge entries up to which an integer program closes the gap that is left
SOON = 1.0  # seconds to wait for it before choices are improved on beside it
WORTHWHILE = 0.2  # smallest share of options whose removal is worth reducing again


def solve_limited(
    problem: Problem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    gap: float = 0.0,
    overtime: float = 0.0,
    work_limit: float | None = None,
) -> Solution[np.ndarray]:
    """The best choice found within the limit and the best bound proved, anytime; ends early at a relative ``gap``.

    While no choice is known the search may go on for ``overtime`` seconds beyond the time limit. With a ``work_limit``,
    entries of matrices to read, that decides instead of the time, so the answer is the same on a busy machine.

    Example: ``solve_limited(problem, time_limit=60).gap``
    """
    progress = Progress(
        problem,
        time.perf_counter(),
        time_limit if work_limit is None else None,
        whole=_whole(problem),
        enough=gap,
        overtime=overtime,
        work_limit=work_limit,
    )
    check_peak(problem)
    core, back = reduce_problem(problem)
    check_peak(core)
    parts = separate(core)
    if len(parts) > 1:
        return _one_by_one(parts, back, progress, seed)
    stage: _Stage | None = _first_stage(core, back, progress, seed)
    if stage is not None:
        with ThreadPoolExecutor(1) as pool:
            while stage is not None:
                stage = stage.run(pool)
    return progress.solution()


def _one_by_one(parts: list[Component], back: Back, progress: Progress, seed: int) -> Solution[np.ndarray]:
    """Independent parts, each with its share of what time is left."""
    work = [sum(edge.costs.size for edge in part.problem.edges) + int(part.problem.sizes.sum()) for part in parts]
    solutions = []
    for place, part in enumerate(parts):
        limit, extra, share = progress.time_limit, progress.overtime, work[place] / max(sum(work), 1)
        work_limit = None if progress.work_limit is None else progress.work_limit * share
        if limit is not None:
            left = max(limit - progress.spent, 0.0)
            limit = left * work[place] / sum(work[place:])
            extra += left - limit  # a part without any choice may take what was meant for the others
        solutions.append(
            solve_limited(
                part.problem,
                time_limit=limit,
                seed=seed,
                gap=progress.enough,
                overtime=extra,
                work_limit=work_limit,
            )
        )
    whole = together(parts, solutions)
    return replace(whole, answer=back(whole.answer), seconds=progress.seconds)


def _first_stage(core: Problem, back: Back, progress: Progress, seed: int) -> _Stage | None:
    """Start from exact prices where the problem is narrow enough for them; nothing where these are enough."""
    deadline = None
    if progress.time_limit is not None:
        deadline = time.perf_counter() + 0.5 * progress.time_limit - progress.spent
    work = None if progress.work_limit is None else 0.5 * progress.work_limit
    priced = price_by_elimination(core, deadline=deadline, gap=progress.enough, work=work) if core.limited else None
    if priced is None:
        return _Stage(core, back, progress, seed, None, None)
    if priced.choice is not None:
        progress.offer(back(priced.choice))
    progress.raise_bound(priced.bound)
    if progress.done:
        return None
    stage = _Stage(core, back, progress, seed, None, priced.prices)
    if priced.choice is not None:
        stage.walker.jump(priced.choice)
    return stage


class _Stage:
    """Rounds on one reduced problem; `run` returns the next stage or None at the end."""

    def __init__(
        self, core: Problem, back: Back, progress: Progress, seed: int, times: np.ndarray | None,
        prices: np.ndarray | None,
    ) -> None:  # fmt: skip
        self.core, self.back, self.progress, self.seed = core, back, progress, seed
        self.flat: Flat = flatten(core, times)
        self.ascent = Ascent(self.flat, np.zeros(len(self.flat.times)) if prices is None else prices.copy())
        penalised, penalty = with_penalties(self.flat)
        nowhere = np.zeros(len(core.costs), dtype=np.int64)
        self.walker = Walker(penalised, penalty, nowhere, seed)
        self.helper = Walker(penalised, penalty, nowhere, seed + 1_000_003)  # walks too once the bound stands still
        # Where a gap is enough, rounds are short, and a neighbourhood would take longer than most searches do.
        self.wide = None if progress.enough else Neighbourhoods(core, self.flat, seed)
        self.entries = sum(edge.costs.size for edge in core.edges)
        self.patience = PATIENT_ROUNDS if self.entries > 5000 else 3
        self.tried = False
        self.closing: Future[Solution[np.ndarray]] | None = None  # the integer program, while it runs
        self.work = 2 * self.entries + len(self.flat.amount) + 4 * len(self.flat.times) + 1000
        self.share = QUICK_SHARE if progress.enough else 1.0
        self.iterations = int(np.clip(self.share * ROUND_WORK / self.work, 4, 400))

    def run(self, pool: ThreadPoolExecutor) -> _Stage | None:
        progress, ascent, walker = self.progress, self.ascent, self.walker
        ascent.warm_up(10 if ascent.prices.any() else 30)
        self._round_off()
        gap, idle, swings = np.inf, 0, QUICK_SWINGS if progress.enough else 1
        for turn in count(1):
            progress.raise_bound(ascent.best)
            ended = self.closing is not None and (progress.late or self.closing.done()) and not self._close()
            if progress.done or progress.late or ended:
                return None
            target = progress.cost if progress.cost < np.inf else ascent.best + 0.5 * abs(ascent.best) + 1.0
            prices = ascent.best_prices.copy()
            progress.work += self.work * self.iterations
            effort = min(self.share * WALK_WORK, self.work * self.iterations / 2)
            beside = None
            if self.closing is None and idle >= self.patience and turn % 3:
                self.helper.adopt(walker)
                beside = pool.submit(self.helper.walk, effort, prices, swings)
            elif self.closing is None:
                beside = pool.submit(ascent.run, self.iterations, target)
            if self.wide and self.wide.due():
                walker.jump(self.wide.search(walker.best_choice if walker.found else walker.choice, prices, effort))
            else:
                walker.walk(effort, prices, swings)
            if beside is not None:
                beside.result()
            walker.adopt(self.helper)
            if walker.found and walker.best_cost < progress.cost:
                progress.offer(self.back(walker.best_choice))
            progress.raise_bound(ascent.best)
            if progress.gap < 0.98 * gap:
                gap, idle = progress.gap, 0
            else:
                idle += 1
            if progress.enough and idle >= QUICK_PATIENCE and progress.choice is not None and self.closing is None:
                return None
            if idle >= self.patience and self.closing is None and not self._go_on(pool):
                return None
            if turn % (ROUNDS_PER_QUICK_START if progress.enough else ROUNDS_PER_START) == 0:
                self._round_off()
            if turn % ROUNDS_PER_LOOK == 0 and self.closing is None:
                following = self._narrow()
                if following is not self:
                    return following
        raise AssertionError("rounds end by returning")

    def _go_on(self, pool: ThreadPoolExecutor) -> bool:
        """Nothing moves any more: let the integer program finish what is small; go on only where time is left. Where work
        is counted, the integer program, whose work is not, only says whether there is any choice."""
        progress = self.progress
        counted = progress.work_limit is not None and progress.choice is not None
        if self.entries > INTEGER_ENTRIES or self.tried or counted:
            return progress.limited
        self.tried = True
        left = None if progress.time_limit is None else progress.time_limit - progress.spent
        nodes = INTEGER_NODES if left is None else None
        start = self.walker.best_choice.copy() if self.walker.found else None
        self.closing = pool.submit(
            solve_by_integer_program, self.core, time_limit=left, seed=self.seed, incumbent=start, max_nodes=nodes
        )
        wait([self.closing], None if left is None else SOON)
        if not self.closing.done():
            return True
        return self._close()

    def _close(self) -> bool:
        """Take what the integer program has come to; whether to go on without it."""
        progress, closing = self.progress, self.closing
        assert closing is not None
        self.closing = None
        try:
            solution = closing.result()
        except Infeasible:
            progress.exhausted()
            return False
        except TooLarge:
            return progress.limited
        progress.offer(self.back(solution.answer))
        progress.raise_bound(solution.lower_bound)
        return False

    def _round_off(self) -> None:
        """Send the walker to what the messages say at the present prices."""
        choice = np.zeros(len(self.core.costs), dtype=np.int64)
        flat = self.walker.flat
        round_messages(flat, self.ascent.priced, self.ascent.messages, choice)
        self.walker.jump(choice)
        if self.walker.found:
            self.progress.offer(self.back(self.walker.best_choice))

    def _narrow(self) -> _Stage | None:
        """Strike out hopeless options; the stage on what is left, this one if too few went, None if none is left."""
        progress = self.progress
        if progress.cost == np.inf:
            return self
        hopeless = self.ascent.hopeless(progress.worth)
        if hopeless.mean() < WORTHWHILE:
            return self
        try:
            smaller, back = _restrict(self.core, ~hopeless)
            check_peak(smaller)
        except Infeasible:
            progress.exhausted()
            return None
        chain = self.back
        return _Stage(
            smaller, lambda choice: chain(back(choice)), progress, self.seed + 1, self.flat.times, self.ascent.best_prices
        )  # fmt: skip


def _restrict(problem: Problem, keep: np.ndarray) -> tuple[Problem, Back]:
    """The problem with only the options where ``keep`` is true, reduced again."""
    stops = np.cumsum(problem.sizes)
    masks = np.split(keep, stops[:-1])
    if not all(mask.any() for mask in masks):
        raise Infeasible("No option of some node is left.")
    picks = [np.flatnonzero(mask) for mask in masks]
    smaller, back = reduce_problem(with_options(problem, picks))

    def whole(choice: np.ndarray) -> np.ndarray:
        return np.array([pick[option] for pick, option in zip(picks, back(choice), strict=True)], dtype=np.int64)

    return smaller, whole


def _whole(problem: Problem) -> bool:
    """Whether all costs are whole numbers, so that costs differ by at least one."""
    parts = [*problem.costs, *{id(edge.costs): edge.costs for edge in problem.edges}.values()]
    return all(
        bool((part[np.isfinite(part)] % 1.0 == 0.0).all()) and np.abs(part[np.isfinite(part)]).max(initial=0) < 2**50
        for part in parts
    )
