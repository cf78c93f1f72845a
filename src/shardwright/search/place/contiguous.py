"""Throughput, contiguous, exact: dynamic programming over ideals ("Efficient Algorithms for Device Placement", 2020).

    best[K, devices] = min over ideals I of K and a kind of device of max(best[I, devices - 1], load(K - I))

The published program prices all pairs of ideals. Here a threshold T, an achieved load, makes the search small: a stage's
time on any kind is at most T, so the weight of an ideal reached with given devices lies in a window that is as wide as
the slack (devices x T - total work); ideals outside every window are never kept, and pairs are compared bit set against
bit set with loads that come from the two ideals' own sums. T rises from a lower bound until an answer exists, and an
answer found under T is optimal, because no placement with all loads up to T was left out.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.place.bounds import progress_bound, references
from shardwright.search.place.deadline import NEVER
from shardwright.search.place.measure import throughput_cost
from shardwright.search.place.problem import Placement, Rules, Stage, Workload
from shardwright.search.place.reductions import Blocks, reduce
from shardwright.search.solution import Solution

MOST_IDEALS = 20_000_000
MOST_KEPT_BYTES = 3 << 30


def place_contiguous(
    workload: Workload,
    rules: Rules | None = None,
    *,
    order: np.ndarray | None = None,
    upper: Placement | None = None,
    most_ideals: int = MOST_IDEALS,
    time_limit: float = 60.0,
) -> Solution[Placement]:
    """The best contiguous placement for throughput, proved; with ``order`` (of blocks) the best along that order.

    ``upper`` is a known placement whose load bounds the search; ``time_limit`` is for separate passes, which walk a
    trade-off and may leave a gap. Raises ``Infeasible`` when nothing fits and ``TooLarge`` when there are too many
    ideals. Example: ``place_contiguous(read_workload("bert24.json")).cost``.
    """
    begun = time.perf_counter()
    rules = rules or Rules()
    blocks = reduce(workload)
    search = ChainSearch(blocks, rules, order=order, most_ideals=most_ideals)
    if upper is None and order is None:  # the fixed-order answer is nearly free and bounds the search well
        upper = ChainSearch(blocks, replace(rules, separate_passes=False), order=np.arange(blocks.count)).smallest(
            np.inf
        )
    proved = np.inf
    if rules.separate_passes:
        from shardwright.search.place.passes import best_sum_of_passes

        placement, proved = best_sum_of_passes(search, workload, upper, time_limit)
    else:
        placement = search.smallest(throughput_cost(workload, upper, rules)) if upper is not None else None
        if placement is None:  # no known placement, or one that is not contiguous
            placement = search.smallest(np.inf)
    if placement is None:
        raise Infeasible(
            "no contiguous placement fits the devices' memory and support.",
            "Allow more devices, more memory, or a non-contiguous placement.",
        )
    cost = throughput_cost(workload, placement, rules)
    bound = min(cost, proved) if order is None else sum(search.lower_bound(p) for p in range(search.passes))
    optimal = order is None and bound >= cost * (1 - 1e-6)
    return Solution(placement, cost, min(bound, cost), optimal, time.perf_counter() - begun)


class ChainSearch:
    """Chains of ideals of one set of blocks: ``smallest`` finds the best, ``under`` the best within given limits.

    With ``summed`` the sum of the loads counts, which is the latency of stages that run one after the other. Once
    ``stop[0]`` is true nothing is found any more.
    """

    def __init__(
        self,
        blocks: Blocks,
        rules: Rules,
        *,
        order: np.ndarray | None = None,
        most_ideals: int = MOST_IDEALS,
        summed: bool = False,
        stop: np.ndarray = NEVER,
    ) -> None:
        self.blocks, self.rules, self.most_ideals, self.summed, self.stop = blocks, rules, most_ideals, summed, stop
        passes = 2 if rules.separate_passes else 1
        self.passes = passes
        finite = np.where(np.isfinite(blocks.times), blocks.times, 0.0)
        self.times = finite if passes == 2 else finite.sum(axis=2, keepdims=True)
        self.cost = blocks.cost if passes == 2 else blocks.cost.sum(axis=1, keepdims=True)
        self.refused = (~np.isfinite(blocks.times)).any(axis=2)
        self.pays = np.array([kind.pays for kind in blocks.kinds])
        self.room = np.array([kind.room * (1 + 1e-9) for kind in blocks.kinds])
        self.per_byte = 1.0 / blocks.sync_bandwidth
        self.needs = _predecessor_bits(blocks, order)
        self.ends_start, self.ends = _transfer_ends(blocks)
        self.states, self.moves, self.after = device_states(blocks, rules)
        self.references = references(blocks, passes)
        self.pairs = self.kept = self.visited = 0

    def lower_bound(self, pass_: int) -> float:
        """No placement's largest load (of one pass) is below this."""
        return progress_bound(self.blocks, self.rules, pass_)

    def smallest(self, ceiling: float) -> Placement | None:
        """The chain with the smallest maximum load, at most ``ceiling`` (which is assumed to be achievable if finite)."""
        if self.blocks.count == 0:
            return self._placement([])
        low = self.lower_bound(0)
        top = float(self.everything()) if not np.isfinite(ceiling) else ceiling
        limit = low
        step = max(top - low, 1e-12 * max(1.0, top)) / 16
        while True:
            limit = min(limit + step, top)
            step *= 2.5
            found = self.under(np.array([limit * (1 + 1e-9)]))
            if found is not None or limit >= top:
                return found

    def everything(self) -> float:
        """A load no useful stage exceeds: all work on the slowest kind plus every transfer twice."""
        return self.times.sum(axis=(0, 2)).max() + 2 * self.cost.sum() * max(self.pays.max(), 1.0) + self._sync_most()

    def _sync_most(self) -> float:
        return 4.0 * self.blocks.parameters.sum() * self.per_byte if self.rules.replicate else 0.0

    def under(self, limits: np.ndarray) -> Placement | None:
        """The chain with the smallest maximum of the last pass's loads, all loads within ``limits`` (per pass)."""
        from shardwright.search.place import _ideals

        low, high, widest = self._windows(limits)
        bits, sums, visited = _ideals.list_ideals(self.needs, self.references.weights, low, high, self.most_ideals)
        self.visited, self.kept = abs(visited), len(bits)
        if visited < 0:
            raise TooLarge(
                f"the graph has more than {self.most_ideals:,} ideals.",
                "Use the heuristic solver, or a fixed topological order.",
            )
        states = len(self.states)
        if len(bits) * (states * 13 + 200) > MOST_KEPT_BYTES:
            raise TooLarge(
                f"{len(bits):,} ideals with {states} device counts exceed the memory budget.",
                "Use the heuristic solver, or a fixed topological order.",
            )
        size = np.bitwise_count(bits).sum(axis=1)
        if len(bits) == 0 or size.max() < self.blocks.count or size.min() > 0:
            return None
        rank = np.lexsort((size, sums[:, 0]))
        bits, sums = bits[rank], sums[rank]
        kinds = len(self.blocks.kinds)
        columns = np.concatenate(
            [
                self.times.reshape(self.blocks.count, -1),
                self.refused.astype(np.float64),
                np.stack([self.blocks.memory, self.blocks.parameters], axis=1),
            ],
            axis=1,
        )
        totals = _ideals.sums_over(bits, columns)
        compute = np.ascontiguousarray(totals[:, : kinds * self.passes]).reshape(-1, kinds, self.passes)
        refused = np.ascontiguousarray(totals[:, kinds * self.passes : kinds * (self.passes + 1)])
        memory, parameters = totals[:, -2].copy(), totals[:, -1].copy()
        cut, start, which, rest_start, rest = _ideals.crossings(
            bits, self.ends_start, self.ends, self.blocks.home, self.cost, self.stop
        )
        if self.stop[0]:
            return None
        best, origin, by, pairs = _ideals.best_chains(
            _ideals.Sums(bits, sums, compute, refused, memory, parameters),
            _ideals.Crossings(cut, start, which, rest_start, rest, self.blocks.home, self.cost),
            _ideals.Devices(low, high, self.moves, self.after, self.pays, self.room, self.per_byte, self.rules.overlap),
            widest,
            np.asarray(limits, dtype=np.float64),
            self.summed,
            self.stop,
        )
        self.pairs = pairs
        if self.stop[0] or not np.isfinite(best[-1, -1]):
            return None
        chain: list[tuple[np.ndarray, int, int]] = []
        ideal, state = len(bits) - 1, states - 1
        while ideal > 0:
            before, move = int(origin[ideal, state]), int(by[ideal, state])
            if before != ideal:
                inside = _members(bits[ideal] & ~bits[before], self.blocks.count)
                chain.append((inside, int(self.moves[move, 0]), int(self.moves[move, 1])))
            ideal = before
            state = int(np.flatnonzero(self.after[:, move] == state)[0])
        return self._placement(chain[::-1])

    def _windows(self, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        timed = self.references.timed
        factor = np.where(timed < 0, 1.0, np.asarray(limits)[np.maximum(timed, 0)])
        # 2**50 is beyond the sum of all weights: it stands for "no limit", also where 0 meets infinity.
        known = np.isfinite(self.references.capacity)
        capacity = np.where(
            known, np.where(known, self.references.capacity, 0.0) * np.minimum(factor, 2.0**100), 2.0**50
        )
        capacity = np.minimum(capacity, 2.0**50)
        counts = np.array([kind.count for kind in self.blocks.kinds])
        left = counts - self.states
        used = (self.states[:, :, None] * capacity).sum(axis=1)
        spare = (left[:, :, None] * capacity).sum(axis=1)
        total = self.references.weights.sum(axis=0)
        high = np.minimum(np.ceil(used * (1 + 1e-9)) + 1, 2.0**62).astype(np.int64)
        low = np.maximum(total - np.ceil(spare * (1 + 1e-9)) - 1, -(2.0**62)).astype(np.int64)
        one = max((capacity[k, 0] * d for k, d in self.moves if counts[k]), default=0.0)
        return low, high, int(min(np.ceil(one * (1 + 1e-9)) + 1, 2.0**62))

    def _placement(self, chain: list[tuple[np.ndarray, int, int]]) -> Placement:
        stage_of = np.zeros(self.blocks.count, dtype=np.int64)
        next_free = [0] * len(self.blocks.kinds)
        stages = []
        for number, (inside, kind, devices) in enumerate(chain):
            stage_of[inside] = number
            stages.append(Stage(kind, tuple(range(next_free[kind], next_free[kind] + devices))))
            next_free[kind] += devices
        return Placement(self.blocks.back(stage_of), tuple(stages))


def _predecessor_bits(blocks: Blocks, order: np.ndarray | None) -> np.ndarray:
    words = max(1, (blocks.count + 63) // 64)
    needs = np.zeros((blocks.count, words), dtype=np.uint64)
    edges = blocks.order if order is None else np.stack([order[:-1], order[1:]], axis=1)
    for before, v in edges:
        needs[v, before >> 6] |= np.uint64(1) << np.uint64(before & 63)
    return needs


def _transfer_ends(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    pieces = [
        np.append(blocks.receivers[blocks.receiver_start[t] : blocks.receiver_start[t + 1]], blocks.home[t])
        for t in range(len(blocks.home))
    ]
    start = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
    return start, np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64)


def device_states(blocks: Blocks, rules: Rules) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many devices of each kind are used (every combination, the last is all), and the moves between them."""
    counts = [kind.count for kind in blocks.kinds]
    states = np.stack(np.meshgrid(*[np.arange(c + 1) for c in counts], indexing="ij"), axis=-1).reshape(-1, len(counts))
    moves = np.array(
        [
            (k, d)
            for k, kind in enumerate(blocks.kinds)
            for d in range(1, (kind.count if rules.replicate and not kind.host else min(1, kind.count)) + 1)
        ],
        dtype=np.int64,
    ).reshape(-1, 2)
    number = {tuple(state): i for i, state in enumerate(states.tolist())}
    after = np.full((len(states), len(moves)), -1, dtype=np.int64)
    for s, state in enumerate(states.tolist()):
        for m, (k, d) in enumerate(moves.tolist()):
            reached = tuple(c + d if j == k else c for j, c in enumerate(state))
            after[s, m] = number.get(reached, -1)
    return states, moves, after


def _members(words: np.ndarray, count: int) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:count])
