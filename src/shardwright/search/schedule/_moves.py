"""Local search on the orders of a schedule, compiled: simulated annealing over moves along the longest path.

The neighbourhood is that of job-shop scheduling (Nowicki and Smutnicki 1996): only an action on a longest path
through the schedule can shorten it by moving. From the end of the device with the longest span the path is followed
back, through the action before on the same device or the one elsewhere whose result was waited for. A place on it is
drawn; its action moves up a few places, or a later one is pulled into its place. What keeps micro-batches in order
and memory within its limit is timed anew and accepted by Metropolis's rule.
"""

from __future__ import annotations

import numpy as np

from shardwright.jit import copy, kernel
from shardwright.schedules._flat import F, FlatPipeline, I, Ints, run_orders
from shardwright.schedules.pipeline import Floats

GUIDE = 0.1
"""The mean span counts this much beside the measure: on a plateau of the longest span the others still shrink."""
WORST, UP = 0.8, 0.5
"""How often the worst device is the one to shorten, and an action moves up instead of a later one being pulled."""
NEAR, FAR = 3, 12
"""Places an action moves up, and from where one is pulled, at most."""


@kernel()
def _end(flat: FlatPipeline, numbers: Ints, starts: Floats, place: int) -> float:  # pragma: no cover - compiled
    kind, rest = divmod(numbers[place], flat.stages * flat.microbatches)
    return starts[place] + flat.seconds[kind, rest // flat.microbatches, rest % flat.microbatches]


@kernel()
def measure(  # pragma: no cover - compiled
    flat: FlatPipeline, numbers: Ints, begins: Ints, starts: Floats, makespan: bool
) -> tuple[float, float, int]:
    """The longest span (or the makespan), the mean span, and the device that is worst in it."""
    most, total, worst = -1.0, 0.0, 0
    first = np.inf
    for device in range(len(begins) - 1):
        if begins[device] < begins[device + 1]:
            begin, end = starts[begins[device]], _end(flat, numbers, starts, begins[device + 1] - 1)
            total += end - begin
            value = end if makespan else end - begin
            first = min(first, begin)
            if value > most:
                most, worst = value, device
    return most - (first if makespan else 0.0), total / (len(begins) - 1), worst


@kernel()
def _longest_path(  # pragma: no cover - compiled
    flat: FlatPipeline, numbers: Ints, begins: Ints, starts: Floats, where: Ints, device: int, path: Ints
) -> int:
    """The places of a longest path that ends with the device's last action, from there back; how many they are."""
    size, microbatches = flat.stages * flat.microbatches, flat.microbatches
    place, length = begins[device + 1] - 1, 0
    while place >= 0:
        path[length] = place
        length += 1
        kind, rest = divmod(numbers[place], size)
        stage, i = divmod(rest, microbatches)
        if place > begins[flat.device[stage]] and _end(flat, numbers, starts, place - 1) >= starts[place]:
            place -= 1
            continue
        begin = starts[place]
        place = -1
        if kind == F:
            for k in range(flat.source_at[stage], flat.source_at[stage + 1]):
                source = where[(F * flat.stages + flat.source[k]) * microbatches + i]
                if _end(flat, numbers, starts, source) + flat.source_hop[k] >= begin:
                    place = source
        elif kind == I:
            for k in range(flat.reader_at[stage], flat.reader_at[stage + 1]):
                source = where[(I * flat.stages + flat.reader[k]) * microbatches + i]
                if _end(flat, numbers, starts, source) + flat.reader_hop[k] >= begin:
                    place = source
    return length


@kernel()
def _pull(numbers: Ints, low: int, high: int) -> None:  # pragma: no cover - compiled
    """The action at ``high`` to ``low``, those between one place later."""
    moved = numbers[high]
    for place in range(high, low, -1):
        numbers[place] = numbers[place - 1]
    numbers[low] = moved


@kernel()
def _push(numbers: Ints, low: int, high: int) -> None:  # pragma: no cover - compiled
    """The inverse of ``_pull``."""
    moved = numbers[low]
    for place in range(low, high):
        numbers[place] = numbers[place + 1]
    numbers[high] = moved


@kernel()
def _legal(flat: FlatPipeline, numbers: Ints, begin: int, low: int, high: int, device: int) -> bool:  # pragma: no cover
    """Whether the action just pulled to ``low`` may pass those up to ``high``, and memory keeps its limit."""
    size, microbatches = flat.stages * flat.microbatches, flat.microbatches
    kind, rest = divmod(numbers[low], size)
    for place in range(low + 1, high + 1):
        other_kind, other = divmod(numbers[place], size)
        if other // microbatches == rest // microbatches and (
            other_kind == kind or (other == rest and other_kind < kind)
        ):
            return False
    held = 0.0
    for place in range(begin, high + 1):
        kind, rest = divmod(numbers[place], size)
        held += flat.memory[kind, rest // microbatches, rest % microbatches]
        if place >= low and held > flat.limit[device]:
            return False
    return True


@kernel()
def anneal(  # pragma: no cover - compiled
    flat: FlatPipeline,
    numbers: Ints,
    begins: Ints,
    rounds: int,
    temperature: float,
    target: float,
    makespan: bool,
    seed: int,
) -> float:
    """Improve ``numbers`` (F, I and W only) in place and return the best measure; stops early at ``target``."""
    np.random.seed(seed)
    total, devices = len(numbers), len(begins) - 1
    done = np.empty((4, flat.stages, flat.microbatches))
    starts, tried, path = np.empty(total), np.empty(total), np.empty(total, np.int64)
    where = np.empty(4 * flat.stages * flat.microbatches, np.int64)
    for place in range(total):
        where[numbers[place]] = place
    run_orders(flat, numbers, begins, done, starts)
    best, mean, worst = measure(flat, numbers, begins, starts, makespan)
    now = best + GUIDE * mean
    kept = numbers.copy()
    for number in range(rounds):
        if best <= target:
            break
        device = worst if np.random.random() < WORST else np.random.randint(devices)
        length = _longest_path(flat, numbers, begins, starts, where, device, path)
        place = path[np.random.randint(length)]
        device = flat.device[numbers[place] // flat.microbatches % flat.stages]
        if np.random.random() < UP:
            low, high = place - 1 - np.random.randint(NEAR), place
        else:
            low, high = place, place + 1 + np.random.randint(FAR)
        if low < begins[device] or high >= begins[device + 1]:
            continue
        _pull(numbers, low, high)
        accept = _legal(flat, numbers, begins[device], low, high, device)
        if accept and run_orders(flat, numbers, begins, done, tried) == total:
            cost, mean, next_worst = measure(flat, numbers, begins, tried, makespan)
            new = cost + GUIDE * mean
            cool = temperature * (1.0 - number / rounds)
            accept = new <= now or (cool > 0.0 and np.random.random() < np.exp((now - new) / cool))
        else:
            accept = False
        if not accept:
            _push(numbers, low, high)
            continue
        now, worst = new, next_worst
        starts, tried = tried, starts
        for k in range(low, high + 1):
            where[numbers[k]] = k
        if cost < best:
            best = cost
            copy(numbers, kept)
    copy(kept, numbers)
    return best
