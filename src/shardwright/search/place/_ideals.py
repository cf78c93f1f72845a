"""Compiled kernels of the exact contiguous search: listing ideals, their crossing transfers, and the recurrence.

Blocks are numbered topologically, so an ideal without its largest element is an ideal: every ideal has one parent and
is listed once, without a hash table. What a stage ``K - I`` transfers follows from the two ideals alone: a transfer that
touches I and the rest costs the stage nothing if all its remaining ends lie outside K (it passes by), and every
transfer that K cuts and I does not is paid in full. So a pair costs only as many steps as I has cut transfers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import copy, kernel


@kernel()
def list_ideals(
    needs: np.ndarray, weights: np.ndarray, low: np.ndarray, high: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The ideals that lie in some window, as bit sets with their integer weights; and how many were visited.

    ``needs[v]`` is the bit set of v's predecessors; ``weights`` is [blocks, references]; the windows ``low`` and
    ``high`` are [states, references]. Gives up, with a negative count, beyond ``limit`` visited or kept ideals.
    """
    n, words = needs.shape
    references = weights.shape[1]
    kept = 0
    capacity = 1024
    bits = np.zeros((capacity, words), dtype=np.uint64)
    sums = np.zeros((capacity, references), dtype=np.int64)
    current = np.zeros(words, dtype=np.uint64)
    total = np.zeros(references, dtype=np.int64)
    path = np.empty(n + 1, dtype=np.int64)
    depth, v, visited = 0, 0, 0
    fresh = True
    while True:
        if fresh:
            fresh = False
            visited += 1
            if visited > limit:
                return bits[:0], sums[:0], -visited
            if _in_some_window(total, low, high):
                if kept == capacity:
                    capacity *= 2
                    more_bits = np.zeros((capacity, words), dtype=np.uint64)
                    more_sums = np.zeros((capacity, references), dtype=np.int64)
                    for i in range(kept):
                        copy(bits[i], more_bits[i])
                        copy(sums[i], more_sums[i])
                    bits, sums = more_bits, more_sums
                copy(current, bits[kept])
                copy(total, sums[kept])
                kept += 1
        if v < n:
            inside = True
            for w in range(words):
                if needs[v, w] & ~current[w]:
                    inside = False
                    break
            if inside:
                path[depth] = v
                depth += 1
                current[v >> 6] |= np.uint64(1) << np.uint64(v & 63)
                for r in range(references):
                    total[r] += weights[v, r]
                fresh = True
            v += 1
            continue
        if depth == 0:
            return bits[:kept].copy(), sums[:kept].copy(), visited
        depth -= 1
        v = path[depth]
        current[v >> 6] &= ~(np.uint64(1) << np.uint64(v & 63))
        for r in range(references):
            total[r] -= weights[v, r]
        v += 1


@kernel()
def _in_some_window(total: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    for s in range(low.shape[0]):
        inside = True
        for r in range(low.shape[1]):
            if total[r] < low[s, r] or total[r] > high[s, r]:
                inside = False
                break
        if inside:
            return True
    return False


@kernel()
def sums_over(bits: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For every bit set the sum of the rows of ``values`` it holds."""
    count = bits.shape[0]
    out = np.zeros((count, values.shape[1]))
    for i in range(count):
        for v in range(values.shape[0]):
            if bits[i, v >> 6] >> np.uint64(v & 63) & np.uint64(1):
                for c in range(values.shape[1]):
                    out[i, c] += values[v, c]
    return out


@kernel(nogil=True)
def crossings(
    bits: np.ndarray, end_start: np.ndarray, ends: np.ndarray, home: np.ndarray, cost: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For every ideal: the cost of the transfers it cuts (sent from inside, received inside), and for each of those the
    ends that lie outside it."""
    count = bits.shape[0]
    transfers, passes = cost.shape
    start = np.zeros(count + 1, dtype=np.int64)
    rest_total = 0
    for i in range(count):
        if stop[0]:  # what is missing then is used by nobody
            break
        crossing = 0
        for t in range(transfers):
            inside = 0
            for e in range(end_start[t], end_start[t + 1]):
                inside += _has(bits, i, ends[e])
            size = end_start[t + 1] - end_start[t]
            if 0 < inside < size:
                crossing += 1
                rest_total += size - inside
        start[i + 1] = start[i] + crossing
    cut = np.zeros((count, passes, 2))
    which = np.empty(start[count], dtype=np.int32)
    rest_start = np.zeros(start[count] + 1, dtype=np.int64)
    rest = np.empty(rest_total, dtype=np.int32)
    entry, filled = 0, 0
    for i in range(count):
        if stop[0]:
            break
        for t in range(transfers):
            inside = 0
            for e in range(end_start[t], end_start[t + 1]):
                inside += _has(bits, i, ends[e])
            if 0 < inside < end_start[t + 1] - end_start[t]:
                direction = 0 if _has(bits, i, home[t]) else 1
                for p in range(passes):
                    cut[i, p, direction] += cost[t, p]
                which[entry] = t
                for e in range(end_start[t], end_start[t + 1]):
                    if not _has(bits, i, ends[e]):
                        rest[filled] = ends[e]
                        filled += 1
                entry += 1
                rest_start[entry] = filled
    return cut, start, which, rest_start, rest


@kernel(inline="always")
def _has(bits: np.ndarray, row: int, block: int) -> int:
    return int(bits[row, block >> 6] >> np.uint64(block & 63) & np.uint64(1))


class Sums(NamedTuple):
    """Ideals, sorted by the first weight, then by size, and what the blocks of each add up to."""

    bits: np.ndarray  # [ideals, words]
    weights: np.ndarray  # [ideals, references] integers
    compute: np.ndarray  # [ideals, kinds, passes]
    refused: np.ndarray  # [ideals, kinds] blocks that cannot run on the kind
    memory: np.ndarray  # [ideals]
    parameters: np.ndarray  # [ideals]


class Crossings(NamedTuple):
    """The transfers that every ideal cuts (:func:`crossings`)."""

    cut: np.ndarray  # [ideals, passes, 2] sent and received
    start: np.ndarray  # ideal -> its cut transfers
    which: np.ndarray
    rest_start: np.ndarray  # cut transfer -> its ends outside the ideal
    rest: np.ndarray
    home: np.ndarray  # [transfers] the sender
    cost: np.ndarray  # [transfers, passes]


class Devices(NamedTuple):
    """How many devices of each kind are used, and by which moves."""

    low: np.ndarray  # [states, references] least weights of an ideal with so many used
    high: np.ndarray  # and most
    moves: np.ndarray  # [moves, 2] kind, devices
    after: np.ndarray  # [states, moves] the state reached, or -1
    pays: np.ndarray  # [kinds]
    room: np.ndarray  # [kinds]
    per_byte: float  # time to synchronise one parameter byte
    overlap: bool


@kernel(nogil=True)
def best_chains(
    ideals: Sums,
    crossing: Crossings,
    devices: Devices,
    widest: int,  # largest first weight of one stage
    limits: np.ndarray,  # [passes] no stage's load may exceed these
    summed: bool,  # the objective is the sum of the loads, not their maximum
    stop: np.ndarray,  # [1] whether time is up: then nothing is found
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """``best[K, s]``: the smallest maximum (or sum) of the last pass's loads over chains of ideals that end in K with the
    devices of state s used; the predecessor and the move of each; and the number of pairs priced."""
    bits, sums, compute, refused = ideals.bits, ideals.weights, ideals.compute, ideals.refused
    memory, parameters = ideals.memory, ideals.parameters
    cut, start, which, rest_start, rest = (
        crossing.cut,
        crossing.start,
        crossing.which,
        crossing.rest_start,
        crossing.rest,
    )
    home, cost = crossing.home, crossing.cost
    low, high, moves, after = devices.low, devices.high, devices.moves, devices.after
    pays, room, per_byte, overlap = devices.pays, devices.room, devices.per_byte, devices.overlap
    count, words = bits.shape
    states = low.shape[0]
    references = low.shape[1]
    passes = cut.shape[1]
    best = np.full((count, states), np.inf)
    origin = np.full((count, states), -1, dtype=np.int32)
    by = np.full((count, states), -1, dtype=np.int8)
    open_state = np.zeros(states, dtype=np.bool_)
    moved = np.zeros((passes, 2))
    first, priced = 0, 0
    best[0, :] = 0.0
    for K in range(1, count):
        if stop[0]:
            break
        anything = False
        for s in range(states):
            open_state[s] = True
            for r in range(references):
                if sums[K, r] < low[s, r] or sums[K, r] > high[s, r]:
                    open_state[s] = False
                    break
            anything |= open_state[s]
        while sums[K, 0] - sums[first, 0] > widest:
            first += 1
        if not anything:
            continue
        for I in range(K - 1, first - 1, -1):
            inside = True
            for w in range(words):
                if bits[I, w] & ~bits[K, w]:
                    inside = False
                    break
            if not inside:
                continue
            # A pair can only help a state that some move reaches better than what is known.
            helpful = False
            for m in range(moves.shape[0]):
                work = (compute[K, moves[m, 0], passes - 1] - compute[I, moves[m, 0], passes - 1]) / moves[m, 1]
                if work > limits[passes - 1]:
                    continue
                for s in range(states):
                    t = after[s, m]
                    floor = best[I, s] + work if summed else max(best[I, s], work)
                    if t >= 0 and open_state[t] and floor < best[K, t]:
                        helpful = True
                        break
                if helpful:
                    break
            if not helpful:
                continue
            priced += 1
            for p in range(passes):
                moved[p, 0] = cut[K, p, 0]
                moved[p, 1] = cut[K, p, 1]
            for entry in range(start[I], start[I + 1]):
                t = which[entry]
                touched, complete = False, True
                for e in range(rest_start[entry], rest_start[entry + 1]):
                    if _has(bits, K, rest[e]):
                        touched = True
                    else:
                        complete = False
                at_home = _has(bits, K, home[t]) == 1
                for p in range(passes):
                    if not complete:  # K cuts it too: take back what K's sum says
                        moved[p, 0 if at_home else 1] -= cost[t, p]
                    if touched:
                        moved[p, 0 if at_home and not _has(bits, I, home[t]) else 1] += cost[t, p]
            for m in range(moves.shape[0]):
                kind, several = moves[m, 0], moves[m, 1]
                if refused[K, kind] != refused[I, kind] or memory[K] - memory[I] > room[kind]:
                    continue
                allowed = True
                load = 0.0
                for p in range(passes):
                    work = compute[K, kind, p] - compute[I, kind, p]
                    if p == passes - 1 and several > 1:
                        work += 4.0 * (several - 1) / several * (parameters[K] - parameters[I]) * per_byte
                    sent, received = moved[p, 0] * pays[kind], moved[p, 1] * pays[kind]
                    load = (max(work, sent, received) if overlap else work + sent + received) / several
                    if load > limits[p]:
                        allowed = False
                        break
                if not allowed:
                    continue
                for s in range(states):
                    t = after[s, m]
                    if t < 0 or not open_state[t]:
                        continue
                    value = best[I, s] + load if summed else max(best[I, s], load)
                    if value < best[K, t]:
                        best[K, t] = value
                        origin[K, t] = I
                        by[K, t] = m
        for s in range(states):  # a device may stay empty: more devices are never worse
            for m in range(moves.shape[0]):
                t = after[s, m]
                if moves[m, 1] == 1 and t >= 0 and open_state[t] and best[K, s] < best[K, t]:
                    best[K, t] = best[K, s]
                    origin[K, t] = K
                    by[K, t] = m
    return best, origin, by, priced
