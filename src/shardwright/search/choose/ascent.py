"""The lower bound under a usage limit: prices on critical times, raised where memory is short (Lagrange, Polyak).

The bound is that of the problem whose options pay for their memory, less the price of the whole limit. Each step makes one
message pass in each direction (which can only raise the bound) and one step of the prices along the smoothed supergradient,
as long as Polyak's rule says for the best known cost. Whatever the prices and messages, the bound holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from shardwright.search.choose.flat import Flat
from shardwright.search.choose.passes import (
    backward_pass,
    forward_pass,
    price_options,
    usage_of_weights,
    weights_after_backward,
)

SMOOTHING = 0.7
PATIENCE = 20
FRESH_STEP = 1.0
SMALLEST_STEP = 1e-4


@njit(cache=True, nogil=True)
def _ascend(
    flat, target, iterations, step, stalled, best, prices, direction, best_prices, priced, messages, beliefs, weights
):
    usage = np.zeros(len(prices))
    scale = flat.limit if flat.limit > 0.0 else 1.0
    bound = -np.inf
    for _ in range(iterations):
        forward_pass(flat, priced, messages, beliefs)
        bound = backward_pass(flat, priced, messages, beliefs) - flat.limit * prices.sum()
        if bound > best + 1e-9 * abs(best):
            stalled = 0
        else:
            stalled += 1
        if bound > best:
            best = bound
            best_prices[:] = prices
        if stalled >= PATIENCE:
            step *= 0.7
            stalled = 0
        weights_after_backward(flat, messages, beliefs, weights)
        usage_of_weights(flat, weights, usage)
        length = 0.0
        for t in range(len(prices)):
            excess = (usage[t] - flat.limit) / scale
            if prices[t] <= 0.0 and excess < 0.0:
                excess = 0.0
            direction[t] = SMOOTHING * direction[t] + (1.0 - SMOOTHING) * excess
            if prices[t] <= 0.0 and direction[t] < 0.0:
                direction[t] = 0.0
            length += direction[t] ** 2
        if length > 1e-18:
            factor = step * max(target - bound, 1e-9 * abs(target)) / length / scale
            for t in range(len(prices)):
                prices[t] = max(0.0, prices[t] + factor * direction[t])
            price_options(flat, prices, priced)
    return bound, best, step, stalled


@dataclass
class Ascent:
    """The state of the ascent; `run` continues it by a number of iterations."""

    flat: Flat
    prices: np.ndarray
    best: float = -np.inf
    step: float = FRESH_STEP
    stalled: int = 0
    direction: np.ndarray = field(init=False)
    best_prices: np.ndarray = field(init=False)
    priced: np.ndarray = field(init=False)
    messages: np.ndarray = field(init=False)
    beliefs: np.ndarray = field(init=False)
    weights: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.direction = np.zeros(len(self.prices))
        self.best_prices = self.prices.copy()
        self.messages = np.zeros(self.flat.messages)
        self.priced, self.beliefs, self.weights = (np.zeros(len(self.flat.cost)) for _ in range(3))
        price_options(self.flat, self.prices, self.priced)

    def warm_up(self, passes: int) -> None:
        """Message passes alone, prices unchanged."""
        bound = -np.inf
        for _ in range(passes):
            forward_pass(self.flat, self.priced, self.messages, self.beliefs)
            bound = backward_pass(self.flat, self.priced, self.messages, self.beliefs)
        bound -= self._paid(self.prices)
        if bound > self.best:
            self.best = bound
            self.best_prices = self.prices.copy()

    def run(self, iterations: int, target: float) -> None:
        """Raise the bound towards ``target``, the best known cost or a guess of it."""
        if self.step < SMALLEST_STEP:
            self.restart()
        _, self.best, self.step, self.stalled = _ascend(
            self.flat, float(target), iterations, self.step, self.stalled, self.best, self.prices, self.direction,
            self.best_prices, self.priced, self.messages, self.beliefs, self.weights,
        )  # fmt: skip

    def restart(self) -> None:
        """Long steps again, from the best prices."""
        self.prices = self.best_prices.copy()
        self.direction[:] = 0.0
        self.step, self.stalled = FRESH_STEP, 0
        price_options(self.flat, self.prices, self.priced)

    def checkpoint(self) -> tuple[np.ndarray, np.ndarray]:
        """Present prices and messages, to come back to after `settle`."""
        return self.prices.copy(), self.messages.copy()

    def resume(self, checkpoint: tuple[np.ndarray, np.ndarray]) -> None:
        """Continue where `checkpoint` was taken."""
        self.prices, self.messages = checkpoint
        price_options(self.flat, self.prices, self.priced)

    def settle(self, passes: int) -> float:
        """The bound at the best prices after further passes; leaves messages ready for rounding and `hopeless`."""
        self.prices = self.best_prices.copy()
        price_options(self.flat, self.prices, self.priced)
        bound = -np.inf
        for _ in range(passes):
            forward_pass(self.flat, self.priced, self.messages, self.beliefs)
            bound = backward_pass(self.flat, self.priced, self.messages, self.beliefs)
        bound -= self._paid(self.prices)
        self.best = max(self.best, bound)
        return bound

    def hopeless(self, bound: float, worth: float) -> np.ndarray:
        """Options that no choice cheaper than ``worth`` takes, right after `settle` returned ``bound``.

        In a forward pass a node's beliefs are exact about what its options would add to the bound.
        """
        forward_pass(self.flat, self.priced, self.messages, self.beliefs)
        starts = self.flat.option_start
        least = np.repeat(np.minimum.reduceat(self.beliefs, starts[:-1]), np.diff(starts))
        slack = 1e-9 * max(1.0, abs(worth))
        return bound + (self.beliefs - least) > worth + slack

    def _paid(self, prices: np.ndarray) -> float:
        return float(prices.sum()) * self.flat.limit
