"""Reductions that keep the optimum, memory included; each works on a `Workspace` and says how many times it applied.

Forbidden pairs are followed through the graph (arc consistency); an option is dropped when another is never dearer next
to any neighbour and never uses more memory at any time (dead-end elimination, Goldstein 1994); a node whose option follows
from a neighbour's is absorbed by it, usage and all; a node without usage and with at most two neighbours is minimised
away. In the contest's problems nine nodes of ten are determined by another one.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from shardwright.errors import Infeasible
from shardwright.search.choose.problem import Problem
from shardwright.search.choose.workspace import Back, Workspace

LARGEST_TABLE = 40_000
GLANCE = 8  # options of a neighbour beside which two options are compared before all are


def reduce_problem(problem: Problem) -> tuple[Problem, Back]:
    """All reductions until none applies: the smaller problem, and how to translate its choices back.

    >>> from shardwright.search.choose.problem import Edge
    >>> path = Problem([np.zeros(2)] * 3, [Edge(0, 1, 1 - np.eye(2)), Edge(1, 2, 1 - np.eye(2))])
    >>> smaller, back = reduce_problem(path)
    >>> len(smaller.costs), len(set(back(np.zeros(1, dtype=int)).tolist()))  # one node left; all three choose alike
    (1, 1)
    """
    work = Workspace(problem)
    propagate_forbidden(work)
    gather_forced(work)
    while contract_determined(work) + drop_dominated(work) + contract_low_degree(work) + gather_forced(work):
        propagate_forbidden(work)
    return work.problem(), work.back


def propagate_forbidden(work: Workspace) -> int:
    """Drop options that no option of some neighbour goes with, until every option has support everywhere."""
    keep = {node: np.isfinite(work.costs[node]) for node in work.nodes()}
    queue = deque(keep)
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        mask = keep[node]
        everything = mask.all()
        for other, matrix in work.adjacent[node].items():
            allowed = work.finite(matrix)
            supported = (allowed if everything else allowed[mask]).any(axis=0)
            if not supported.all():
                narrower = keep[other] & supported
                if narrower.sum() < keep[other].sum():
                    keep[other] = narrower
                    if other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    changed = 0
    for node, mask in keep.items():
        changed += int(not mask.all())
        work.keep(node, mask)
    return changed


def gather_forced(work: Workspace) -> int:
    """Absorb every node with one option left into one node that carries all constant costs and usages."""
    forced = [node for node in work.nodes() if len(work.costs[node]) == 1]
    if len(forced) < 2 and not (forced and work.adjacent[forced[0]]):
        return 0
    sink = forced[0]
    for node in forced:
        for other, matrix in list(work.adjacent[node].items()):
            del work.adjacent[other][node], work.adjacent[node][other]
            work.costs[other] = work.costs[other] + matrix[0]
    for node in forced[1:]:
        work.absorb(node, sink, np.zeros(1, dtype=np.int64))
    return len(forced)


def contract_determined(work: Workspace) -> int:
    """Absorb nodes whose option follows from a neighbour's: one allowed option, or one that is best in every respect."""
    changed = 0
    queue = deque(sorted(work.nodes(), key=lambda node: len(work.adjacent[node])))
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        if not work.alive[node]:
            continue
        target = _determining_neighbour(work, node)
        if target is None:
            continue
        around = list(work.adjacent[node])
        other, follows = target
        work.absorb(node, other, follows)
        changed += 1
        for next_one in (other, *around):
            if next_one not in waiting and next_one != node:
                waiting.add(next_one)
                queue.append(next_one)
    return changed


def _determining_neighbour(work: Workspace, node: int) -> tuple[int, np.ndarray] | None:
    best: tuple[tuple[bool, int, int], int, np.ndarray] | None = None
    own = set(work.adjacent[node])
    for other, matrix in work.adjacent[node].items():
        allowed = work.finite(matrix)
        counts = allowed.sum(axis=0)
        if (counts == 1).all():
            follows = allowed.argmax(axis=0)
        elif len(own) == 1 and not work.usages[node]:
            follows = (work.costs[node][:, None] + matrix).argmin(axis=0)
        else:
            continue
        fresh = len(own) - 1 - len(own & work.adjacent[other].keys())
        rank = (fresh > 0, matrix.shape[1], fresh)
        if best is None or rank < best[0]:
            best = (rank, other, follows)
    return None if best is None else best[1:]


def contract_low_degree(work: Workspace) -> int:
    """Minimise away nodes without usage and at most two neighbours, where the table they leave stays small."""
    changed = 0
    queue = deque(work.nodes())
    while queue:
        node = queue.popleft()
        around = list(work.adjacent[node])
        if not work.alive[node] or work.usages[node] or not 1 <= len(around) <= 2:
            continue
        if len(around) == 2 and len(work.costs[around[0]]) * len(work.costs[around[1]]) > LARGEST_TABLE:
            continue
        work.eliminate(node)
        changed += 1
        queue.extend(around)
    return changed


def drop_dominated(work: Workspace) -> int:
    """Drop options for which another one is as cheap beside every neighbour's option and uses no more at any time."""
    changed = 0
    queue = deque(sorted(work.changed & set(work.nodes())))
    work.changed.clear()
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        if len(work.costs[node]) > 1:
            mask = _undominated(work, node)
            if not mask.all():
                work.keep(node, mask)
                changed += 1
                for other in work.adjacent[node]:
                    if other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    return changed


def _undominated(work: Workspace, node: int) -> np.ndarray:
    # Equal nodes of equal layers have the same arrays and the same order of events in time: compared once.
    matrices = list(work.adjacent[node].values())
    entries = work.usages[node]
    moments = {moment: rank for rank, moment in enumerate(sorted({moment for span in entries for moment in span}))}
    usages = sorted((moments[start], moments[stop], id(amounts)) for (start, stop), amounts in entries.items())
    key = ("undominated", id(work.costs[node]), tuple(sorted(map(id, matrices))), tuple(usages))
    inputs = (work.costs[node], matrices, list(entries.values()))
    return work.once(key, inputs, lambda: _compare_options(work, node))


def _compare_options(work: Workspace, node: int) -> np.ndarray:
    from shardwright.search.choose.dominance import add_worst_difference, forbid_larger_usage, undominated

    costs = work.costs[node]
    excess = costs[None, :] - costs[:, None]
    profile = usage_profile(work, node)
    if profile is not None:
        forbid_larger_usage(profile, excess)
    matrices = list(work.adjacent[node].values())
    if sum(matrix.shape[1] for matrix in matrices) > 4 * GLANCE * len(matrices):
        # Most pairs differ beside almost any option of the neighbours: a few of those rule them out.
        at_least = excess.copy()
        for matrix in matrices:
            add_worst_difference(np.ascontiguousarray(matrix[:, :: max(1, matrix.shape[1] // GLANCE)]), at_least)
        excess[at_least > 0.0] = np.inf
    for matrix in matrices:
        add_worst_difference(matrix, excess)
    return undominated(excess)


def usage_profile(work: Workspace, node: int) -> np.ndarray | None:
    """What each option uses at each of the node's own moments of change (moments by options)."""
    entries = work.usages[node]
    if not entries:
        return None
    times = np.unique(np.array(list(entries)).ravel())
    change = np.zeros((len(times) + 1, len(work.costs[node])))
    for (start, stop), amounts in entries.items():
        change[np.searchsorted(times, start)] += amounts
        change[np.searchsorted(times, stop)] -= amounts
    return np.cumsum(change, axis=0)


def check_peak(problem: Problem) -> None:
    """Refuse a problem whose smallest conceivable usage already breaks the limit, naming the time.

    Example: ``check_peak(problem)`` raises `Infeasible` or returns nothing.
    """
    if not problem.limited:
        return
    least = [np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.costs]
    change: dict[int, float] = {}
    for node, start, stop, amounts in problem.usages:
        smallest = float((amounts + least[node]).min())
        change[start] = change.get(start, 0.0) + smallest
        change[stop] = change.get(stop, 0.0) - smallest
    usage = 0.0
    for moment in sorted(change):
        usage += change[moment]
        if problem.usage_limit is not None and usage > problem.usage_limit * (1 + 1e-12):
            raise Infeasible(
                f"At time {moment} of {problem.name} every choice uses at least {usage:.12g}, above the limit of "
                f"{problem.usage_limit:.12g}.",
                "Raise the limit.",
            )
