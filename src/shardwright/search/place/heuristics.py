"""Fast throughput placements of large graphs: little communication, good balance, in near-linear time.

After "Model parallelism with compiler and hardware support" (2019): a topological order is cut into stages (by filling
devices up to a limit, by the best of the cheap cuts, by recursive bisection); then blocks move and swap between stages
while the larger load falls. Several orders are tried (branch by branch, critical path first, as found) and the best
result is returned, with the bound on the work as its lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from shardwright.errors import Infeasible
from shardwright.search.place.bounds import progress_bound
from shardwright.search.place.lines import Cut, bisect, cut_best, fill_to_limit, line_up
from shardwright.search.place.measure import throughput_cost
from shardwright.search.place.problem import Placement, Rules, Stage, Workload
from shardwright.search.place.reductions import Blocks, distinct, reduce
from shardwright.search.solution import Solution

SWAP_LIMIT = 2_000  # exchanging is quadratic, so it is left out on larger graphs
HUGE = 300_000  # blocks beyond which the third order is not worth its time


def place_heuristically(workload: Workload, rules: Rules | None = None, *, passes: int = 8) -> Solution[Placement]:
    """A good contiguous placement in near-linear time.

    Example: ``place_heuristically(read_workload("gnmt.json")).gap`` is how far from the optimum it can be.
    """
    begun = time.perf_counter()
    rules = rules or Rules()
    blocks = reduce(workload)
    found = best_of(blocks, rules, candidates(blocks, rules), passes=passes)
    if found is None:
        raise Infeasible(
            "the heuristics found no placement that fits the devices' memory and support.",
            "Allow more devices or more memory, or try an exact solver.",
        )
    placement = Placement(blocks.back(found.stage_of), tuple(_devices(found.kinds)))
    cost = throughput_cost(workload, placement, rules)
    bound = min(work_bound(blocks, rules), cost)
    return Solution(placement, cost, bound, cost <= bound * (1 + 1e-9), time.perf_counter() - begun)


def work_bound(blocks: Blocks, rules: Rules) -> float:
    """No placement's throughput cost is below this: all work spread evenly over all devices."""
    passes = 2 if rules.separate_passes else 1
    return sum(progress_bound(blocks, rules, p) for p in range(passes))


def orders(blocks: Blocks) -> Iterator[np.ndarray]:
    """Topological orders worth cutting: as numbered, branch by branch, and critical path first (list scheduling)."""
    from shardwright.search.place import _graphs

    start, target = _graphs.rows(blocks.count, blocks.order[:, 0], blocks.order[:, 1])
    plain = np.arange(blocks.count)
    yield plain
    yield _graphs.depth_order_kernel(blocks.count, start, target)
    if blocks.count > HUGE:
        return
    weight = np.where(np.isfinite(blocks.times), blocks.times, 0.0).sum(axis=2).max(axis=1)
    urgency = _graphs.critical_path_kernel(plain, start, target, weight)
    yield _graphs.ready_order_kernel(blocks.count, start, target, urgency)


def candidates(blocks: Blocks, rules: Rules) -> Iterator[Cut]:
    """Cuts of every order: by filling up to a limit, by the best of allowed cuts, and by recursive bisection."""
    for order in orders(blocks):
        line = line_up(blocks, order)
        filled = fill_to_limit(line, rules)
        if filled is not None:
            yield filled[0]
            best = cut_best(line, rules, *filled)
            if best is not None:
                yield best
        yield bisect(line)


def best_of(blocks: Blocks, rules: Rules, cuts: Iterator[Cut], *, passes: int) -> Cut | None:
    """Improve every cut by moves and swaps, drop those that do not fit, and return the one of the smallest load."""
    best, value = None, np.inf
    for cut in cuts:
        if not supported(blocks, cut):
            continue
        improved, load = refine(blocks, cut, rules, passes=passes)
        if load < value and fits(blocks, improved):
            best, value = improved, load
    return best


def supported(blocks: Blocks, cut: Cut) -> bool:
    """Whether every block runs on its stage's kind of device."""
    return bool(np.isfinite(blocks.times.sum(axis=2)[np.arange(blocks.count), cut.kinds[cut.stage_of]]).all())


def fits(blocks: Blocks, cut: Cut) -> bool:
    """Whether every stage fits its device's memory."""
    held = np.bincount(cut.stage_of, weights=blocks.memory, minlength=len(cut.kinds))
    return bool((held <= np.array([kind.room for kind in blocks.kinds])[cut.kinds] * (1 + 1e-9)).all())


def refine(blocks: Blocks, cut: Cut, rules: Rules, *, passes: int = 8, ordered: bool = True) -> tuple[Cut, float]:
    """Moves and swaps until nothing improves (or ``passes`` walks over the blocks); the result and its largest load."""
    from shardwright.search.place import _graphs, _moves

    times, cost = blocks.times.sum(axis=2), blocks.cost.sum(axis=1)
    _, pays, room = _devices_of(blocks)
    stage_of = cut.stage_of.copy()
    totals = stage_totals(blocks, cut)
    sizes = np.diff(blocks.receiver_start)
    owners = np.concatenate([np.arange(len(blocks.home)), np.repeat(np.arange(len(blocks.home)), sizes)])
    touching = np.concatenate([blocks.home, blocks.receivers])
    movable = _moves.Movable(
        times, blocks.memory, pays, room, blocks.home, cost, blocks.receiver_start, blocks.receivers,
        *_graphs.rows(blocks.count, touching, owners),
        *_graphs.rows(blocks.count, blocks.order[:, 1], blocks.order[:, 0]),
        *_graphs.rows(blocks.count, blocks.order[:, 0], blocks.order[:, 1]),
        ordered, rules.overlap,
    )  # fmt: skip
    far = len(cut.kinds) if blocks.count <= SWAP_LIMIT else 1
    least = 1e-9 * max(1e-12, float(totals[:, :3].sum(axis=1).max(initial=0.0)))
    _moves.improve(stage_of, totals, cut.kinds, movable, far, passes, least)
    if passes and blocks.count <= SWAP_LIMIT:
        while _moves.swap(stage_of, totals, cut.kinds, movable, far, least):
            _moves.improve(stage_of, totals, cut.kinds, movable, far, passes, least)
    moved = totals[:, 1:3] * pays[cut.kinds][:, None]
    loads = np.maximum(totals[:, 0], moved.max(axis=1)) if rules.overlap else totals[:, 0] + moved.sum(axis=1)
    return Cut(stage_of, cut.kinds), float(loads.max(initial=0.0))


def stage_totals(blocks: Blocks, cut: Cut) -> np.ndarray:
    """Per stage: computing, receiving, sending (at factor 1) and memory."""
    stages = len(cut.kinds)
    times, cost = blocks.times.sum(axis=2), blocks.cost.sum(axis=1)
    totals = np.zeros((stages, 4))
    own = times[np.arange(blocks.count), cut.kinds[cut.stage_of]]
    totals[:, 0] = np.bincount(cut.stage_of, weights=own, minlength=stages)
    totals[:, 3] = np.bincount(cut.stage_of, weights=blocks.memory, minlength=stages)
    owners = np.repeat(np.arange(len(blocks.home)), np.diff(blocks.receiver_start))
    target, source = cut.stage_of[blocks.receivers], cut.stage_of[blocks.home]
    away = target != source[owners]
    arrivals = distinct(owners[away] * stages + target[away])
    np.add.at(totals[:, 1], arrivals % stages, cost[arrivals // stages])
    senders = distinct(owners[away])
    np.add.at(totals[:, 2], source[senders], cost[senders])
    return totals


def _devices_of(blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = np.array([kind.count for kind in blocks.kinds], dtype=np.int64)
    pays = np.array([kind.pays for kind in blocks.kinds])
    room = np.array([kind.room * (1 + 1e-9) for kind in blocks.kinds])
    return counts, pays, room


def _devices(kinds: np.ndarray) -> Iterator[Stage]:
    used: dict[int, int] = {}
    for kind in kinds.tolist():
        yield Stage(kind, (used.get(kind, 0),))
        used[kind] = used.get(kind, 0) + 1
