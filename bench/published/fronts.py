"""Fronts: choices of which none both costs less and gains more, sorted by rising cost and rising gain.

The front of choosing in two places is the front of all sums. A stage of n equal layers needs the n-fold sum of one
layer's front, which stays small (a few hundred choices for 32 layers of 13 operators), so which operators of which
layer recompute is decided exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import kernel


@kernel()
def front(cost: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The choices worth keeping.

    >>> front(np.array([2.0, 0.0, 1.0]), np.array([3.0, 0.0, 4.0]))
    (array([0., 1.]), array([0., 4.]))
    """
    order = np.argsort(cost, kind="mergesort")
    kept_cost = np.empty(len(cost))
    kept_gain = np.empty(len(cost))
    kept = 0
    for i in order:
        if kept == 0 or gain[i] > kept_gain[kept - 1]:
            if kept and cost[i] == kept_cost[kept - 1]:
                kept -= 1
            kept_cost[kept] = cost[i]
            kept_gain[kept] = gain[i]
            kept += 1
    return kept_cost[:kept].copy(), kept_gain[:kept].copy()


@kernel()
def both(
    cost: np.ndarray, gain: np.ndarray, other_cost: np.ndarray, other_gain: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The front of choosing in two places."""
    n, m = len(cost), len(other_cost)
    costs = np.empty(n * m)
    gains = np.empty(n * m)
    for i in range(n):
        for j in range(m):
            costs[i * m + j] = cost[i] + other_cost[j]
            gains[i * m + j] = gain[i] + other_gain[j]
    return front(costs, gains)


@kernel()
def least_cost(
    cost: np.ndarray, gain: np.ndarray, other_cost: np.ndarray, other_gain: np.ndarray, need: float
) -> float:
    """The least cost of a choice from each of two fronts that gain ``need`` together; infinite if none does."""
    best = np.inf
    j = len(other_cost) - 1
    for i in range(len(cost)):
        if gain[i] + other_gain[j] < need:
            if j == len(other_cost) - 1:
                continue
            j += 1
        while j > 0 and gain[i] + other_gain[j - 1] >= need:
            j -= 1
        if gain[i] + other_gain[j] >= need:
            best = min(best, cost[i] + other_cost[j])
    return best


class Fronts(NamedTuple):
    """Many fronts in a row: the k-th is ``first[k]:first[k + 1]``."""

    first: np.ndarray
    cost: np.ndarray
    gain: np.ndarray


def in_a_row(fronts: list[tuple[np.ndarray, np.ndarray]]) -> Fronts:
    return Fronts(
        np.concatenate([[0], np.cumsum([len(cost) for cost, _ in fronts])]).astype(np.int64),
        np.concatenate([cost for cost, _ in fronts]),
        np.concatenate([gain for _, gain in fronts]),
    )


@kernel()
def least_costs(ends: Fronts, layers: Fronts, end: np.ndarray, count: np.ndarray, need: np.ndarray) -> np.ndarray:
    """``least_cost`` of front ``end[q]`` of the one row and ``count[q]`` of the other, for many q."""
    found = np.empty(len(need))
    for q in range(len(need)):
        a, b = ends.first[end[q]], ends.first[end[q] + 1]
        c, d = layers.first[count[q]], layers.first[count[q] + 1]
        found[q] = least_cost(ends.cost[a:b], ends.gain[a:b], layers.cost[c:d], layers.gain[c:d], need[q])
    return found


def steps_of(cost: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """A front's steps, from nothing and along its lower hull: [steps, (cost, gain)], the cheapest gain first.

    >>> steps_of(np.array([0.0, 3.0, 4.0]), np.array([0.0, 1.0, 4.0]))
    array([[4., 4.]])
    """
    if gain[0] > 0:
        cost, gain = np.concatenate([[0.0], cost]), np.concatenate([[0.0], gain])
    hull: list[int] = []
    for i in range(len(cost)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (cost[b] - cost[a]) * (gain[i] - gain[a]) < (cost[i] - cost[a]) * (gain[b] - gain[a]):
                break
            hull.pop()
        hull.append(i)
    return np.column_stack([np.diff(cost[hull]), np.diff(gain[hull])])


@kernel()
def rough_costs(ends: Fronts, layer: np.ndarray, end: np.ndarray, count: np.ndarray, need: np.ndarray) -> np.ndarray:
    """[q, (answer, bound)] of gaining ``need[q]`` with ``count[q]`` equal layers and the ends' steps, the cheapest
    first.

    ``ends`` holds hull steps in the order of their price. The last step counts in part in the bound (the optimum of
    the relaxation) and whole, for as many layers as it takes, in the answer.
    """
    found = np.full((len(need), 2), np.inf)
    for q in range(len(need)):
        missing, paid, i, j = need[q], 0.0, ends.first[end[q]], 0
        beyond = ends.first[end[q] + 1]
        while missing > 0:
            of_layer = j < len(layer) and count[q] > 0
            if i == beyond and not of_layer:
                break
            if of_layer and (i == beyond or layer[j, 0] * ends.gain[i] <= ends.cost[i] * layer[j, 1]):
                cost, gain, copies = layer[j, 0], layer[j, 1], float(count[q])
                j += 1
            else:
                cost, gain, copies = ends.cost[i], ends.gain[i], 1.0
                i += 1
            if gain * copies >= missing:
                found[q, 0] = paid + cost * np.ceil(missing / gain - 1e-12)
                found[q, 1] = paid + cost * missing / gain
                break
            missing -= gain * copies
            paid += cost * copies
        if missing <= 0:
            found[q] = paid
    return found
