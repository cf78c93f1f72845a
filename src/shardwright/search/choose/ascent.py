"""The lower bound under a usage limit: prices on critical times, raised where memory is short (Lagrange, Polyak).

The bound is that of the problem whose options pay for their memory, less the price of the whole limit. Each step
makes one message pass in each direction (which can only raise the bound) and one step of the prices along the
smoothed supergradient, as long as Polyak's rule says for the best known cost. Whatever the prices and messages, the
bound holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.jit import copy, kernel
from shardwright.search.choose.flat import Flat
from shardwright.search.choose.passes import (
    backward_pass,
    forward_pass,
    price_options,
    rounding_error,
    usage_of_weights,
    weights_after_backward,
)

SMOOTHING = 0.92
PATIENCE = 40
SMALLEST_STEP = 1e-3
RESTART_STEPS = (1.0, 0.1, 0.3, 0.03)
LARGEST_FALL = 20.0


class Multipliers(NamedTuple):
    """Prices of critical times and messages, those of the best bound, and what steps of them are made of."""

    prices: np.ndarray
    messages: np.ndarray
    best_prices: np.ndarray
    best_messages: np.ndarray
    direction: np.ndarray  # of the prices
    priced: np.ndarray  # option -> its cost with its memory's price
    beliefs: np.ndarray
    weights: np.ndarray


@kernel(nogil=True)
def _ascend(flat, held, target, iterations, step, stalled, best):
    """Passes and price steps in place. Returns (best, step, stalled)."""
    prices, messages, direction, priced = held.prices, held.messages, held.direction, held.priced
    best_prices, best_messages, beliefs, weights = held.best_prices, held.best_messages, held.beliefs, held.weights
    usage = np.zeros(len(prices))
    scale = flat.limit if flat.limit > 0.0 else 1.0
    for _ in range(iterations):
        forward_pass(flat, priced, messages, beliefs)
        bound = backward_pass(flat, priced, messages, beliefs) - flat.limit * prices.sum()
        stalled += 1
        if bound > best:
            safe = bound - rounding_error(flat, priced, messages, beliefs)
            if safe > best:
                if safe > best + 1e-7 * abs(best):
                    stalled = 0
                best = safe
                copy(prices, best_prices)
                copy(messages, best_messages)
        if stalled >= PATIENCE:
            step *= 0.7
            stalled = 0
        if bound < best - LARGEST_FALL * max(target - best, 1e-3 * abs(target)):  # thrown off: back to safety
            copy(best_prices, prices)
            copy(best_messages, messages)
            direction[:] = 0.0
            step *= 0.7
            price_options(flat, prices, priced)
            continue
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
    return best, step, stalled


@dataclass
class Ascent:
    """The state of the ascent; `run` continues it by a number of iterations."""

    flat: Flat
    prices: np.ndarray
    best: float = -np.inf
    step: float = 1.0
    stalled: int = 0
    restarts: int = 0
    best_prices: np.ndarray = field(init=False)
    best_messages: np.ndarray = field(init=False)
    direction: np.ndarray = field(init=False)
    priced: np.ndarray = field(init=False)
    messages: np.ndarray = field(init=False)
    beliefs: np.ndarray = field(init=False)
    weights: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.direction = np.zeros(len(self.prices))
        self.best_prices = self.prices.copy()
        self.messages = np.zeros(self.flat.messages)
        self.best_messages = self.messages.copy()
        self.priced, self.beliefs, self.weights = (np.zeros(len(self.flat.cost)) for _ in range(3))
        price_options(self.flat, self.prices, self.priced)

    def warm_up(self, passes: int) -> float:
        """Message passes alone, prices unchanged; returns the bound."""
        bound = -np.inf
        for _ in range(passes):
            forward_pass(self.flat, self.priced, self.messages, self.beliefs)
            bound = backward_pass(self.flat, self.priced, self.messages, self.beliefs)
        bound -= float(self.prices.sum()) * self.flat.limit
        bound -= rounding_error(self.flat, self.priced, self.messages, self.beliefs)
        if bound > self.best:
            self.best = bound
            self.best_prices[:] = self.prices
            self.best_messages[:] = self.messages
        return bound

    def run(self, iterations: int, target: float) -> None:
        """Raise the bound towards ``target``, the best known cost or a guess of it."""
        if self.step < SMALLEST_STEP:
            self.restarts += 1
            self.return_to_best()
            self.step = RESTART_STEPS[self.restarts % len(RESTART_STEPS)]
        held = Multipliers(
            self.prices,
            self.messages,
            self.best_prices,
            self.best_messages,
            self.direction,
            self.priced,
            self.beliefs,
            self.weights,
        )
        self.best, self.step, self.stalled = _ascend(
            self.flat, held, float(target), iterations, self.step, self.stalled, self.best
        )

    def return_to_best(self) -> None:
        """Go on from the prices and messages of the best bound."""
        self.prices[:] = self.best_prices
        self.messages[:] = self.best_messages
        self.direction[:] = 0.0
        self.stalled = 0
        price_options(self.flat, self.prices, self.priced)

    def hopeless(self, worth: float, passes: int = 5) -> np.ndarray:
        """Options that no choice of cost ``worth`` or less takes; leaves the ascent at its best bound.

        Right after a backward pass, the beliefs of a forward pass are exact about what an option would add to the bound.
        """
        self.return_to_best()
        bound = self.warm_up(passes)
        forward_pass(self.flat, self.priced, self.messages, self.beliefs)
        starts = self.flat.option_start
        least = np.repeat(np.minimum.reduceat(self.beliefs, starts[:-1]), np.diff(starts))
        error = rounding_error(self.flat, self.priced, self.messages, self.beliefs)
        struck = bound + (self.beliefs - least) > worth + error + 1e-9 * abs(worth)
        self.return_to_best()
        return struck
