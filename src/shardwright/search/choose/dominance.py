"""Compiled comparison of options: how much dearer, at worst, one can be than another, and the best between neighbours."""

from __future__ import annotations

import numpy as np

from shardwright.jit import kernel


@kernel(nogil=True)
def forbid_larger_usage(profile, excess):
    """Set ``excess[i, j]`` to infinity where option ``j`` uses more than ``i`` at some time (``profile[time, option]``)."""
    for i in range(len(excess)):
        for j in range(len(excess)):
            if excess[i, j] < np.inf:
                for t in range(len(profile)):
                    if profile[t, j] > profile[t, i]:
                        excess[i, j] = np.inf
                        break


@kernel(nogil=True)
def add_worst_difference(matrix, excess):
    """Add to ``excess[i, j]`` the most that ``j`` costs beyond ``i`` beside any option of one neighbour."""
    for i in range(len(excess)):
        for j in range(len(excess)):
            if i != j and excess[i, j] < np.inf:
                worst = -np.inf
                for other in range(matrix.shape[1]):
                    own = matrix[i, other]
                    if own < np.inf:
                        difference = matrix[j, other] - own
                        if difference > worst:
                            worst = difference
                            if worst == np.inf:
                                break
                excess[i, j] += worst


@kernel(nogil=True)
def least_between(own, one, other):
    """The least ``own[k] + one[k, i] + other[k, j]`` for all ``i`` and ``j``, and the first ``k`` that has it."""
    value = np.full((one.shape[1], other.shape[1]), np.inf)
    best = np.zeros(value.shape, dtype=np.int64)
    for k in range(len(own)):
        for i in range(one.shape[1]):
            first = own[k] + one[k, i]
            if first < np.inf:
                for j in range(other.shape[1]):
                    total = first + other[k, j]
                    if total < value[i, j]:
                        value[i, j] = total
                        best[i, j] = k
    return value, best


@kernel(nogil=True)
def undominated(excess):
    """Options left when each one that another remaining option never exceeds is dropped, in order."""
    keep = np.ones(len(excess), dtype=np.bool_)
    for i in range(len(excess)):
        for j in range(len(excess)):
            if i != j and keep[j] and excess[i, j] <= 0.0:
                keep[i] = False
                break
    return keep
