"""Cutting one topological order into stages: the fixed-order variant of the placement problem, and its fast forms.

``fill_to_limit`` bisects on the load limit and fills device after device; ``cut_best`` is a dynamic program over allowed
cut positions, exact along the order when all positions are allowed, and linear in the edges when only the cheapest cut
of each of a fixed number of buckets is; ``bisect`` halves the devices recursively, cutting cheaply near the balance point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwright.search.place.bounds import progress_bound
from shardwright.search.place.problem import Rules
from shardwright.search.place.reductions import Blocks

if TYPE_CHECKING:
    from shardwright.search.place._lines import Ordered

_BISECTIONS = 14
_MANY = 300_000  # blocks beyond which the limit is found to half as many digits
_VISITS = 12_000_000  # steps the dynamic program may take


@dataclass(frozen=True, eq=False)
class Cut:
    """Blocks cut into stages: the stage of every block and the device kind of every stage."""

    stage_of: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True, eq=False)
class Line:
    """One order of the blocks with what pricing its stages needs."""

    blocks: Blocks
    order: np.ndarray
    arrays: Ordered
    times: np.ndarray
    counts: np.ndarray
    pays: np.ndarray
    room: np.ndarray
    crossing: np.ndarray  # [positions] cost of the transfers a cut there separates

    def cut(self, ends: np.ndarray, kinds: np.ndarray) -> Cut:
        """The cut whose stages end at the given positions."""
        stage_of = np.empty(self.blocks.count, dtype=np.int64)
        stage_of[self.order] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        return Cut(stage_of, np.asarray(kinds, dtype=np.int64))


def line_up(blocks: Blocks, order: np.ndarray) -> Line:
    """Prepare one topological order for cutting."""
    from shardwright.search.place import _graphs, _lines

    position = np.empty(blocks.count, dtype=np.int64)
    position[order] = np.arange(blocks.count)
    transfers = len(blocks.home)
    owners = np.repeat(np.arange(transfers), np.diff(blocks.receiver_start))
    where, at, cost = position[blocks.receivers], position[blocks.home], blocks.cost.sum(axis=1)
    empty = np.zeros(0, dtype=np.int64)
    earliest = np.minimum.reduceat(where, blocks.receiver_start[:-1]) if transfers else empty
    latest = np.maximum.reduceat(where, blocks.receiver_start[:-1]) if transfers else empty
    steps = np.zeros(blocks.count + 2)
    np.add.at(steps, np.minimum(at, earliest) + 1, cost)
    np.add.at(steps, np.maximum(at, latest) + 1, -cost)
    out_start, out = _graphs.rows(blocks.count, blocks.home, np.arange(transfers))
    in_start, into = _graphs.rows(blocks.count, blocks.receivers, owners)
    return Line(
        blocks=blocks,
        order=order,
        arrays=_lines.Ordered(order, position, blocks.home, cost, earliest, latest, out_start, out, in_start, into),
        times=blocks.times.sum(axis=2),
        counts=np.array([kind.count for kind in blocks.kinds], dtype=np.int64),
        pays=np.array([kind.pays for kind in blocks.kinds]),
        room=np.array([kind.room * (1 + 1e-9) for kind in blocks.kinds]),
        crossing=np.cumsum(steps)[: blocks.count + 1],
    )


def fill_to_limit(line: Line, rules: Rules) -> tuple[Cut, float] | None:
    """Stages filled up to the smallest limit, found by bisection, that the devices can keep; and that limit."""
    from shardwright.search.place import _lines

    loads = _lines.Loads(line.times, line.blocks.memory, line.pays, line.room, rules.overlap)

    def attempt(limit: float) -> Cut | None:
        ends, kinds, stages = _lines.fill_stages(line.arrays, loads, line.counts, limit)
        return line.cut(ends[:stages], kinds[:stages]) if stages >= 0 else None

    low = progress_bound(line.blocks, Rules(overlap=rules.overlap))
    work = np.where(np.isfinite(line.times), line.times, 0.0).sum(axis=0).max()
    high = float(work + 2 * line.arrays.cost.sum() * max(1.0, line.pays.max(initial=0.0)))
    best = attempt(high)
    if best is None:
        return None
    trial = low * 1.02
    while trial < high:  # most answers lie close to the work bound: climb to the first feasible limit before bisecting
        found = attempt(trial)
        if found is not None:
            best, high = found, trial
            break
        low, trial = trial, trial * 1.4 + 1e-12
    for _ in range(_BISECTIONS if line.blocks.count <= _MANY else _BISECTIONS // 2):
        middle = (low + high) / 2
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best, high


def cut_best(line: Line, rules: Rules, known: Cut, limit: float) -> Cut | None:
    """The best cut along the line at cheap positions, or those of the ``known`` cut, with all loads up to ``limit``."""
    from shardwright.search.place import _lines
    from shardwright.search.place.contiguous import device_states

    states, moves, after = device_states(line.blocks, Rules())
    by_kind = np.full((len(states), len(line.counts)), -1, dtype=np.int64)
    by_kind[:, moves[:, 0]] = after
    places = np.union1d(_allowed_cuts(line), np.cumsum(np.bincount(known.stage_of)))
    best, origin, by = _lines.cut_at(
        line.arrays,
        _lines.Loads(line.times, line.blocks.memory, line.pays, line.room, rules.overlap),
        limit * (1 + 1e-9),
        places,
        by_kind,
    )
    state = int(np.argmin(best[-1]))
    if not np.isfinite(best[-1, state]):
        return None
    ends, kinds, place = [], [], len(places) - 1
    while place > 0:
        kind = int(by[place, state])
        ends.append(int(places[place]))
        kinds.append(kind)
        place, state = int(origin[place, state]), int(np.flatnonzero(by_kind[:, kind] == state)[0])
    return line.cut(np.array(ends[::-1], dtype=np.int64), np.array(kinds[::-1]))


def bisect(line: Line, slack: float = 0.1) -> Cut:
    """Recursive bisection: halve the devices, cut near the balance point where the least crosses."""
    kinds = np.repeat(np.arange(len(line.counts)), [0 if k.host else k.count for k in line.blocks.kinds])
    if len(kinds) == 0:
        kinds = np.repeat(np.arange(len(line.counts)), line.counts)
    weight = _weights(line, int(kinds[0]))
    ends = np.zeros(len(kinds), dtype=np.int64)
    ends[-1] = line.blocks.count
    pending = [(0, line.blocks.count, 0, len(kinds))]
    while pending:
        begin, end, first, last = pending.pop()
        if last - first == 1:
            continue
        half = (first + last) // 2
        total = weight[end] - weight[begin]
        target = weight[begin] + total * (half - first) / (last - first)
        margin = slack * total / (last - first)
        a, b = (int(x) for x in np.clip(np.searchsorted(weight, [target - margin, target + margin]), begin, end))
        middle = a + int(np.argmin(line.crossing[a : b + 1]))
        ends[half - 1] = middle
        pending += [(begin, middle, first, half), (middle, end, half, last)]
    return line.cut(ends, kinds)


def _allowed_cuts(line: Line) -> np.ndarray:
    """All positions where there are few, else the cheapest cut in each of equally heavy buckets."""
    n = line.blocks.count
    devices = max(1, int(line.counts.sum()))
    # Stages from every place walk over a device's share of the blocks, and meet as many places times device counts.
    states = int(np.prod(line.counts + 1))
    most = max(8 * devices, min(_VISITS * devices // max(1, n), int((_VISITS * devices / states) ** 0.5)))
    if n + 1 <= most:
        return np.arange(n + 1)
    bucket = np.minimum(_weights(line, 0) / max(_weights(line, 0)[-1], 1e-300) * most, most - 1).astype(np.int64)
    ranked = np.lexsort((line.crossing, bucket))
    cheapest = ranked[np.flatnonzero(np.diff(bucket[ranked], prepend=-1))]
    return np.unique(np.concatenate([[0, n], cheapest]))


def _weights(line: Line, kind: int) -> np.ndarray:
    finite = np.where(np.isfinite(line.times), line.times, 0.0)[:, kind]
    return np.concatenate([[0.0], np.cumsum(finite[line.order])])
