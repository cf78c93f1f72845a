"""Compiled block moves: re-choose a whole tree of nodes at once, exactly, with everything else fixed.

A block is grown from a random node by adding neighbours that touch it exactly once, so the nodes in it induce a tree
and the best joint choice for them is a dynamic program, as cheap as the edges it covers. Half the graph can move at
once. A move minimises cost plus usage at given prices; it is taken unless it would exceed the limit (or, while no
choice within the limit is known, unless it makes the excess worse); a move that would is tried again with the times
it overfills made dearer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import copy, kernel

INSIDE = 1_000_000  # added to a node's count of edges into the block when it joins
ATTEMPTS = 4


class Walk(NamedTuple):
    """Where a walk stands: its choice, that one's usage at every critical time, and the best choice so far."""

    choice: np.ndarray
    usage: np.ndarray
    best_choice: np.ndarray


class Effort(NamedTuple):
    """How a round of moves goes: until about ``work`` numbers have been read, a measure of time that does not depend on the
    machine; in blocks of at most ``most`` nodes. ``strict`` moves never exceed the limit (nor an excess that is already
    there); others follow the prices alone."""

    work: float
    most: int
    strict: bool
    seed: int


class _Tree(NamedTuple):
    """A block of nodes that induces a tree, and the dynamic program over it."""

    touches: np.ndarray  # node -> its edges into the block
    block: np.ndarray  # position -> node
    parent_edge: np.ndarray  # position -> edge to the node before it
    table: np.ndarray  # option -> least cost of what hangs from it
    follow_start: np.ndarray
    follow: np.ndarray  # option of the parent -> best option
    fresh: np.ndarray  # the choice it comes to


@kernel(nogil=True)
def usage_of_choice(flat, choice, usage):
    """Usage at every critical time."""
    usage_start, usage_first, usage_last = flat.usage_start, flat.usage_first, flat.usage_last
    amount_start, amount = flat.amount_start, flat.amount
    usage[:] = 0.0
    for v in range(len(choice)):
        for entry in range(usage_start[v], usage_start[v + 1]):
            used = amount[amount_start[entry] + choice[v]]
            usage[usage_first[entry]] += used
            if usage_last[entry] < len(usage):
                usage[usage_last[entry]] -= used
    for t in range(1, len(usage)):
        usage[t] += usage[t - 1]


@kernel(nogil=True)
def cost_of_choice(flat, choice):
    """Node plus edge costs."""
    option_start, cost, edge_low = flat.option_start, flat.cost, flat.edge_low
    edge_high, matrix_start, matrix = flat.edge_high, flat.matrix_start, flat.matrix
    total = 0.0
    for v in range(len(choice)):
        total += cost[option_start[v] + choice[v]]
    for e in range(len(edge_low)):
        columns = option_start[edge_high[e] + 1] - option_start[edge_high[e]]
        total += matrix[matrix_start[e] + choice[edge_low[e]] * columns + choice[edge_high[e]]]
    return total


@kernel(nogil=True)
def _touch(flat, v, touches):
    edge_low, edge_high, near_start = flat.edge_low, flat.edge_high, flat.near_start
    near_edge = flat.near_edge
    touches[v] += INSIDE
    for index in range(near_start[v], near_start[v + 1]):
        touches[edge_low[near_edge[index]] + edge_high[near_edge[index]] - v] += 1


@kernel(nogil=True)
def _grow(flat, root, most, touches, block, parent_edge):
    """A random tree-inducing block around ``root``; ``touches`` counts every node's edges into it."""
    edge_low, edge_high, near_start = flat.edge_low, flat.edge_high, flat.near_start
    near_edge = flat.near_edge
    count, seen = 1, 0
    block[0], parent_edge[0] = root, -1
    _touch(flat, root, touches)
    while seen < count and count < most:
        v = block[seen]
        degree = near_start[v + 1] - near_start[v]
        offset = np.random.randint(degree) if degree > 0 else 0
        for step in range(degree):
            e = near_edge[near_start[v] + (offset + step) % degree]
            w = edge_low[e] + edge_high[e] - v
            if touches[w] == 1 and count < most:
                block[count], parent_edge[count] = w, e
                _touch(flat, w, touches)
                count += 1
        seen += 1
    return count


@kernel(nogil=True)
def _forget(flat, count, touches, block):
    edge_low, edge_high, near_start = flat.edge_low, flat.edge_high, flat.near_start
    near_edge = flat.near_edge
    for position in range(count):
        v = block[position]
        touches[v] = 0
        for index in range(near_start[v], near_start[v + 1]):
            touches[edge_low[near_edge[index]] + edge_high[near_edge[index]] - v] = 0


@kernel(nogil=True)
def _best_tree_choice(flat, count, tree, priced, choice):
    """Fill ``tree.fresh`` with the options of the block's nodes that minimise priced cost given the rest of ``choice``."""
    block, parent_edge, touches, table = tree.block, tree.parent_edge, tree.touches, tree.table
    follow_start, follow, fresh = tree.follow_start, tree.follow, tree.fresh
    option_start, edge_low, edge_high = flat.option_start, flat.edge_low, flat.edge_high
    matrix_start, matrix, flipped = flat.matrix_start, flat.matrix, flat.flipped
    near_start, near_edge = flat.near_start, flat.near_edge
    for position in range(count):
        v = block[position]
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for k in range(size):
            table[base + k] = priced[base + k]
        for index in range(near_start[v], near_start[v + 1]):
            e = near_edge[index]
            other = edge_low[e] + edge_high[e] - v
            if touches[other] < INSIDE:
                rows = flipped if edge_low[e] == v else matrix
                row = matrix_start[e] + choice[other] * size
                for k in range(size):
                    table[base + k] += rows[row + k]
    filled = 0
    for position in range(count - 1, 0, -1):
        v, e = block[position], parent_edge[position]
        parent = edge_low[e] + edge_high[e] - v
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        above, count_above = option_start[parent], option_start[parent + 1] - option_start[parent]
        rows = flipped if edge_low[e] == v else matrix
        follow_start[position] = filled
        for option in range(count_above):
            row = matrix_start[e] + option * size
            best, smallest = 0, np.inf
            for k in range(size):
                value = table[base + k] + rows[row + k]
                if value < smallest:
                    best, smallest = k, value
            table[above + option] += smallest
            follow[filled + option] = best
        filled += count_above
    root = block[0]
    fresh[root] = table[option_start[root] : option_start[root + 1]].argmin()
    for position in range(1, count):
        v = block[position]
        fresh[v] = follow[
            follow_start[position] + fresh[edge_low[parent_edge[position]] + edge_high[parent_edge[position]] - v]
        ]


@kernel(nogil=True)
def _effort(flat, count, block, parent_edge):
    """About how many numbers one look at the block reads."""
    option_start, edge_low, edge_high = flat.option_start, flat.edge_low, flat.edge_high
    near_start, usage_start = flat.near_start, flat.usage_start
    total = 50
    for position in range(count):
        v = block[position]
        size = option_start[v + 1] - option_start[v]
        total += size * (near_start[v + 1] - near_start[v] + 1)
        total += 4 * (usage_start[v + 1] - usage_start[v])
        if position > 0:
            parent = edge_low[parent_edge[position]] + edge_high[parent_edge[position]] - v
            total += size * (option_start[parent + 1] - option_start[parent])
    return total


@kernel(nogil=True)
def _block_cost(flat, count, block, touches, picks):
    """Cost of the block's nodes and of all edges that touch it."""
    option_start, cost, edge_low = flat.option_start, flat.cost, flat.edge_low
    edge_high, matrix_start, matrix = flat.edge_high, flat.matrix_start, flat.matrix
    near_start, near_edge = flat.near_start, flat.near_edge
    total = 0.0
    for position in range(count):
        v = block[position]
        total += cost[option_start[v] + picks[v]]
        for index in range(near_start[v], near_start[v + 1]):
            e = near_edge[index]
            low, high = edge_low[e], edge_high[e]
            if v == high and touches[low] >= INSIDE:
                continue  # counted at its lower end
            columns = option_start[high + 1] - option_start[high]
            total += matrix[matrix_start[e] + picks[low] * columns + picks[high]]
    return total


@kernel(nogil=True)
def _usage_change(flat, count, block, choice, fresh, change):
    """Add the block's change of usage to ``change`` as differences; returns the range of times it spans."""
    usage_start, usage_first, usage_last = flat.usage_start, flat.usage_first, flat.usage_last
    amount_start, amount, times = flat.amount_start, flat.amount, flat.times
    first, last = len(times), 0
    for position in range(count):
        v = block[position]
        if fresh[v] != choice[v]:
            for entry in range(usage_start[v], usage_start[v + 1]):
                start = amount_start[entry]
                more = amount[start + fresh[v]] - amount[start + choice[v]]
                if more != 0.0:
                    change[usage_first[entry]] += more
                    change[usage_last[entry]] -= more
                    first, last = min(first, usage_first[entry]), max(last, usage_last[entry])
    return first, last


@kernel(nogil=True)
def _charge_excess(flat, count, block, over, rate, priced, local):
    """Prices of the block's options, into ``local``, with ``rate`` more at every time that is ``over`` what is allowed."""
    option_start, usage_start, usage_first = flat.option_start, flat.usage_start, flat.usage_first
    usage_last, amount_start, amount = flat.usage_last, flat.amount_start, flat.amount
    inside = over[-1]
    for position in range(count):
        v = block[position]
        base, size = option_start[v], option_start[v + 1] - option_start[v]
        for k in range(size):
            local[base + k] = priced[base + k]
        for entry in range(usage_start[v], usage_start[v + 1]):
            points = over[usage_last[entry]] - over[usage_first[entry]]
            if points > 0:
                for k in range(size):
                    local[base + k] += rate / inside * points * amount[amount_start[entry] + k]


@kernel(nogil=True)
def _times_over(usage, change, first, last, allowed, over):
    """``over[t]``: how many times before t are above what is allowed with a change, which spans ``first`` to ``last``."""
    running, inside = 0.0, 0
    for t in range(len(usage)):
        over[t] = inside
        if first <= t < last:
            running += change[t]
            if usage[t] + running > allowed:
                inside += 1
    over[len(usage)] = inside


@kernel(nogil=True)
def improve(flat, priced, walk, total, best_cost, effort_of):
    """Make block moves on a walk, in place; returns (cost of its choice, best cost, moves taken)."""
    choice, usage, best_choice = walk.choice, walk.usage, walk.best_choice
    work, most, strict, seed = effort_of.work, effort_of.most, effort_of.strict, effort_of.seed
    option_start, cost, near_start = flat.option_start, flat.cost, flat.near_start
    limit = flat.limit
    np.random.seed(seed)
    nodes = len(choice)
    touches = np.zeros(nodes, dtype=np.int64)
    block = np.zeros(nodes, dtype=np.int64)
    parent_edge = np.zeros(nodes, dtype=np.int64)
    follow_start = np.zeros(nodes, dtype=np.int64)
    room = 1
    for v in range(nodes):
        room += (option_start[v + 1] - option_start[v]) * (near_start[v + 1] - near_start[v] + 1)
    follow = np.zeros(room, dtype=np.int32)
    table, local = np.zeros(len(cost)), np.zeros(len(cost))
    fresh = choice.copy()
    change, over = np.zeros(len(usage) + 1), np.zeros(len(usage) + 1, dtype=np.int64)
    tree = _Tree(touches, block, parent_edge, table, follow_start, follow, fresh)
    peak = usage.max()
    taken = 0
    while work > 0:
        size = int(most ** np.random.random()) + 1
        count = _grow(flat, np.random.randint(nodes), size, touches, block, parent_edge)
        before = _block_cost(flat, count, block, touches, choice)
        effort = _effort(flat, count, block, parent_edge)
        work -= effort
        allowed = max(peak, limit)
        rate = 0.0
        for attempt in range(ATTEMPTS):
            prices = priced if attempt == 0 else local
            work -= effort
            _best_tree_choice(flat, count, tree, prices, choice)
            different = False
            for position in range(count):
                different = different or fresh[block[position]] != choice[block[position]]
            if not different:
                break
            after = _block_cost(flat, count, block, touches, fresh)
            first, last = _usage_change(flat, count, block, choice, fresh, change)
            work -= effort + 2 * max(0, last - first)
            running, new_peak = 0.0, 0.0
            for t in range(first, last):
                running += change[t]
                new_peak = max(new_peak, usage[t] + running)
            accept = not strict or new_peak <= allowed
            if accept:
                running = 0.0
                for t in range(first, last):
                    running += change[t]
                    usage[t] += running
                peak = usage.max()
                work -= len(usage)
                for position in range(count):
                    choice[block[position]] = fresh[block[position]]
                total += after - before
                taken += 1
                if peak <= limit and total < best_cost:
                    best_cost = total
                    copy(choice, best_choice)
            elif attempt + 1 < ATTEMPTS:
                work -= effort + len(usage)
                rate = max(4.0 * rate, abs(before - after) / (new_peak - allowed))
                _times_over(usage, change, first, last, allowed, over)
                _charge_excess(flat, count, block, over, rate, priced, local)
            for t in range(first, last + 1):
                change[t] = 0.0
            if accept:
                break
        for position in range(count):
            fresh[block[position]] = choice[block[position]]
        _forget(flat, count, touches, block)
    return total, best_cost, taken
