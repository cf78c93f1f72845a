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
from shardwright.search.joint.problem import Candidates, Line

NEVER = np.int64(2**40)


@kernel(nogil=True)
def least_in_flight(line: Line, rows: Candidates, times: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Per (cut, devices used): the least sum of shares, and the candidate that begins there (-1: none)."""
    cuts, devices, far = line.cuts, line.devices, line.far
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


@kernel(nogil=True)
def _room(holds: np.ndarray, times: np.ndarray, first: int, beyond: int, more: float, limit: float, share: int) -> int:
    """The largest sum of shares after a stage with which it keeps the limit; negative if none."""
    room = -1
    for step in range(first, beyond):
        if times[step] + more > limit:
            break
        room = (holds[step] - 1) * share
    return room


@kernel(nogil=True)
def _step_that_holds(holds: np.ndarray, step: int, beyond: int, shares: int, share: int) -> int:
    """The first step from ``step`` on that holds what a stage must with such shares after it; ``beyond`` if none does."""
    held = 1 + (shares + share - 1) // share
    while step < beyond and holds[step] < held:
        step += 1
    return step


@kernel(nogil=True)
def least_seconds(
    line: Line,
    most_shares: int,
    rows: Candidates,
    times: np.ndarray,
    limit: float,
    repeats: float,
    closing: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Per (cut, devices used, shares used): the least value, and the step that begins there (-1: none)."""
    cuts, devices, far = line.cuts, line.devices, line.far
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
            more = rows.far_out[c] * far[after] + rows.far_in[c] * far[after + own]
            step = first
            for shares in range(most_shares - share + 1):
                later = value[end, after, shares]
                if later == np.inf:
                    continue
                step = _step_that_holds(rows.holds, step, beyond, shares, share)
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


ONE, ROUND, DOWN_AND_UP = 0, 1, 2
"""Stages of a group of devices: one; two, the blocks going round the groups twice; two, down and up again."""
FRONT = 24
"""Partial pipelines that are told apart per (cut, devices); of more, the likest become one that is as good as both."""


@kernel(nogil=True)
def least_step(
    line: Line,
    rows: Candidates,
    microbatches: int,
    most_held: int,
    beyond: float,
    needed: np.ndarray,
    groups: int,
) -> float:
    """What no order of passes of any pipeline undercuts, by the candidates' bounds; what holds ``most_held`` may hold more.

    A stage's forward pass, its gradient of inputs and that of weights take a third of its t each. Per (cut, devices used)
    the pipelines from there on, each by numbers of which none is worse in all: ``total``, the seconds of its stages;
    ``back``, from the first forward pass of the first of them to its last gradient of inputs; ``whole``, to the end of
    everything, closing too. A stage that holds h micro-batches takes ``_span`` of t, h and the total after it; or its
    forward pass, ``back`` of those after it and the gradients of its last micro-batch; or its forward pass and ``whole`` of
    those after it. At its last gradient of inputs it owes the weights of at most h. Nothing above ``beyond`` is followed.
    A fourth number is how many stages there are: one with k after it holds ``needed[k]`` micro-batches or more.

    ``groups``: each candidate is a group of devices that runs two stages, the first of which has half of its blocks or more:
    ``ROUND`` the groups twice (interleaved 1F1B, whole passes, a group's last one in its first stage), or ``DOWN_AND_UP``
    (ZB-V). Only the first stages fill the groups after them (of a V, not the first group's: its other end of the model may
    be the larger one), and only round the groups they drain after them.

    Nor is anything followed that leaves too few devices for what comes before it: were all of them busy all the time with
    what takes least, it would still take longer than ``beyond``.
    """
    cuts, devices, far, closing = line.cuts, line.devices, line.far, rows.closing
    before = _device_seconds(cuts, rows)
    fronts = np.full((cuts, devices + 1, FRONT, 4), np.inf)
    counts = np.zeros((cuts, devices + 1), dtype=np.int64)
    fronts[cuts - 1, 0, 0] = 0.0
    counts[cuts - 1, 0] = 1
    label = np.zeros(4)
    for c in range(len(rows.start)):
        start, end, own, align = rows.start[c], rows.end[c], rows.devices[c], rows.align[c]
        filled = 1.0 / 3.0 if groups == ONE else 0.0 if groups == DOWN_AND_UP and start == 0 else 1.0 / 6.0
        for after in range(rows.low[c], min(devices, rows.high[c]) - own + 1):
            if after % align or counts[end, after] == 0:
                continue
            if microbatches * before[start] * (1.0 - 1e-9) > beyond * (devices - after - own):
                break  # the more there are after it, the fewer are left
            more = rows.far_out[c] * far[after] + rows.far_in[c] * far[after + own]
            for step in range(rows.first_step[c], rows.first_step[c + 1]):
                t = rows.bound[step] + more
                held = microbatches if rows.holds[step] >= most_held else min(rows.holds[step], microbatches)
                for place in range(counts[end, after]):
                    later = fronts[end, after, place]
                    if held < needed[min(int(later[3]), len(needed) - 1)]:
                        continue
                    label[3] = later[3] + 1.0
                    if groups != ONE:
                        label[0] = label[3]
                        label[1] = max(microbatches * t, t / 2.0 + later[1]) if groups == ROUND else 0.0
                        label[2] = max(max(microbatches * t, label[1]) + closing[step], filled * t + later[2])
                    else:
                        away = later[0] * 2.0 / 3.0
                        waits = max(0.0, away - (held - 1) * t / 3.0)
                        slots = ((microbatches + held - 1) // held) * (t + away)
                        first_to_last = max(microbatches * t + waits - held * t / 3.0, slots - t / 3.0)
                        label[0], label[1] = t + later[0], max(first_to_last, t * 2.0 / 3.0 + later[1])
                        alone = max(_span(t, held, microbatches, away), slots, t + later[1])
                        label[2] = max(alone + closing[step], filled * t + later[2])
                    if label[2] <= beyond:
                        counts[start, after + own] = _kept(
                            fronts[start, after + own], counts[start, after + own], label
                        )
    least = beyond
    for used in range(devices + 1):
        for place in range(counts[0, used]):
            least = min(least, fronts[0, used, place, 2])
    return least


@kernel(nogil=True)
def _device_seconds(cuts: int, rows: Candidates) -> np.ndarray:
    """Per cut: seconds times devices that a micro-batch takes at least up to there, by the candidates' bounds."""
    least = np.full(cuts, np.inf)
    least[0] = 0.0
    for c in range(len(rows.start) - 1, -1, -1):  # by rising start
        own = rows.bound[rows.first_step[c]] * rows.devices[c]
        least[rows.end[c]] = min(least[rows.end[c]], least[rows.start[c]] + own)
    return least


@kernel(nogil=True)
def _kept(front: np.ndarray, count: int, label: np.ndarray) -> int:
    """A front with one more label, unless another is nowhere worse; how many there are then. A full one loses no pipeline:
    the new label and the one with the nearest total become one that is as good as both."""
    left = 0
    for place in range(count):
        one = front[place]
        if (one <= label).all():
            return count  # nothing was moved yet: what the label is worse than is worse than nothing before it
        if not (label <= one).all():
            front[left] = one
            left += 1
    if left == len(front):
        nearest = 0
        for place in range(left):
            if abs(front[place, 0] - label[0]) < abs(front[nearest, 0] - label[0]):
                nearest = place
        front[nearest] = np.minimum(front[nearest], label)
        return left
    front[left] = label
    return left + 1


@kernel(nogil=True)
def _span(t: float, held: int, microbatches: int, away: float) -> float:
    """Seconds between a stage's first and last pass, at least, in any order.

    A micro-batch is ``away`` between its forward pass and the gradient of its inputs. Before the first one is back only
    ``held`` forward passes can run, after the last has left only the gradients of ``held``: the rest of both times is idle
    (both where more micro-batches come than are held, so that the two do not overlap).
    """
    waits = max(0.0, away - (held - 1) * t / 3.0)
    if microbatches > held:
        waits += max(0.0, away - (held - 1) * 2.0 * t / 3.0)
    return microbatches * t + waits


@kernel(nogil=True)
def least_through(line: Line, rows: Candidates, times: np.ndarray, limit: float, value: np.ndarray) -> np.ndarray:
    """Per step: the least sum of a pipeline that contains it and keeps the limit; ``value`` is ``least_seconds``' of
    repeats 1.

    The same recurrence the other way: what the stages before a cut need at least, given the devices and shares after
    it.
    """
    cuts, devices, far = line.cuts, line.devices, line.far
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
            more = rows.far_out[c] * far[after] + rows.far_in[c] * far[after + own]
            step = first
            for shares in range(most_shares - share + 1):
                earlier = before[start, after + own, shares + share]
                step = _step_that_holds(rows.holds, step, beyond, shares, share)
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


@kernel(nogil=True)
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
