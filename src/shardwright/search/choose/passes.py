"""Compiled message passes: the lower bound of a choice problem under fixed prices of memory, and its slope.

Sequential reweighted message passing (TRW-S, Kolmogorov 2006; in the form of SRMP, 2015). Every edge keeps a message
to each end; the cost of a node is what it has plus the messages it got, the cost of an edge what it has less the
messages it gave. A forward pass visits nodes in order: collect all that backward edges can give, hand an equal share of
what exceeds its smallest cost to forward edges. After it every edge's smallest cost is zero, and the sum of the nodes' smallest costs is a lower bound that
never falls from pass to pass. With messages fixed the bound is concave in the prices; following the minima backwards
gives, per node, weights over options whose usage is a supergradient. Every function takes a `Flat`.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def price_options(flat, prices, priced):
    """Node costs plus usage at the given prices per critical time."""
    total = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        total[t + 1] = total[t] + prices[t]
    priced[:] = flat.cost
    for v in range(len(flat.option_start) - 1):
        base, size = flat.option_start[v], flat.option_start[v + 1] - flat.option_start[v]
        for entry in range(flat.usage_start[v], flat.usage_start[v + 1]):
            rate = total[flat.usage_last[entry]] - total[flat.usage_first[entry]]
            if rate > 0.0:
                start = flat.amount_start[entry]
                for k in range(size):
                    priced[base + k] += rate * flat.amount[start + k]


@njit(cache=True, nogil=True)
def _collect(matrix, start, rows, columns, messages, given, result):
    """messages[result + column] = min over rows of matrix[row, column] - messages[given + row]."""
    for column in range(columns):
        messages[result + column] = np.inf
    for row in range(rows):
        base = start + row * columns
        less = messages[given + row]
        for column in range(columns):
            value = matrix[base + column] - less
            if value < messages[result + column]:
                messages[result + column] = value


@njit(cache=True, nogil=True)
def forward_pass(flat, priced, messages, beliefs):
    """One pass upwards; fills ``beliefs`` (node costs before they are handed on) and returns the bound."""
    bound = 0.0
    for v in range(len(flat.option_start) - 1):
        base, size = flat.option_start[v], flat.option_start[v + 1] - flat.option_start[v]
        ups, downs = flat.up_start[v + 1] - flat.up_start[v], flat.down_start[v + 1] - flat.down_start[v]
        for k in range(size):
            beliefs[base + k] = priced[base + k]
        for index in range(flat.down_start[v], flat.down_start[v + 1]):
            e = flat.down_edge[index]
            rows = flat.option_start[flat.edge_low[e] + 1] - flat.option_start[flat.edge_low[e]]
            _collect(flat.matrix, flat.matrix_start[e], rows, size, messages, flat.low_start[e], flat.high_start[e])
            for k in range(size):
                beliefs[base + k] += messages[flat.high_start[e] + k]
        for index in range(flat.up_start[v], flat.up_start[v + 1]):
            start = flat.low_start[flat.up_edge[index]]
            for k in range(size):
                beliefs[base + k] += messages[start + k]
        smallest = beliefs[base : base + size].min()  # stays with the node, so that messages remain small
        bound += smallest
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        for index in range(flat.up_start[v], flat.up_start[v + 1]):
            start = flat.low_start[flat.up_edge[index]]
            for k in range(size):
                messages[start + k] -= share * (beliefs[base + k] - smallest)
    return bound


@njit(cache=True, nogil=True)
def backward_pass(flat, priced, messages, beliefs):
    """One pass downwards, the mirror image of `forward_pass`."""
    bound = 0.0
    for v in range(len(flat.option_start) - 2, -1, -1):
        base, size = flat.option_start[v], flat.option_start[v + 1] - flat.option_start[v]
        ups, downs = flat.up_start[v + 1] - flat.up_start[v], flat.down_start[v + 1] - flat.down_start[v]
        for k in range(size):
            beliefs[base + k] = priced[base + k]
        for index in range(flat.up_start[v], flat.up_start[v + 1]):
            e = flat.up_edge[index]
            rows = flat.option_start[flat.edge_high[e] + 1] - flat.option_start[flat.edge_high[e]]
            _collect(flat.flipped, flat.matrix_start[e], rows, size, messages, flat.high_start[e], flat.low_start[e])
            for k in range(size):
                beliefs[base + k] += messages[flat.low_start[e] + k]
        for index in range(flat.down_start[v], flat.down_start[v + 1]):
            start = flat.high_start[flat.down_edge[index]]
            for k in range(size):
                beliefs[base + k] += messages[start + k]
        smallest = beliefs[base : base + size].min()
        bound += smallest
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        for index in range(flat.down_start[v], flat.down_start[v + 1]):
            start = flat.high_start[flat.down_edge[index]]
            for k in range(size):
                messages[start + k] -= share * (beliefs[base + k] - smallest)
    return bound


@njit(cache=True, nogil=True)
def rounding_error(flat, priced, messages, beliefs):
    """How far floating-point sums may have moved a bound computed from these numbers, generously."""
    total = 0.0
    for v in range(len(flat.option_start) - 1):
        degree = flat.near_start[v + 1] - flat.near_start[v]
        largest = 0.0
        for k in range(flat.option_start[v], flat.option_start[v + 1]):
            largest = max(largest, abs(beliefs[k]), abs(priced[k]))
        total += largest * (degree + 2)
    for e in range(len(flat.edge_low)):
        largest = 0.0
        for k in range(flat.option_start[flat.edge_low[e] + 1] - flat.option_start[flat.edge_low[e]]):
            largest = max(largest, abs(messages[flat.low_start[e] + k]))
        for k in range(flat.option_start[flat.edge_high[e] + 1] - flat.option_start[flat.edge_high[e]]):
            largest = max(largest, abs(messages[flat.high_start[e] + k]))
        total += 4.0 * largest
    return 2.3e-16 * total


@njit(cache=True, nogil=True)
def weights_after_backward(flat, messages, beliefs, weights):
    """Weights over options whose usage is the bound's supergradient, just after a backward pass."""
    weights[:] = 0.0
    for v in range(len(flat.option_start) - 1):
        base, size = flat.option_start[v], flat.option_start[v + 1] - flat.option_start[v]
        ups, downs = flat.up_start[v + 1] - flat.up_start[v], flat.down_start[v + 1] - flat.down_start[v]
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        kept = 1.0 - share * downs
        if kept > 1e-12:  # the rest came from the minima of lower neighbours, visited before
            weights[base + beliefs[base : base + size].argmin()] += kept
        for index in range(flat.up_start[v], flat.up_start[v + 1]):
            e = flat.up_edge[index]
            w = flat.edge_high[e]
            other, count = flat.option_start[w], flat.option_start[w + 1] - flat.option_start[w]
            w_ups, w_downs = flat.up_start[w + 1] - flat.up_start[w], flat.down_start[w + 1] - flat.down_start[w]
            given = 1.0 / max(w_ups, w_downs)
            for k in range(size):
                weight = weights[base + k]
                if weight > 0.0:
                    row = flat.matrix_start[e] + k * count
                    best, smallest = 0, np.inf
                    for other_option in range(count):
                        value = flat.matrix[row + other_option] - messages[flat.high_start[e] + other_option]
                        if value < smallest:
                            best, smallest = other_option, value
                    weights[other + best] += given * weight


@njit(cache=True, nogil=True)
def usage_of_weights(flat, weights, usage):
    """Usage at every critical time when options are taken with the given weights."""
    usage[:] = 0.0
    for v in range(len(flat.option_start) - 1):
        base, size = flat.option_start[v], flat.option_start[v + 1] - flat.option_start[v]
        for entry in range(flat.usage_start[v], flat.usage_start[v + 1]):
            total = 0.0
            for k in range(size):
                total += weights[base + k] * flat.amount[flat.amount_start[entry] + k]
            usage[flat.usage_first[entry]] += total
            if flat.usage_last[entry] < len(usage):
                usage[flat.usage_last[entry]] -= total
    for t in range(1, len(usage)):
        usage[t] += usage[t - 1]


@njit(cache=True, nogil=True)
def round_messages(flat, priced, messages, choice):
    """A choice from the messages just after a backward pass: node by node, best given the lower ones."""
    for v in range(len(flat.option_start) - 1):
        base, size = flat.option_start[v], flat.option_start[v + 1] - flat.option_start[v]
        best, smallest = 0, np.inf
        for k in range(size):
            value = priced[base + k]
            for index in range(flat.up_start[v], flat.up_start[v + 1]):
                value += messages[flat.low_start[flat.up_edge[index]] + k]
            for index in range(flat.down_start[v], flat.down_start[v + 1]):
                e = flat.down_edge[index]
                value += flat.matrix[flat.matrix_start[e] + choice[flat.edge_low[e]] * size + k]
            if value < smallest:
                best, smallest = k, value
        choice[v] = best
