"""Large neighbourhoods: hold a few nodes, choose all others anew by exact elimination (cutset conditioning, Pearl 1988).

Some reduced problems are small and knotted: two hundred nodes, each of which stands for thousands, with costs between
them larger than the optimum. Trees (`blocks`) are too small a part of them to leave a bad choice, while a dozen nodes
held where they are make elimination of all the rest affordable. Memory is priced: dearer where the elimination's answer
exceeds the limit, cheaper where it does not, for a few turns; a better choice within the limit is taken.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from shardwright.search.choose.blocks import cost_of_choice, usage_of_choice
from shardwright.search.choose.eliminate import Order, eliminate
from shardwright.search.choose.flat import Flat
from shardwright.search.choose.passes import price_options
from shardwright.search.choose.problem import Problem

TOO_MANY = 1e300  # additions; what takes more is as good as endless
WORK = (1e4, 2e6)  # additions that eliminating one node may take, between these
WORK_PER_NODE = 2e4  # what the bookkeeping of one node takes, in additions
TURNS = 8  # of the prices in one neighbourhood
CHEAPER = 0.85
PUSH, HARDER = 0.05, 1.5  # of the largest price, at the times most exceeded; and how that grows
LARGEST_SHARE_HELD = 0.3  # of the nodes: beyond that it is no large neighbourhood
IN_VAIN = 10  # in a row, after which pauses are LONGER times as long
LONGER = 3


@dataclass(frozen=True)
class Neighbourhood:
    """Which nodes to eliminate and how; all others are held. ``work`` is about how many additions that takes."""

    order: Order
    held: np.ndarray

    @property
    def work(self) -> float:
        return self.order.work + WORK_PER_NODE * len(self.order.nodes)


def random_neighbourhood(problem: Problem, most: float, generator: np.random.Generator) -> Neighbourhood:
    """Nodes in an order of small tables; wherever the next would take ``most`` additions, a busy neighbour is held.

    >>> from shardwright.search.choose.problem import Edge
    >>> triangle = Problem([np.zeros(2)] * 3, [Edge(a, b, np.zeros((2, 2))) for a, b in ((0, 1), (1, 2), (0, 2))])
    >>> random_neighbourhood(triangle, 4, np.random.default_rng(0)).held.sum()
    np.int64(1)
    """
    sizes = problem.sizes.tolist()
    around: list[set[int]] = [set() for _ in sizes]
    for first, second, _ in problem.edges:
        if sizes[first] > 1 and sizes[second] > 1:  # one option alone is no decision
            around[first].add(second)
            around[second].add(first)
    taste = (1.0 + generator.random(len(sizes))).tolist()
    # Whole numbers without end, kept up to date: a node with thousands of neighbours has more than any float holds.
    additions = [size * prod([sizes[other] for other in near]) for size, near in zip(sizes, around, strict=True)]

    def rank(node: int) -> float:
        return taste[node] * (float(additions[node]) if additions[node] < TOO_MANY else TOO_MANY)

    current = [rank(node) for node in range(len(sizes))]
    heap = [(value, node) for node, value in enumerate(current)]
    heapq.heapify(heap)
    state = np.zeros(len(sizes), dtype=np.int8)  # 1 eliminated, 2 held
    nodes, scopes, work = [], [], 0

    def again(changed: set[int]) -> None:
        for node in changed:
            current[node] = rank(node)
            heapq.heappush(heap, (current[node], node))

    while heap:
        value, node = heapq.heappop(heap)
        if state[node] or value != current[node]:
            continue
        entries = additions[node]
        if entries > most and around[node]:
            busy = [node, *sorted(around[node])]
            weights = np.array([len(around[one]) ** 2 for one in busy], dtype=float)
            held = busy[int(generator.choice(len(busy), p=weights / weights.sum()))]
            state[held] = 2
            for other in around[held]:
                around[other].discard(held)
                additions[other] //= sizes[held]
            again(around[held] | ({node} if held != node else set()))
            around[held] = set()
            continue
        state[node] = 1
        work += entries
        nodes.append(node)
        scopes.append(around[node])
        for other in around[node]:
            fresh = around[node] - around[other] - {other}
            around[other] |= fresh
            around[other].discard(node)
            additions[other] = additions[other] // sizes[node] * prod([sizes[one] for one in fresh])
        again(around[node])
    left = [tuple(sorted(one for one in scope if state[one] == 1)) for scope in scopes]
    return Neighbourhood(Order(nodes, left, 0, work), state == 2)


class Neighbourhoods:
    """A search by large neighbourhoods; ``flat`` is the flat form of ``problem``, forbidden pairs and all."""

    def __init__(self, problem: Problem, flat: Flat, seed: int) -> None:
        self.problem, self.flat = problem, flat
        self.generator = np.random.default_rng(seed)
        self.usage = np.zeros(len(flat.times))
        self.priced = np.zeros(len(flat.cost))
        self.near: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]  # rows: the other's options
        for first, second, matrix in problem.edges:
            self.near[first].append((second, matrix.T))
            self.near[second].append((first, matrix))
        self.wasted = 0  # neighbourhoods in a row without a better choice
        self._pause = 0  # rounds to leave out
        sample = random_neighbourhood(problem, WORK[1], self.generator)
        self.useful = len(problem.costs) > 1 and sample.held.mean() <= LARGEST_SHARE_HELD

    def due(self) -> bool:
        """Whether to search in this round: in vain, one pauses for as many rounds as it took, since the bound waits for it.

        In a problem of thousands of nodes one takes ten rounds; the contest's S came to its end with a gap of 4 % instead
        of 0.8 % when every round had one.
        """
        self._pause -= 1
        return self.useful and self._pause < 0

    def search(self, choice: np.ndarray, prices: np.ndarray, work: float) -> np.ndarray:
        """The choice, or a better one within the limit, after about ``work`` additions (one neighbourhood at least)."""
        taken, given, found = 0.0, max(work, 1.0), False
        while taken < work:
            most = float(np.exp(self.generator.uniform(*np.log(WORK))))
            place = random_neighbourhood(self.problem, most, self.generator)
            taken += TURNS * place.work
            better = self._improve(choice, prices * np.exp(self.generator.normal(0.0, 0.3)), place)
            self.wasted = 0 if better is not None else self.wasted + 1
            choice, found = (choice, found) if better is None else (better, True)
        if not found:
            self._pause = ceil(taken / given) * (LONGER if self.wasted > IN_VAIN else 1)
        return choice

    def _improve(self, choice: np.ndarray, prices: np.ndarray, place: Neighbourhood) -> np.ndarray | None:
        """A better choice with some nodes held, or nothing; while the limit is exceeded, less excess is better."""
        best, (excess, cost) = None, self._measure(choice)
        unit, push = max(float(prices.max(initial=0.0)), abs(cost) / (self.flat.limit or 1.0)), PUSH
        outside = self._outside(choice, place)
        edges = [edge for edge in self.problem.edges if not (place.held[edge.first] or place.held[edge.second])]
        for _ in range(TURNS):
            price_options(self.flat, prices, self.priced)
            costs = [
                np.zeros(1) if held else own + extra
                for held, own, extra in zip(
                    place.held, np.split(self.priced, self.flat.option_start[1:-1]), outside, strict=True
                )
            ]
            picks, _ = eliminate(Problem(costs, edges), order=place.order)
            fresh = np.where(place.held, choice, picks)
            measured = self._measure(fresh)
            if measured < (excess, cost):
                best, (excess, cost) = fresh, measured
            if measured[0] > 0.0:
                over = self.usage - self.flat.limit
                prices = prices + np.where(over >= 0.999 * over.max(), unit * push, 0.0)
                push *= HARDER
            else:
                prices = prices * CHEAPER
        return best

    def _outside(self, choice: np.ndarray, place: Neighbourhood) -> list[np.ndarray]:
        """What the held nodes cost every option of the others."""
        extra = [np.zeros(1)] * len(choice)
        for node in place.order.nodes:
            rows = [matrix[choice[other]] for other, matrix in self.near[node] if place.held[other]]
            if rows:
                extra[node] = np.sum(rows, axis=0)
        return extra

    def _measure(self, choice: np.ndarray) -> tuple[float, float]:
        """How far the limit is exceeded, and the cost; leaves the usage of the choice behind."""
        usage_of_choice(self.flat, choice, self.usage)
        return max(0.0, float(self.usage.max(initial=0.0)) - self.flat.limit), float(cost_of_choice(self.flat, choice))
