"""What the parts of a step cost, added up as a choice problem: once stated, priced as expected or as low as it can get.

A search wants the price it expects: a gathered parameter is gathered again for the backward pass, a lone one bears a whole
collective. A bound on delivered plans must stay below all of them: parameters may be kept gathered, share bundles
(:mod:`shardwright.program.bundles`) and buckets (:mod:`shardwright.program.sums`), and readers that need a tensor in
the same layout share one change. At the ``least`` prices every part is charged the smallest share that an execution bears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.costs.redistribute import Weights
from shardwright.graph import Graph
from shardwright.operators.rules import Partial, Window
from shardwright.program import Sizes
from shardwright.search.choose import Edge
from shardwright.search.prices import EdgePrices


@dataclass(frozen=True)
class Pricing:
    """What a second counts: one of operators, of changes of layout between them, of parameters' traffic (gathers, sums of
    gradients), of what comes ``once`` a step however many micro-batches it has (gradients on their way home, updates).
    ``least``: at prices that no execution undercuts. ``links``: what a second on the stream of each mesh axis counts;
    parameters' traffic then counts by its streams (copies as operators do, collectives as their axes), and a change of
    layout, for which computation waits, on both."""

    compute: float = 1.0
    changes: float = 1.0
    traffic: float = 1.0
    once: float = 1.0
    least: bool = False
    links: tuple[float, ...] = ()

    def streams(self, parameter: bool) -> Weights:
        """What a second of a change of layout (or of a parameter's traffic) counts on every stream, where that is told."""
        if not self.links:
            return ()
        return (self.compute, *(link + (0.0 if parameter else self.changes) for link in self.links))


EXPECTED, LEAST = Pricing(), Pricing(least=True)


@dataclass
class Seconds:
    """A node's own seconds per option: ``own`` paid ``runs`` times, ``back`` as often as a gradient comes.

    For operators ``back`` is the backward, for a parameter the sum of its gradient between replicas (``least_back`` where
    it shares its buckets with as many as possible, by what a second counts on every stream).
    """

    own: np.ndarray
    back: np.ndarray
    least_back: Callable[[Weights], np.ndarray] | None = None
    runs: int = 0
    backs: int = 0

    @staticmethod
    def none(options: int) -> Seconds:
        return Seconds(np.zeros(options), np.zeros(options))

    def total(self, pricing: Pricing) -> np.ndarray:
        if self.least_back is None:
            return pricing.compute * (self.own * self.runs + self.back * self.backs)
        streams = pricing.streams(parameter=True)
        sums = self.least_back(streams) if pricing.least else self.back
        traffic = 1.0 if streams else pricing.traffic
        return pricing.once * (pricing.compute * (self.own * self.runs) + traffic * (sums * self.backs))


@dataclass
class Change:
    """A change of layout between two nodes (``first`` is -1 for what no node decides), and how often it occurs.

    ``parameter``: what is changed is read from where it rests. ``again``: the reader belongs to a recomputed block, so the
    forward change happens twice. ``twice``: so it does where a gathered parameter is freed and gathered again. ``settled``:
    its source is a layout chosen for all readers. ``sharers``: how many readers the tensor has.
    """

    tensor: str
    first: int
    sources: Sequence
    second: int
    needs: Sequence
    parameter: bool = False
    again: bool = False
    twice: bool = False
    settled: bool = False
    sharers: int = 1
    times: int = 0
    backs: int = 0
    apart: np.ndarray | None = None
    """Which pairs of options cannot be: rows in orders of their own would be read as others."""


@dataclass(frozen=True)
class Handed:
    """What a node pays for handing out a result; nothing for sure where a reader may have brought it there (``shared``)."""

    node: int
    seconds: np.ndarray
    shared: bool


@dataclass(frozen=True)
class Bill:
    """The parts of a statement. ``shares`` are those of a bundle's fixed costs; ``together``: all parameters travel."""

    graph: Graph
    prices: EdgePrices
    nodes: Sequence[Seconds]
    changes: Sequence[Change]
    handed: Sequence[Handed]
    shares: Mapping[str, float]
    together: bool

    def total(self, pricing: Pricing) -> tuple[list[np.ndarray], list[Edge]]:
        """Costs per node and per edge."""
        costs = [seconds.total(pricing) for seconds in self.nodes]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for change in self.changes:
            paid = self._paid(change, pricing)
            if change.apart is not None:
                paid = np.where(change.apart, np.inf, paid)
            first, second = change.first, change.second
            if first < 0 or first == second:
                costs[second] = costs[second] + (paid[0] if first < 0 else np.diag(paid))
                continue
            key, matrix = ((first, second), paid) if first < second else ((second, first), paid.T)
            pairs[key] = pairs[key] + matrix if key in pairs else matrix
        for handed in self.handed:
            if not (pricing.least and handed.shared):
                costs[handed.node] = costs[handed.node] + pricing.changes * handed.seconds
        return costs, [Edge(first, second, matrix) for (first, second), matrix in pairs.items()]

    def _paid(self, change: Change, pricing: Pricing) -> np.ndarray:
        tensor = self.graph.tensors[change.tensor]
        share = self._share(change, pricing) if change.parameter else None
        streams = pricing.streams(change.parameter)
        there, back = self.prices.price(tensor, change.sources, change.needs, share, streams)
        if change.parameter:
            again = change.again or (change.twice and not pricing.least)
            times = 2 if again and tensor.grad and self.prices.training else 1
        else:
            times = 2 if change.again else 1
        once = pricing.once if change.parameter else 1.0
        paid = there * (times * change.times) + (back * (once * change.backs) if once else 0.0)
        weight = 1.0 if streams else pricing.traffic if change.parameter else pricing.changes
        if weight != 1.0:
            paid = np.multiply(paid, weight, out=np.full(paid.shape, np.inf), where=np.isfinite(paid))
        return paid * _parts(change) if pricing.least and change.sharers > 1 else paid

    def _share(self, change: Change, pricing: Pricing) -> float:
        """Which part of a collective's fixed costs a parameter bears."""
        if not pricing.least:
            # A lone parameter that is gathered bears all of a collective, and who knows how many there will be.
            return self.shares.get(change.tensor, 1.0) if self.together or pricing.traffic < 1.0 else 1.0
        # What is gathered or scattered has at least twice the bytes of a shard; a bundle is closed by what fills it.
        least = 2 * self.graph.tensors[change.tensor].bytes / self.prices.mesh.devices
        full = Sizes().bundle
        return 1.0 if least >= full else least / (2 * full)


def _parts(change: Change) -> np.ndarray:
    """Per need, which part of a change one reader surely pays.

    All that need the same may share it. From a layout that was chosen for all of them, all but one at most: were it all,
    that need would itself be the better layout to choose. Unreduced sums and windows cannot be chosen.
    """
    special = np.array([any(isinstance(p, Partial | Window) for p in need) for need in change.needs])
    sharers = np.where(special | (not change.settled), change.sharers, max(change.sharers - 1, 1))
    return 1.0 / sharers
