"""How far a search has come: the best choice of the original problem, the best bound, and whether time is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.choose import compiling
from shardwright.search.choose.problem import Problem, evaluate
from shardwright.search.solution import Solution

MORE_WORK = 30.0
"""So many times its limit of work a search may do while no choice is known."""


@dataclass
class Progress:
    """The best choice of the original problem and the best bound so far."""

    problem: Problem
    started: float
    time_limit: float | None
    choice: np.ndarray | None = None
    cost: float = np.inf
    bound: float = -np.inf
    whole: bool = False
    enough: float = 0.0  # relative gap at which the search may end
    overtime: float = 0.0  # seconds beyond the limit while no choice is known
    work_limit: float | None = (
        None  # entries to read, instead of a time limit: what is found does not depend on the clock
    )
    work: float = 0.0  # entries read so far
    compiled: float = field(default_factory=compiling.seconds)  # by others, before this search

    def offer(self, choice: np.ndarray) -> None:
        cost, _, feasible = evaluate(self.problem, choice)
        if feasible and cost < self.cost:
            self.choice, self.cost = choice, cost

    def raise_bound(self, bound: float) -> None:
        bound -= 1e-9 * abs(bound)  # what rounding may have added
        if self.whole:
            bound = np.ceil(bound - 1e-6)
        self.bound = max(self.bound, min(bound, self.cost))

    def exhausted(self) -> None:
        """No choice cheaper than the best known one is left."""
        if self.choice is None:
            raise Infeasible(
                f"No choice of {self.problem.name} keeps its limit of {self.problem.usage_limit}.", "Raise the limit."
            )
        self.bound = self.cost

    @property
    def gap(self) -> float:
        return self.cost - self.bound

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def spent(self) -> float:
        """Seconds of the time limit; the first search on a machine compiles its kernels, and that does not count."""
        return self.seconds - (compiling.seconds() - self.compiled)

    @property
    def limited(self) -> bool:
        """Whether there is an end to this search, so that it may go on until then."""
        return self.time_limit is not None or self.work_limit is not None

    @property
    def late(self) -> bool:
        if self.work_limit is not None:
            return self.work > self.work_limit * (MORE_WORK if self.choice is None else 1.0)
        if self.time_limit is None or self.spent <= self.time_limit:
            return False
        return self.choice is not None or self.spent > self.time_limit + self.overtime

    @property
    def closed(self) -> bool:
        return self.cost < np.inf and self.bound >= self.cost - 3e-9 * abs(self.cost)

    @property
    def done(self) -> bool:
        """Whether nothing, or nothing of interest, is left to gain."""
        return self.closed or (self.cost < np.inf and self.gap <= self.enough * abs(self.cost))

    @property
    def worth(self) -> float:
        """What a better choice may cost at most."""
        return self.cost - 1.0 if self.whole else self.cost

    def solution(self) -> Solution[np.ndarray]:
        if self.choice is None:
            raise TooLarge(
                f"No choice of {self.problem.name} within its limit was found in {self.seconds:.1f} s.",
                "Allow more time, or raise the limit.",
            )
        bound = self.cost if self.closed else min(self.bound, self.cost)
        return Solution(self.choice, self.cost, float(bound), self.closed, self.seconds)
