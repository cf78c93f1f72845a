"""Compiled cutting of a topological order into stages: by filling up to a limit, and by dynamic programming over cuts.

Both keep a stage's receiving and sending costs up to date as blocks are appended, so pricing all stages that begin at one
place costs one walk over the edges of the blocks they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import kernel


class Ordered(NamedTuple):
    """Blocks in one order and the transfers between them, as arrays."""

    order: np.ndarray  # position -> block
    position: np.ndarray  # block -> position
    home: np.ndarray  # transfer -> its sender
    cost: np.ndarray  # transfer -> seconds at factor 1
    earliest: np.ndarray  # transfer -> position of its first receiver
    latest: np.ndarray  # and of its last
    out_start: np.ndarray  # block -> transfers that it sends
    out: np.ndarray
    in_start: np.ndarray  # block -> transfers that it receives
    into: np.ndarray


class Loads(NamedTuple):
    """What blocks take on every kind of device."""

    times: np.ndarray  # [blocks, kinds], infinite where refused
    memory: np.ndarray  # [blocks]
    pays: np.ndarray  # [kinds]
    room: np.ndarray  # [kinds]
    overlap: bool


@kernel()
def _append(p: int, begin: int, mark: int, stamp: np.ndarray, line: Ordered) -> tuple[float, float]:
    """What appending the block at position p to the stage from ``begin`` adds to its receiving and sending."""
    position, home, cost, earliest, latest = line.position, line.home, line.cost, line.earliest, line.latest
    out_start, out, in_start, into = line.out_start, line.out, line.in_start, line.into
    received, sent = 0.0, 0.0
    b = line.order[p]
    for e in range(out_start[b], out_start[b + 1]):
        t = out[e]
        if stamp[t] == mark:
            received -= cost[t]  # it was received before its sender joined the stage
        if earliest[t] < begin or latest[t] > p:
            sent += cost[t]
    for e in range(in_start[b], in_start[b + 1]):
        t = into[e]
        at = position[home[t]]
        if begin <= at <= p:
            if latest[t] == p and earliest[t] >= begin and at < p:
                sent -= cost[t]
        elif stamp[t] != mark:
            stamp[t] = mark
            received += cost[t]
    return received, sent


@kernel()
def fill_stages(line: Ordered, loads: Loads, counts: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Fill one device after the other, each as far along the order as the limit allows, best kind first.

    Returns the end position and kind of every stage, and how many stages (-1 when the devices do not suffice).
    """
    times, memory, pays, room, overlap = loads.times, loads.memory, loads.pays, loads.room, loads.overlap
    order = line.order
    n, kinds = times.shape
    left = counts.copy()
    ends = np.zeros(counts.sum() + 1, dtype=np.int64)
    used = np.zeros(counts.sum() + 1, dtype=np.int64)
    stamp = np.full(len(line.home), -1, dtype=np.int64)
    compute = np.zeros(kinds)
    reach = np.zeros(kinds, dtype=np.int64)
    begin, stages = 0, 0
    while begin < n:
        compute[:] = 0.0
        reach[:] = begin
        received, sent, held = 0.0, 0.0, 0.0
        for p in range(begin, n):
            held += memory[order[p]]
            alive = False
            for k in range(kinds):
                compute[k] += times[order[p], k]
                if left[k] > 0 and compute[k] <= limit and held <= room[k]:
                    alive = True
            if not alive:
                break
            more = _append(p, begin, stages, stamp, line)
            received += more[0]
            sent += more[1]
            for k in range(kinds):
                if left[k] > 0 and held <= room[k]:
                    r, s = received * pays[k], sent * pays[k]
                    if (max(compute[k], r, s) if overlap else compute[k] + r + s) <= limit:
                        reach[k] = p + 1
        best = -1
        for k in range(kinds):
            if left[k] > 0 and reach[k] > begin and (best < 0 or reach[k] > reach[best]):
                best = k
        if best < 0:
            return ends, used, -1
        left[best] -= 1
        begin = reach[best]
        ends[stages] = begin
        used[stages] = best
        stages += 1
    return ends, used, stages


@kernel()
def cut_at(
    line: Ordered,
    loads: Loads,
    limit: float,
    places: np.ndarray,  # positions where a cut is allowed, from 0 to the number of blocks
    after: np.ndarray,  # [states, kinds] the state with one more device of the kind used, or -1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``best[place, state]``: the smallest largest load (up to ``limit``) of stages that end there; where and on what kind
    the last of them began."""
    times, memory, pays, room, overlap = loads.times, loads.memory, loads.pays, loads.room, loads.overlap
    order = line.order
    n, kinds = times.shape
    states = after.shape[0]
    best = np.full((len(places), states), np.inf)
    origin = np.full((len(places), states), -1, dtype=np.int32)
    by = np.full((len(places), states), -1, dtype=np.int8)
    best[0, :] = 0.0
    stamp = np.full(len(line.home), -1, dtype=np.int64)
    compute = np.zeros(kinds)
    for i in range(len(places) - 1):
        if best[i].min() > limit:
            continue
        begin = places[i]
        compute[:] = 0.0
        received, sent, held = 0.0, 0.0, 0.0
        j = i + 1
        for p in range(begin, n):
            held += memory[order[p]]
            alive = False
            for k in range(kinds):
                compute[k] += times[order[p], k]
                if compute[k] <= limit and held <= room[k]:
                    alive = True
            if not alive:
                break
            more = _append(p, begin, i, stamp, line)
            received += more[0]
            sent += more[1]
            if p + 1 != places[j]:
                continue
            for k in range(kinds):
                r, s = received * pays[k], sent * pays[k]
                load = max(compute[k], r, s) if overlap else compute[k] + r + s
                if load > limit or held > room[k]:
                    continue
                for state in range(states):
                    t = after[state, k]
                    if t >= 0 and best[i, state] < best[j, t] and load < best[j, t]:
                        best[j, t] = max(best[i, state], load)
                        origin[j, t] = i
                        by[j, t] = k
            j += 1
    return best, origin, by
