"""Prices of memory by cutting planes, for problems narrow enough to eliminate (Kelley 1960; in-out, Ben-Ameur 2007).

Elimination solves the problem exactly for any prices of memory, in a time that hardly depends on depth: equal layers
share their tables as long as equal arrays stay the same object, which pricing here preserves. Every such solution is a
cut that bounds the best price from above; a small linear program over the cuts says which prices to try next. Only
times at which some solution exceeded the limit get a price, so a hundred layers often need a single one. The bound is
the best that prices can prove, and solutions that happen to keep the limit are choices to start the search from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.errors import TooLarge
from shardwright.search.choose.eliminate import Order, eliminate, elimination_order
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.choose.timeline import Timeline, critical_times

LARGEST_TABLE = 4_000_000
LARGEST_WORK = 800_000_000  # additions of one elimination, before equal tables are shared
MOST_CUTS = 60
NODE_WORK = 5_000  # additions in the time that eliminating one node takes beside its own
CLOSE = 1e-4  # of the bound: nearer to the best possible prices is not worth another cut


@dataclass(frozen=True)
class Priced:
    """Prices at the problem's critical times, the bound they prove, and the best choice met on the way, if any."""

    prices: np.ndarray
    bound: float
    choice: np.ndarray | None


def price_by_elimination(
    problem: Problem, *, deadline: float | None = None, gap: float = 0.0, work: float | None = None
) -> Priced | None:
    """The best prices of memory and their bound; None where elimination would be too large.

    Ends early where a choice met on the way is within a relative ``gap`` of the bound, and after ``work`` additions.

    Example: ``price_by_elimination(reduce_problem(problem)[0])``
    """
    pairs = [(edge.first, edge.second) for edge in problem.edges]
    try:
        order = elimination_order(
            problem.sizes.tolist(), pairs, max_entries=LARGEST_TABLE, max_work=LARGEST_WORK, name=problem.name
        )
    except TooLarge:
        return None
    most = MOST_CUTS if work is None else min(MOST_CUTS, int(work / (order.work + NODE_WORK * len(order.nodes))))
    return _Cuts(problem, order).run(deadline, gap, most)


class _Cuts:
    """Solutions so far: what each costs and how far it exceeds the limit at every critical time."""

    def __init__(self, problem: Problem, order: Order) -> None:
        self.problem, self.order = problem, order
        self.timeline = critical_times(problem)
        self.limit = float(problem.usage_limit or 0.0)
        self.scale = self.limit or 1.0
        self.costs: list[float] = []
        self.excesses: list[np.ndarray] = []
        self.active: list[int] = []
        self.bound = -np.inf
        self.best = np.zeros(len(self.timeline.times))
        self.choice: np.ndarray | None = None
        self.cost = np.inf

    def run(self, deadline: float | None, gap: float, most: int) -> Priced:
        self._try(self.best)
        highest = self._steepest()
        for _ in range(most):
            if not self.active or (deadline is not None and time.perf_counter() > deadline):
                break
            if gap and self.choice is not None and self.cost - self.bound <= gap * abs(self.cost):
                break
            ceiling, prices = self._master(highest)
            known = len(self.active)
            if ceiling - self.bound > CLOSE * abs(self.bound):
                self._try(0.5 * (self.best + prices))
                if known == len(self.active):
                    self._try(prices)
            elif prices.max(initial=0.0) > 0.99 * highest:
                highest *= 10.0  # the best price lies at the edge of where it was allowed
            else:
                break
        return Priced(self.best, self.bound, self.choice)

    def _steepest(self) -> float:
        """A price at which the whole range of node costs would be paid for a tenth of the limit."""
        spread = sum(float(np.ptp(cost[np.isfinite(cost)])) for cost in self.problem.costs)
        return 10.0 * (spread + abs(self.costs[0]) + 1e-12) / self.scale

    def _try(self, prices: np.ndarray) -> None:
        """Solve at given prices: one more cut, perhaps a better bound, perhaps a choice within the limit."""
        choice, total = eliminate(_with_prices(self.problem, self.timeline, prices), order=self.order)
        value = total - float(prices.sum()) * self.limit
        if value > self.bound:
            self.bound, self.best = value, prices.copy()
        cost, _, feasible = evaluate(self.problem, choice)
        if feasible and cost < self.cost:
            self.cost, self.choice = cost, choice
        amounts = np.array([float(usage.amounts[choice[usage.node]]) for usage in self.problem.usages])
        change = np.zeros(len(self.timeline.times) + 1)
        np.add.at(change, self.timeline.first, amounts)
        np.add.at(change, self.timeline.last, -amounts)
        excess = np.cumsum(change)[:-1] - self.limit
        self.costs.append(cost)
        self.excesses.append(excess)
        worst = int(excess.argmax())
        if excess[worst] > 0 and worst not in self.active:
            self.active.append(worst)

    def _master(self, highest: float) -> tuple[float, np.ndarray]:
        """The prices that the cuts so far like best, and the bound they would give if no cut were missing."""
        import highspy

        unit = max(1e-12, float(np.abs(self.costs).max()))
        slopes = np.array([excess[self.active] for excess in self.excesses]) / self.scale
        count, rows = len(self.active), len(self.costs)
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = count + 1, rows
        program.col_cost_ = np.append(np.zeros(count), -1.0)
        program.col_lower_ = np.append(np.zeros(count), -np.inf)
        program.col_upper_ = np.append(np.full(count, highest * self.scale / unit), np.inf)
        program.row_lower_ = np.full(rows, -np.inf)
        program.row_upper_ = np.array(self.costs) / unit
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = np.arange(count + 2, dtype=np.int32) * rows
        program.a_matrix_.index_ = np.tile(np.arange(rows, dtype=np.int32), count + 1)
        program.a_matrix_.value_ = np.hstack([-slopes, np.ones((rows, 1))]).T.ravel()
        solver: Any = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.passModel(program)
        solver.run()
        values = np.array(solver.getSolution().col_value)
        prices = np.zeros(len(self.timeline.times))
        prices[self.active] = np.maximum(0.0, values[:count]) * unit / self.scale
        return float(values[count]) * unit, prices


def _with_prices(problem: Problem, timeline: Timeline, prices: np.ndarray) -> Problem:
    """The problem without limit whose options pay for memory; nodes with equal arrays and rates stay equal objects."""
    total = np.concatenate([[0.0], np.cumsum(prices)])
    rates = total[timeline.last] - total[timeline.first]
    paying: list[list[tuple[int, float]]] = [[] for _ in problem.costs]
    for number, usage in enumerate(problem.usages):
        if rates[number] > 0.0:
            paying[usage.node].append((id(usage.amounts), float(rates[number])))
    amounts = {id(usage.amounts): usage.amounts for usage in problem.usages}
    made: dict[object, np.ndarray] = {}
    costs = []
    for cost, entries in zip(problem.costs, paying, strict=True):
        key = (id(cost), tuple(entries))
        if key not in made:
            made[key] = cost + sum(rate * amounts[number] for number, rate in entries) if entries else cost
        costs.append(made[key])
    return replace(problem, costs=costs, usages=(), usage_limit=None)
