"""Compiled recurrences over cuts, devices and micro-batches in flight, from the last stage to the first.

``least_in_flight``: for a limit on every stage's seconds, the least sum of shares with which the rest from a cut can
be done on k devices. Holding less is never worse, so one number per (cut, devices) decides whether the limit can be
kept.

``least_seconds``: for a limit, the least value per (cut, devices, shares after) of v(stage) = max(repeats · t +
closing, t + v(stages after)). With ``repeats`` 1 and no closing seconds that is the sum of the stages; with
``repeats`` = m it is what no schedule of m micro-batches can undercut: the stage's own work, or filling and draining
it and then the same of the stages after it.
"""

from __future__ import annotations

import numpy as np

from shardwright.jit import kernel
from shardwright.search.joint.problem import Candidates

NEVER = np.int64(2**40)


@kernel()
def least_in_flight(
    cuts: int, devices: int, rows: Candidates, times: np.ndarray, limit: float, far: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Per (cut, devices used): the least sum of shares, and the candidate that begins there (-1: none)."""
    least = np.full((cuts, devices + 1), NEVER)
    chosen = np.full((cuts, devices + 1), np.int64(-1))
    least[cuts - 1, 0] = 0
    for c in range(len(rows.start)):
        first, beyond = rows.first_step[c], rows.first_step[c + 1]
        if times[first] > limit:
            continue
        start, end, own, share, align = rows.start[c], rows.end[c], rows.devices[c], rows.share[c], rows.align[c]
        near = rows.far_in[c] == 0.0 and rows.far_out[c] == 0.0
        most = _room(rows.holds, times, first, beyond, 0.0, limit, share)
        for after in range(rows.low[c], min(devices, rows.high[c]) - own + 1):
            shares = least[end, after]
            if shares >= NEVER or after % align:
                continue
            room = most
            if not near and (far[after] or far[after + own]):
                more = rows.far_out[c] * far[after] + rows.far_in[c] * far[after + own]
                room = _room(rows.holds, times, first, beyond, more, limit, share)
            if shares <= room and shares + share < least[start, after + own]:
                least[start, after + own] = shares + share
                chosen[start, after + own] = c
    return least, chosen


@kernel()
def _room(holds: np.ndarray, times: np.ndarray, first: int, beyond: int, more: float, limit: float, share: int) -> int:
    """The largest sum of shares after a stage with which it keeps the limit; negative if none."""
    room = -1
    for step in range(first, beyond):
        if times[step] + more > limit:
            break
        room = (holds[step] - 1) * share
    return room


@kernel()
def least_seconds(
    cuts: int,
    devices: int,
    most_shares: int,
    rows: Candidates,
    times: np.ndarray,
    limit: float,
    repeats: float,
    closing: np.ndarray,
    far: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Per (cut, devices used, shares used): the least value, and the step that begins there (-1: none)."""
    value = np.full((cuts, devices + 1, most_shares + 1), np.inf)
    chosen = np.full((cuts, devices + 1, most_shares + 1), np.int64(-1))
    value[cuts - 1, 0, 0] = 0.0
    for c in range(len(rows.start)):
        first, beyond = rows.first_step[c], rows.first_step[c + 1]
        if times[first] > limit:
            continue
        start, end, own, share, align = rows.start[c], rows.end[c], rows.devices[c], rows.share[c], rows.align[c]
        for after in range(rows.low[c], min(devices, rows.high[c]) - own + 1):
            if after % align:
                continue
            more = 0.0
            if far[after]:
                more += rows.far_out[c]
            if far[after + own]:
                more += rows.far_in[c]
            step = first
            for shares in range(most_shares - share + 1):
                later = value[end, after, shares]
                if later == np.inf:
                    continue
                held = 1 + (shares + share - 1) // share
                while step < beyond and rows.holds[step] < held:
                    step += 1
                if step == beyond:
                    break
                t = times[step] + more
                if t > limit:
                    break
                v = max(repeats * t + closing[step], t + later)
                if v < value[start, after + own, shares + share]:
                    value[start, after + own, shares + share] = v
                    chosen[start, after + own, shares + share] = step
    return value, chosen


@kernel()
def least_step(
    cuts: int,
    devices: int,
    most_shares: int,
    rows: Candidates,
    microbatches: float,
    closing: np.ndarray,
    far: np.ndarray,
) -> float:
    """What no schedule of any pipeline undercuts, by the candidates' bounds.

    ``busy`` is ``least_seconds`` without closing: m t, or t and then the same of the stages after. With closing a stage
    takes m t + closing; or t and ``busy`` of those after it; or its first forward pass, a third of t, and then all that
    those after it take with their closing, which runs beside this stage's last backward pass. Each of both tables is the
    least over all pipelines by itself, so no pipeline is below.
    """
    busy = np.full((cuts, devices + 1, most_shares + 1), np.inf)
    whole = np.full((cuts, devices + 1, most_shares + 1), np.inf)
    busy[cuts - 1, 0, 0] = 0.0
    whole[cuts - 1, 0, 0] = 0.0
    for c in range(len(rows.start)):
        first, beyond = rows.first_step[c], rows.first_step[c + 1]
        start, end, own, share, align = rows.start[c], rows.end[c], rows.devices[c], rows.share[c], rows.align[c]
        for after in range(rows.low[c], min(devices, rows.high[c]) - own + 1):
            if after % align:
                continue
            more = rows.far_out[c] * far[after] + rows.far_in[c] * far[after + own]
            step = first
            for shares in range(most_shares - share + 1):
                if busy[end, after, shares] == np.inf:
                    continue
                held = 1 + (shares + share - 1) // share
                while step < beyond and rows.holds[step] < held:
                    step += 1
                if step == beyond:
                    break
                t = rows.bound[step] + more
                alone, drained = microbatches * t, t + busy[end, after, shares]
                closed = max(alone + closing[step], drained, t / 3.0 + whole[end, after, shares])
                busy[start, after + own, shares + share] = min(
                    busy[start, after + own, shares + share], max(alone, drained)
                )
                whole[start, after + own, shares + share] = min(whole[start, after + own, shares + share], closed)
    return whole[0].min()


@kernel()
def least_through(
    cuts: int, devices: int, rows: Candidates, times: np.ndarray, limit: float, far: np.ndarray, value: np.ndarray
) -> np.ndarray:
    """Per step: the least sum of a pipeline that contains it and keeps the limit; ``value`` is ``least_seconds``' of
    repeats 1.

    The same recurrence the other way: what the stages before a cut need at least, given the devices and shares after
    it.
    """
    most_shares = value.shape[2] - 1
    before = np.full((cuts, devices + 1, most_shares + 1), np.inf)
    before[0] = 0.0
    through = np.full(len(times), np.inf)
    for c in range(len(rows.start) - 1, -1, -1):
        first, beyond = rows.first_step[c], rows.first_step[c + 1]
        start, end, own, share, align = rows.start[c], rows.end[c], rows.devices[c], rows.share[c], rows.align[c]
        for after in range(rows.low[c], min(devices, rows.high[c]) - own + 1):
            if after % align:
                continue
            more = 0.0
            if far[after]:
                more += rows.far_out[c]
            if far[after + own]:
                more += rows.far_in[c]
            step = first
            for shares in range(most_shares - share + 1):
                earlier = before[start, after + own, shares + share]
                held = 1 + (shares + share - 1) // share
                while step < beyond and rows.holds[step] < held:
                    step += 1
                if step == beyond:
                    break
                t = times[step] + more
                if t > limit:
                    break
                if earlier + t < before[end, after, shares]:
                    before[end, after, shares] = earlier + t
                total = earlier + t + value[end, after, shares]
                if total < through[step]:
                    through[step] = total
    return through


@kernel()
def last_backwards(seconds: np.ndarray, microbatches: int, warm: np.ndarray) -> np.ndarray:
    """When each stage of a chain ends its last backward pass; a pass forward takes a third of a stage's ``seconds``.

    A stage runs ``warm`` forward passes, then one backward and one forward in turn: 1F1B where ``warm`` are the stages
    from it to the end, GPipe where it is all micro-batches.
    """
    stages = len(seconds)
    ready = np.zeros((2, stages + 2, microbatches))  # forward and backward passes, a row of zeros around them
    done = np.zeros((2, stages), dtype=np.int64)
    clock = np.zeros(stages)
    left = 2 * stages * microbatches
    while left:
        for k in range(2 * stages):
            s = k if k < stages else 2 * stages - 1 - k
            while True:
                f, b = done[0, s], done[1, s]
                if f < microbatches and (f < warm[s] or b > f - warm[s]):
                    if s > 0 and done[0, s - 1] <= f:
                        break
                    clock[s] = max(clock[s], ready[0, s, f]) + seconds[s] / 3.0
                    ready[0, s + 1, f] = clock[s]
                    done[0, s] += 1
                elif b < microbatches:
                    if s < stages - 1 and done[1, s + 1] <= b:
                        break
                    clock[s] = max(clock[s], ready[1, s + 2, b]) + 2.0 * seconds[s] / 3.0
                    ready[1, s + 1, b] = clock[s]
                    done[1, s] += 1
                else:
                    break
                left -= 1
    return clock
