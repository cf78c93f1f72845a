"""Compiled message passes: the lower bound of a choice problem under fixed prices of memory, and its slope.

Sequential reweighted message passing (TRW-S, Kolmogorov 2006; in the form of SRMP, 2015). Every edge keeps a message to each
end; the cost of a node is what it has plus the messages it got, the cost of an edge what it has less the messages it gave.
A forward pass visits nodes in order: collect all that backward edges can give, hand an equal share to forward edges. After
it every edge's smallest cost is zero, and the sum of the nodes' smallest costs is a lower bound that never falls from pass
to pass. With messages fixed the bound is concave in the prices; following the minima backwards gives, per node, weights
over options whose usage is a supergradient.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def price_options(option_start, cost, usage_start, usage_first, usage_last, amount_start, amount, prices, priced):
    """Node costs plus usage at the given prices per critical time."""
    total = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        total[t + 1] = total[t] + prices[t]
    priced[:] = cost
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for entry in range(usage_start[v], usage_start[v + 1]):
            rate = total[usage_last[entry]] - total[usage_first[entry]]
            if rate > 0.0:
                start = amount_start[entry]
                for k in range(size):
                    priced[base + k] += rate * amount[start + k]


@njit(cache=True, nogil=True)
def _collect(matrix, start, rows, columns, given, given_start, result, result_start):
    """result[column] = min over rows of matrix[row, column] - given[row]."""
    for column in range(columns):
        result[result_start + column] = np.inf
    for row in range(rows):
        base = start + row * columns
        less = given[given_start + row]
        for column in range(columns):
            value = matrix[base + column] - less
            if value < result[result_start + column]:
                result[result_start + column] = value


@njit(cache=True, nogil=True)
def forward_pass(
    option_start, edge_low, edge_high, matrix_start, matrix, low_start, high_start,
    up_start, up_edge, down_start, down_edge, priced, messages, beliefs,
):  # fmt: skip
    """One pass upwards; fills ``beliefs`` (node costs before they are handed on) and returns the bound."""
    bound = 0.0
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for k in range(size):
            beliefs[base + k] = priced[base + k]
        ups, downs = up_start[v + 1] - up_start[v], down_start[v + 1] - down_start[v]
        for index in range(down_start[v], down_start[v + 1]):
            e = down_edge[index]
            u = edge_low[e]
            _collect(
                matrix, matrix_start[e], option_start[u + 1] - option_start[u], size,
                messages, low_start[e], messages, high_start[e],
            )  # fmt: skip
            for k in range(size):
                beliefs[base + k] += messages[high_start[e] + k]
        for index in range(up_start[v], up_start[v + 1]):
            e = up_edge[index]
            for k in range(size):
                beliefs[base + k] += messages[low_start[e] + k]
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        for index in range(up_start[v], up_start[v + 1]):
            e = up_edge[index]
            for k in range(size):
                messages[low_start[e] + k] -= share * beliefs[base + k]
        keep = 1.0 - share * ups
        if keep > 1e-12:
            smallest = np.inf
            for k in range(size):
                smallest = min(smallest, beliefs[base + k])
            bound += keep * smallest
    return bound


@njit(cache=True, nogil=True)
def backward_pass(
    option_start, edge_low, edge_high, matrix_start, flipped, low_start, high_start,
    up_start, up_edge, down_start, down_edge, priced, messages, beliefs,
):  # fmt: skip
    """One pass downwards, the mirror image of `forward_pass`."""
    bound = 0.0
    for v in range(len(option_start) - 2, -1, -1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for k in range(size):
            beliefs[base + k] = priced[base + k]
        ups, downs = up_start[v + 1] - up_start[v], down_start[v + 1] - down_start[v]
        for index in range(up_start[v], up_start[v + 1]):
            e = up_edge[index]
            w = edge_high[e]
            _collect(
                flipped, matrix_start[e], option_start[w + 1] - option_start[w], size,
                messages, high_start[e], messages, low_start[e],
            )  # fmt: skip
            for k in range(size):
                beliefs[base + k] += messages[low_start[e] + k]
        for index in range(down_start[v], down_start[v + 1]):
            e = down_edge[index]
            for k in range(size):
                beliefs[base + k] += messages[high_start[e] + k]
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        for index in range(down_start[v], down_start[v + 1]):
            e = down_edge[index]
            for k in range(size):
                messages[high_start[e] + k] -= share * beliefs[base + k]
        keep = 1.0 - share * downs
        if keep > 1e-12:
            smallest = np.inf
            for k in range(size):
                smallest = min(smallest, beliefs[base + k])
            bound += keep * smallest
    return bound


@njit(cache=True, nogil=True)
def weights_after_backward(
    option_start, edge_low, edge_high, matrix_start, matrix, low_start, high_start,
    up_start, up_edge, down_start, down_edge, messages, beliefs, weights,
):  # fmt: skip
    """Weights over options whose usage is the bound's supergradient, just after a backward pass."""
    weights[:] = 0.0
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        ups, downs = up_start[v + 1] - up_start[v], down_start[v + 1] - down_start[v]
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        # What the lower neighbours' minima took from this node was added to weights[base:] scaled by the share already.
        keep = 1.0 - share * downs
        if keep > 1e-12:
            best = 0
            for k in range(1, size):
                if beliefs[base + k] < beliefs[base + best]:
                    best = k
            weights[base + best] += keep
        for index in range(up_start[v], up_start[v + 1]):
            e = up_edge[index]
            w = edge_high[e]
            other, count = option_start[w], option_start[w + 1] - option_start[w]
            w_ups, w_downs = up_start[w + 1] - up_start[w], down_start[w + 1] - down_start[w]
            given = 1.0 / max(w_ups, w_downs)
            for k in range(size):
                weight = weights[base + k]
                if weight > 0.0:
                    row = matrix_start[e] + k * count
                    best, smallest = 0, np.inf
                    for l in range(count):
                        value = matrix[row + l] - messages[high_start[e] + l]
                        if value < smallest:
                            best, smallest = l, value
                    weights[other + best] += given * weight


@njit(cache=True, nogil=True)
def usage_of_weights(option_start, usage_start, usage_first, usage_last, amount_start, amount, weights, usage):
    """Usage at every critical time when options are taken with the given weights."""
    usage[:] = 0.0
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for entry in range(usage_start[v], usage_start[v + 1]):
            total = 0.0
            for k in range(size):
                total += weights[base + k] * amount[amount_start[entry] + k]
            usage[usage_first[entry]] += total
            if usage_last[entry] < len(usage):
                usage[usage_last[entry]] -= total
    for t in range(1, len(usage)):
        usage[t] += usage[t - 1]
