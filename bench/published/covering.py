"""Cheapest coverings: pay as little as possible so that gains add up to what is needed.

Which operators of a stage recompute is such a problem: each costs seconds and frees bytes, and so many bytes must be
freed. The best ratios first, the last one in part, is the optimum of the relaxation (Dantzig 1957): a bound; taking
the last one whole is an answer. Where the two differ, a depth-first search decides, which visits equal items in one
order only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.jit import kernel

Floats = NDArray[np.float64]


def cover_in_ratio_order(
    costs: Floats, gains: Floats, member: NDArray[np.bool_], need: Floats
) -> tuple[Floats, Floats]:
    """For many sets at once: the cost of an answer, and of the relaxation; infinite where all gains are not enough.

    ``member`` is [sets, items], ``need`` [sets]; items must have positive gains.

    >>> both = np.ones((1, 2), dtype=bool)
    >>> answer, bound = cover_in_ratio_order(np.array([1.0, 4.0]), np.array([2.0, 4.0]), both, np.array([4.0]))
    >>> answer, bound
    (array([5.]), array([3.]))
    """
    order = np.argsort(costs / gains, kind="stable")
    inside = member[:, order]
    gained = np.cumsum(np.where(inside, gains[order], 0.0), axis=1)
    paid = np.cumsum(np.where(inside, costs[order], 0.0), axis=1)
    nothing = need <= 0
    if not len(order):
        value = np.where(nothing, 0.0, np.inf)
        return value, value.copy()
    last = np.minimum((gained < need[:, None]).sum(axis=1), len(order) - 1)
    rows = np.arange(len(need))
    enough = gained[rows, last] >= need
    answer = np.where(enough, paid[rows, last], np.inf)
    # The last item counts in proportion to what of its gain is needed.
    over = gained[rows, last] - need
    bound = np.where(enough, paid[rows, last] - costs[order][last] * over / gains[order][last], np.inf)
    return np.where(nothing, 0.0, answer), np.where(nothing, 0.0, bound)


@kernel()
def cheapest_cover(
    costs: np.ndarray, gains: np.ndarray, need: float, most_visits: int
) -> tuple[float, float, np.ndarray]:
    """The least cost, a bound on it (equal unless ``most_visits`` ran out) and the items; given by rising cost per
    gain.
    """
    n = len(costs)
    best_items = np.zeros(n, dtype=np.bool_)
    if need <= 0:
        return 0.0, 0.0, best_items
    left = np.zeros(n + 1)  # what items i.. gain together
    for i in range(n - 1, -1, -1):
        left[i] = left[i + 1] + gains[i]
    if left[0] < need:
        return np.inf, np.inf, best_items
    taken = np.zeros(n, dtype=np.bool_)
    paid = np.zeros(n + 1)  # by depth, so that nothing is subtracted and no rounding adds up
    needed = np.full(n + 1, need)
    best = np.inf
    root = _relaxed(costs, gains, 0, need)
    visits, i = 0, 0
    while True:
        visits += 1
        if visits > most_visits:
            return best, min(best, root), best_items
        if needed[i] <= 0:
            if paid[i] < best:
                best = paid[i]
                best_items[:] = False
                best_items[:i] = taken[:i]
        elif i < n and left[i] >= needed[i] and paid[i] + _relaxed(costs, gains, i, needed[i]) < best * (1 - 1e-15):
            # equal items are taken in order: one that follows an equal one left out is left out too
            taken[i] = not (i > 0 and costs[i] == costs[i - 1] and gains[i] == gains[i - 1] and not taken[i - 1])
            paid[i + 1] = paid[i] + costs[i] * taken[i]
            needed[i + 1] = needed[i] - gains[i] * taken[i]
            i += 1
            continue
        i -= 1
        while i >= 0 and not taken[i]:
            i -= 1
        if i < 0:
            return best, best, best_items
        taken[i] = False
        paid[i + 1] = paid[i]
        needed[i + 1] = needed[i]
        i += 1


@kernel()
def _relaxed(costs: np.ndarray, gains: np.ndarray, first: int, need: float) -> float:
    paid = 0.0
    for i in range(first, len(costs)):
        if gains[i] >= need:
            return paid + costs[i] * need / gains[i]
        paid += costs[i]
        need -= gains[i]
    return paid if need <= 0 else np.inf


@kernel()
def cheapest_covers(
    costs: np.ndarray, gains: np.ndarray, member: np.ndarray, which: np.ndarray, need: np.ndarray, most_visits: int
) -> tuple[np.ndarray, np.ndarray]:
    """``cheapest_cover`` of the items in ``member[which[q]]`` for ``need[q]``, for many q."""
    answer = np.empty(len(need))
    bound = np.empty(len(need))
    for q in range(len(need)):
        inside = member[which[q]]
        answer[q], bound[q], _ = cheapest_cover(costs[inside], gains[inside], need[q], most_visits)
    return answer, bound
