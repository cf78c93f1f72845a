"""The search for good choices within the limit: block moves under the bound's own prices, swung up and down.

At the optimal prices of memory a good choice is nearly a cheapest one, so block moves minimise cost plus priced
usage. High prices free memory, low prices spend it; swinging between them lets nodes trade memory with each other,
which single moves at a full limit cannot. Until a choice within the limit is known, prices rise where it is exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardwright.search.choose.blocks import Effort, Walk, cost_of_choice, improve, usage_of_choice
from shardwright.search.choose.flat import Flat
from shardwright.search.choose.passes import price_options

SCALES = (0.0, 0.0, 0.3, 0.7, 1.0, 1.0, 1.3, 2.0)
BLOCKS = (10, 100, 1000)
ROUNDS_BEFORE_RETURN = 10
REPAIR_STEPS = 16


def with_penalties(flat: Flat) -> tuple[Flat, float]:
    """Forbidden pairs made finite, so that a choice can walk through them, and a penalty: choices without such a pair cost
    less than it, all others more.
    """
    penalty = 1.0 + float(np.maximum.reduceat(np.abs(flat.cost), flat.option_start[:-1]).sum())
    if len(flat.matrix_start):
        # Matrices lie one after the other, each once: the largest entry of each, as often as an edge has it.
        starts, which = np.unique(flat.matrix_start, return_inverse=True)
        allowed = np.where(np.isfinite(flat.matrix), np.abs(flat.matrix), 0.0)
        penalty += float(np.maximum.reduceat(allowed, starts)[which].sum())
    matrix, flipped = (np.where(np.isfinite(part), part, 2.0 * penalty) for part in (flat.matrix, flat.flipped))
    return flat._replace(matrix=matrix, flipped=flipped), penalty


@dataclass
class Walker:
    """One walk; ``flat`` has its forbidden pairs replaced by ``penalty``."""

    flat: Flat
    penalty: float
    choice: np.ndarray
    seed: int
    best_cost: float = np.inf
    best_choice: np.ndarray = field(init=False)
    usage: np.ndarray = field(init=False)
    total: float = field(init=False)
    since: int = 0  # rounds since the last jump

    def __post_init__(self) -> None:
        self.usage = np.zeros(len(self.flat.times))
        self.best_choice = self.choice.copy()
        self.pressure = np.zeros(len(self.flat.times))
        self.generator = np.random.default_rng(self.seed)
        self.priced = np.zeros(len(self.flat.cost))
        self.jump(self.choice)

    def jump(self, choice: np.ndarray) -> None:
        """Continue from another choice."""
        self.choice = choice.copy()
        self.pressure[:] = 0.0
        self.since = 0
        usage_of_choice(self.flat, self.choice, self.usage)
        self.total = float(cost_of_choice(self.flat, self.choice))
        if self.within and self.total < min(self.best_cost, self.penalty):
            self.best_cost, self.best_choice = self.total, self.choice.copy()

    def adopt(self, other: Walker) -> None:
        """Take over another walk's best choice if it is cheaper."""
        if other.best_cost < self.best_cost:
            self.best_cost, self.best_choice = other.best_cost, other.best_choice.copy()

    @property
    def within(self) -> bool:
        """Whether the present choice keeps the limit."""
        return bool(self.usage.max(initial=0.0) <= self.flat.limit)

    @property
    def found(self) -> bool:
        """Whether a choice within the limit and without forbidden pairs is known."""
        return self.best_cost < self.penalty

    def walk(self, work: float, prices: np.ndarray, swings: int = 1) -> None:
        """One round of block moves, of about ``work`` numbers read, the prices swung so many times on the way."""
        self.since += 1
        if self.found and self.since >= ROUNDS_BEFORE_RETURN:
            self.jump(self.best_choice)
        if self.within and self.total < self.penalty:
            for _ in range(swings):
                self._trade(work / swings, prices)
        else:
            self._repair(work, prices)

    def _trade(self, work: float, prices: np.ndarray) -> None:
        scale = self.generator.choice(SCALES) * np.exp(self.generator.normal(0.0, 0.3))
        self._move(work, prices * scale, int(self.generator.choice(BLOCKS)), True)

    def _repair(self, work: float, prices: np.ndarray) -> None:
        """Raise the prices of overfull times until the limit is kept."""
        unit = max(float(prices.max(initial=0.0)), self._typical_price())
        push = 0.1
        for _ in range(REPAIR_STEPS):
            if self.total < self.penalty:
                excess = (self.usage - self.flat.limit) / (self.flat.limit or 1.0)
                self.pressure += push * unit * np.where(excess > 0, np.maximum(excess, 0.01), 0.0)
                push *= 1.5
            self._move(work / REPAIR_STEPS, prices + self.pressure, BLOCKS[1], False)
            if self.within and self.total < self.penalty:
                break

    def _typical_price(self) -> float:
        points = max(1, len(self.flat.times))
        return float(np.abs(self.flat.cost).mean()) / (self.flat.limit or 1.0) * len(self.flat.option_start) / points

    def _move(self, work: float, prices: np.ndarray, most: int, strict: bool) -> None:
        price_options(self.flat, prices, self.priced)
        seed = int(self.generator.integers(2**31))
        known = min(self.best_cost, self.penalty)
        walk = Walk(self.choice, self.usage, self.best_choice)
        self.total, cost, _ = improve(self.flat, self.priced, walk, self.total, known, Effort(work, most, strict, seed))
        if cost < known:
            self.best_cost = cost
        # Sums of moves drift in floating point; start the next round from the exact cost.
        self.total = float(cost_of_choice(self.flat, self.choice))
