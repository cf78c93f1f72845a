"""Compiled message passes: the lower bound of a choice problem under fixed prices of memory, and its slope.

Sequential reweighted message passing (TRW-S, Kolmogorov 2006; in the form of SRMP, 2015). Every edge keeps a message
to each end; the cost of a node is what it has plus the messages it got, the cost of an edge what it has less the
messages it gave. A forward pass visits nodes in order: collect all that backward edges can give, hand an equal share
of what exceeds its smallest cost to forward edges. After it every edge's smallest cost is zero, and the sum of the
nodes' smallest costs is a lower bound that never falls from pass to pass. With messages fixed the bound is concave in
the prices; following the minima backwards gives, per node, weights over options whose usage is a supergradient. Every
function takes a `Flat` and unpacks what it reads first: reaching into the tuple inside a loop would double its time.
"""

from __future__ import annotations

import numpy as np

from shardwright.jit import copy, kernel


@kernel(nogil=True)
def price_options(flat, prices, priced):
    """Node costs plus usage at the given prices per critical time."""
    option_start, cost, usage_start = flat.option_start, flat.cost, flat.usage_start
    usage_first, usage_last, amount_start = flat.usage_first, flat.usage_last, flat.amount_start
    amount = flat.amount
    total = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        total[t + 1] = total[t] + prices[t]
    copy(cost, priced)
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for entry in range(usage_start[v], usage_start[v + 1]):
            rate = total[usage_last[entry]] - total[usage_first[entry]]
            if rate > 0.0:
                start = amount_start[entry]
                for k in range(size):
                    priced[base + k] += rate * amount[start + k]


@kernel(nogil=True)
def _collect(matrix, start, rows, columns, messages, given, result):
    """messages[result + column] = min over rows of matrix[row, column] - messages[given + row]."""
    smallest = messages[result : result + columns]
    smallest[:] = np.inf
    for row in range(rows):
        costs = matrix[start + row * columns : start + (row + 1) * columns]
        less = messages[given + row]
        for column in range(columns):  # slices and no branch: the compiler makes vector instructions of it
            smallest[column] = min(smallest[column], costs[column] - less)


@kernel(nogil=True)
def forward_pass(flat, priced, messages, beliefs):
    """One pass upwards; fills ``beliefs`` (node costs before they are handed on) and returns the bound."""
    option_start, edge_low, matrix_start = flat.option_start, flat.edge_low, flat.matrix_start
    matrix, low_start, high_start = flat.matrix, flat.low_start, flat.high_start
    up_start, up_edge, down_start = flat.up_start, flat.up_edge, flat.down_start
    down_edge = flat.down_edge
    bound = 0.0
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        ups, downs = up_start[v + 1] - up_start[v], down_start[v + 1] - down_start[v]
        for k in range(size):
            beliefs[base + k] = priced[base + k]
        for index in range(down_start[v], down_start[v + 1]):
            e = down_edge[index]
            rows = option_start[edge_low[e] + 1] - option_start[edge_low[e]]
            _collect(matrix, matrix_start[e], rows, size, messages, low_start[e], high_start[e])
            for k in range(size):
                beliefs[base + k] += messages[high_start[e] + k]
        for index in range(up_start[v], up_start[v + 1]):
            start = low_start[up_edge[index]]
            for k in range(size):
                beliefs[base + k] += messages[start + k]
        smallest = np.inf  # stays with the node, so that messages remain small
        for k in range(size):
            smallest = min(smallest, beliefs[base + k])
        bound += smallest
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        for index in range(up_start[v], up_start[v + 1]):
            start = low_start[up_edge[index]]
            for k in range(size):
                messages[start + k] -= share * (beliefs[base + k] - smallest)
    return bound


@kernel(nogil=True)
def backward_pass(flat, priced, messages, beliefs):
    """One pass downwards, the mirror image of `forward_pass`."""
    option_start, edge_high, matrix_start = flat.option_start, flat.edge_high, flat.matrix_start
    flipped, low_start, high_start = flat.flipped, flat.low_start, flat.high_start
    up_start, up_edge, down_start = flat.up_start, flat.up_edge, flat.down_start
    down_edge = flat.down_edge
    bound = 0.0
    for v in range(len(option_start) - 2, -1, -1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        ups, downs = up_start[v + 1] - up_start[v], down_start[v + 1] - down_start[v]
        for k in range(size):
            beliefs[base + k] = priced[base + k]
        for index in range(up_start[v], up_start[v + 1]):
            e = up_edge[index]
            rows = option_start[edge_high[e] + 1] - option_start[edge_high[e]]
            _collect(flipped, matrix_start[e], rows, size, messages, high_start[e], low_start[e])
            for k in range(size):
                beliefs[base + k] += messages[low_start[e] + k]
        for index in range(down_start[v], down_start[v + 1]):
            start = high_start[down_edge[index]]
            for k in range(size):
                beliefs[base + k] += messages[start + k]
        smallest = np.inf
        for k in range(size):
            smallest = min(smallest, beliefs[base + k])
        bound += smallest
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        for index in range(down_start[v], down_start[v + 1]):
            start = high_start[down_edge[index]]
            for k in range(size):
                messages[start + k] -= share * (beliefs[base + k] - smallest)
    return bound


@kernel(nogil=True)
def rounding_error(flat, priced, messages, beliefs):
    """How far floating-point sums may have moved a bound computed from these numbers, generously."""
    option_start, edge_low, edge_high = flat.option_start, flat.edge_low, flat.edge_high
    low_start, high_start, near_start = flat.low_start, flat.high_start, flat.near_start
    total = 0.0
    for v in range(len(option_start) - 1):
        degree = near_start[v + 1] - near_start[v]
        largest = 0.0
        for k in range(option_start[v], option_start[v + 1]):
            largest = max(largest, abs(beliefs[k]), abs(priced[k]))
        total += largest * (degree + 2)
    for e in range(len(edge_low)):
        largest = 0.0
        for k in range(option_start[edge_low[e] + 1] - option_start[edge_low[e]]):
            largest = max(largest, abs(messages[low_start[e] + k]))
        for k in range(option_start[edge_high[e] + 1] - option_start[edge_high[e]]):
            largest = max(largest, abs(messages[high_start[e] + k]))
        total += 4.0 * largest
    return 2.3e-16 * total


@kernel(nogil=True)
def weights_after_backward(flat, messages, beliefs, weights):
    """Weights over options whose usage is the bound's supergradient, just after a backward pass."""
    option_start, edge_high, matrix_start = flat.option_start, flat.edge_high, flat.matrix_start
    matrix, high_start, up_start = flat.matrix, flat.high_start, flat.up_start
    up_edge, down_start = flat.up_edge, flat.down_start
    weights[:] = 0.0
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        ups, downs = up_start[v + 1] - up_start[v], down_start[v + 1] - down_start[v]
        share = 1.0 / max(ups, downs) if ups + downs > 0 else 0.0
        kept = 1.0 - share * downs
        if kept > 1e-12:  # the rest came from the minima of lower neighbours, visited before
            weights[base + beliefs[base : base + size].argmin()] += kept
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
                    for other_option in range(count):
                        value = matrix[row + other_option] - messages[high_start[e] + other_option]
                        if value < smallest:
                            best, smallest = other_option, value
                    weights[other + best] += given * weight


@kernel(nogil=True)
def usage_of_weights(flat, weights, usage):
    """Usage at every critical time when options are taken with the given weights."""
    option_start, usage_start, usage_first = flat.option_start, flat.usage_start, flat.usage_first
    usage_last, amount_start, amount = flat.usage_last, flat.amount_start, flat.amount
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


@kernel(nogil=True)
def round_messages(flat, priced, messages, choice):
    """A choice from the messages just after a backward pass: node by node, best given the lower ones."""
    option_start, edge_low, matrix_start = flat.option_start, flat.edge_low, flat.matrix_start
    matrix, low_start, up_start = flat.matrix, flat.low_start, flat.up_start
    up_edge, down_start, down_edge = flat.up_edge, flat.down_start, flat.down_edge
    for v in range(len(option_start) - 1):
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        best, smallest = 0, np.inf
        for k in range(size):
            value = priced[base + k]
            for index in range(up_start[v], up_start[v + 1]):
                value += messages[low_start[up_edge[index]] + k]
            for index in range(down_start[v], down_start[v + 1]):
                e = down_edge[index]
                value += matrix[matrix_start[e] + choice[edge_low[e]] * size + k]
            if value < smallest:
                best, smallest = k, value
        choice[v] = best
