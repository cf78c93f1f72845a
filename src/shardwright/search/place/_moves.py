"""Compiled refinement of a placement by moves and swaps.

A move changes only the loads of the two stages it touches, so it is priced from the block's own
transfers; it is made when the larger of the two loads falls, which sorts the load vector downwards and so ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import kernel


class Movable(NamedTuple):
    """Blocks and kinds of devices, as arrays: what does not change while blocks are moved."""

    times: np.ndarray  # [blocks, kinds], infinite where refused
    memory: np.ndarray  # [blocks]
    pays: np.ndarray  # [kinds]
    room: np.ndarray  # [kinds]
    home: np.ndarray  # transfer -> its sender
    cost: np.ndarray  # transfer -> seconds at factor 1
    receiver_start: np.ndarray  # transfer -> its receivers
    receivers: np.ndarray
    touch_start: np.ndarray  # block -> transfers that it sends or receives
    touch: np.ndarray
    before_start: np.ndarray  # block -> blocks before it
    before: np.ndarray
    after_start: np.ndarray  # block -> blocks after it
    after: np.ndarray
    ordered: bool  # stages are numbered in pipeline order and no order edge may go backwards
    overlap: bool


@kernel()
def _change(b: int, s: int, t: int, stage: np.ndarray, blocks: Movable, delta: np.ndarray) -> None:
    """Into ``delta`` (rows s, t; columns received, sent): what moving b from stage s to t adds to the two stages."""
    home, cost, receiver_start, receivers = blocks.home, blocks.cost, blocks.receiver_start, blocks.receivers
    touch_start, touch = blocks.touch_start, blocks.touch
    delta[:] = 0.0
    for e in range(touch_start[b], touch_start[b + 1]):
        x = touch[e]
        c = cost[x]
        in_s, in_t, elsewhere = False, False, False  # where receivers other than b are
        for i in range(receiver_start[x], receiver_start[x + 1]):
            r = receivers[i]
            if r == b:
                continue
            if stage[r] == s:
                in_s = True
            elif stage[r] == t:
                in_t = True
            else:
                elsewhere = True
        if home[x] == b:
            if in_t or elsewhere:
                delta[0, 1] -= c
            if in_s or elsewhere:
                delta[1, 1] += c
            if in_t:
                delta[1, 0] -= c
            if in_s:
                delta[0, 0] += c
            continue
        h = stage[home[x]]
        if h == s:
            if not (in_t or elsewhere):
                delta[0, 1] += c
        elif not in_s:
            delta[0, 0] -= c
        if h == t:
            if not (in_s or elsewhere):
                delta[1, 1] -= c
        elif not in_t:
            delta[1, 0] += c


@kernel()
def _load(compute: float, received: float, sent: float, overlap: bool, scale: float) -> float:
    r, s = received * scale, sent * scale
    return max(compute, r, s) if overlap else compute + r + s


@kernel()
def improve(
    stage: np.ndarray,
    totals: np.ndarray,  # [stages, 4] computing, receiving, sending, memory
    kind: np.ndarray,  # [stages]
    blocks: Movable,
    farthest: int,
    passes: int,
    least: float,
) -> int:
    """Move single blocks while that lowers the larger of two loads by more than ``least``; how many moves were made.

    ``farthest``: how many stages away a block may go in one move.
    """
    times, memory, pays, room, overlap = blocks.times, blocks.memory, blocks.pays, blocks.room, blocks.overlap
    before_start, before, after_start, after = blocks.before_start, blocks.before, blocks.after_start, blocks.after
    n = len(stage)
    stages = len(kind)
    delta = np.zeros((2, 2))
    made = 0
    for _ in range(passes):
        changed = 0
        for b in range(n):
            s = stage[b]
            first, last = max(0, s - farthest), min(stages - 1, s + farthest)
            if blocks.ordered:
                for e in range(before_start[b], before_start[b + 1]):
                    first = max(first, stage[before[e]])
                for e in range(after_start[b], after_start[b + 1]):
                    last = min(last, stage[after[e]])
            if first >= last:
                continue
            here = _load(totals[s, 0], totals[s, 1], totals[s, 2], overlap, pays[kind[s]])
            best, gain = -1, least
            for t in range(first, last + 1):
                if t == s or not np.isfinite(times[b, kind[t]]):
                    continue
                there = _load(totals[t, 0], totals[t, 1], totals[t, 2], overlap, pays[kind[t]])
                if totals[t, 3] + memory[b] > room[kind[t]] or totals[t, 0] + times[b, kind[t]] >= max(here, there):
                    continue
                _change(b, s, t, stage, blocks, delta)
                new_here = _load(
                    totals[s, 0] - times[b, kind[s]], totals[s, 1] + delta[0, 0], totals[s, 2] + delta[0, 1],
                    overlap, pays[kind[s]],
                )  # fmt: skip
                new_there = _load(
                    totals[t, 0] + times[b, kind[t]], totals[t, 1] + delta[1, 0], totals[t, 2] + delta[1, 1],
                    overlap, pays[kind[t]],
                )  # fmt: skip
                won = max(here, there) - max(new_here, new_there)
                if won > gain:
                    best, gain = t, won
            if best >= 0:
                t = best
                _change(b, s, t, stage, blocks, delta)
                _apply(b, s, t, stage, totals, kind, blocks, delta)
                changed += 1
        made += changed
        if changed == 0:
            break
    return made


@kernel()
def _apply(
    b: int, s: int, t: int, stage: np.ndarray, totals: np.ndarray, kind: np.ndarray, blocks: Movable, delta: np.ndarray
) -> None:
    times, memory = blocks.times, blocks.memory
    totals[s, 0] -= times[b, kind[s]]
    totals[t, 0] += times[b, kind[t]]
    totals[s, 3] -= memory[b]
    totals[t, 3] += memory[b]
    for c in range(2):
        totals[s, 1 + c] += delta[0, c]
        totals[t, 1 + c] += delta[1, c]
    stage[b] = t


@kernel()
def _in_order(b: int, stage: np.ndarray, blocks: Movable) -> bool:
    before_start, before, after_start, after = blocks.before_start, blocks.before, blocks.after_start, blocks.after
    for e in range(before_start[b], before_start[b + 1]):
        if stage[before[e]] > stage[b]:
            return False
    for e in range(after_start[b], after_start[b + 1]):  # noqa: SIM110 - compiled code has no generators
        if stage[after[e]] < stage[b]:
            return False
    return True


@kernel()
def swap(stage: np.ndarray, totals: np.ndarray, kind: np.ndarray, blocks: Movable, farthest: int, least: float) -> int:
    """Exchange blocks of the most loaded stage with blocks of others while that lowers the larger load of the two."""
    times, memory, pays, room, overlap = blocks.times, blocks.memory, blocks.pays, blocks.room, blocks.overlap
    n, stages = len(stage), len(kind)
    delta = np.zeros((2, 2))
    made = 0
    while True:
        s, here = 0, -1.0
        for i in range(stages):
            load = _load(totals[i, 0], totals[i, 1], totals[i, 2], overlap, pays[kind[i]])
            if load > here:
                s, here = i, load
        found = False
        for b in range(n):
            if stage[b] != s:
                continue
            for d in range(n):
                t = stage[d]
                if t == s or abs(t - s) > farthest or stage[b] != s:
                    continue
                if not (np.isfinite(times[b, kind[t]]) and np.isfinite(times[d, kind[s]])):
                    continue
                if totals[t, 3] + memory[b] - memory[d] > room[kind[t]]:
                    continue
                if totals[s, 3] + memory[d] - memory[b] > room[kind[s]]:
                    continue
                if totals[t, 0] + times[b, kind[t]] - times[d, kind[t]] >= here:
                    continue
                _change(b, s, t, stage, blocks, delta)
                _apply(b, s, t, stage, totals, kind, blocks, delta)
                _change(d, t, s, stage, blocks, delta)
                _apply(d, t, s, stage, totals, kind, blocks, delta)
                new_s = _load(totals[s, 0], totals[s, 1], totals[s, 2], overlap, pays[kind[s]])
                new_t = _load(totals[t, 0], totals[t, 1], totals[t, 2], overlap, pays[kind[t]])
                fits = not blocks.ordered or (_in_order(b, stage, blocks) and _in_order(d, stage, blocks))
                if fits and max(new_s, new_t) < here - least:
                    made += 1
                    found = True
                    break
                _change(d, s, t, stage, blocks, delta)
                _apply(d, s, t, stage, totals, kind, blocks, delta)
                _change(b, t, s, stage, blocks, delta)
                _apply(b, t, s, stage, totals, kind, blocks, delta)
            if found:
                break
        if not found:
            return made
