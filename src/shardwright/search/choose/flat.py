"""A choice problem as flat arrays, the form the compiled kernels read.

Options of all nodes lie one after the other; every edge goes from the lower to the higher node and keeps its matrix
in both orientations, so that either direction of a message streams through memory; equal matrices are stored once.
Usage entries are ranges of critical times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.search.choose.problem import Problem
from shardwright.search.choose.timeline import critical_times, ranges_in

UNLIMITED = 1e300  # finite, so that no price times it is no number


class Flat(NamedTuple):
    """Flat arrays of one problem; ``*_start`` arrays have one element more than there are items."""

    option_start: np.ndarray  # node -> first option
    cost: np.ndarray  # option -> cost
    edge_low: np.ndarray  # edge -> lower node
    edge_high: np.ndarray  # edge -> higher node
    matrix_start: np.ndarray  # edge -> where its matrix lies
    matrix: np.ndarray  # [low option, high option], row by row
    flipped: np.ndarray  # [high option, low option], row by row, same starts
    low_start: np.ndarray  # edge -> where its message to the lower node lies
    high_start: np.ndarray  # edge -> where its message to the higher node lies
    messages: int  # room for all messages of one direction pair
    up_start: np.ndarray  # node -> its edges to higher nodes
    up_edge: np.ndarray
    down_start: np.ndarray  # node -> its edges to lower nodes
    down_edge: np.ndarray
    near_start: np.ndarray  # node -> all its edges
    near_edge: np.ndarray
    usage_start: np.ndarray  # node -> its usage entries
    usage_first: np.ndarray  # entry -> first critical time
    usage_last: np.ndarray  # entry -> past its last critical time
    amount_start: np.ndarray  # entry -> where its amounts lie
    amount: np.ndarray
    limit: float
    times: np.ndarray


def flatten(problem: Problem, times: np.ndarray | None = None) -> Flat:
    """The flat form of a problem without loops or parallel edges (reduced problems have none).

    ``times`` keeps the critical times of a problem that this one is a restriction of.

    Example: ``flat = flatten(reduce_problem(problem)[0])``
    """
    sizes = problem.sizes
    option_start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    edges = sorted((min(e.first, e.second), max(e.first, e.second), n) for n, e in enumerate(problem.edges))
    matrix_start, pool, flipped_pool, places = [], [], [], {}
    filled = 0
    for low, _, number in edges:
        edge = problem.edges[number]
        matrix = np.ascontiguousarray(edge.costs if edge.first == low else edge.costs.T)
        key = (matrix.shape, matrix.tobytes())
        if key not in places:
            places[key] = filled
            filled += matrix.size
            pool.append(matrix.ravel())
            flipped_pool.append(matrix.T.ravel())
        matrix_start.append(places[key])
    lows = np.array([edge[0] for edge in edges], dtype=np.int64)
    highs = np.array([edge[1] for edge in edges], dtype=np.int64)
    room = np.empty(2 * len(edges), dtype=np.int64)
    room[0::2], room[1::2] = sizes[lows], sizes[highs]
    offsets = np.concatenate([[0], np.cumsum(room)]).astype(np.int64)
    up_start, up_edge = _group(lows, len(sizes))
    down_start, down_edge = _group(highs, len(sizes))
    near_start, near_order = _group(np.concatenate([lows, highs]), len(sizes))
    timeline = critical_times(problem) if times is None else ranges_in(problem, times)
    usage_start, usage_order = _group(np.array([u.node for u in problem.usages], dtype=np.int64), len(sizes))
    entries = [problem.usages[entry] for entry in usage_order.tolist()]
    lengths = np.array([len(entry.amounts) for entry in entries], dtype=np.int64)
    return Flat(
        option_start=option_start,
        cost=_joined(list(problem.costs)),
        edge_low=lows,
        edge_high=highs,
        matrix_start=np.array(matrix_start, dtype=np.int64),
        matrix=_joined(pool),
        flipped=_joined(flipped_pool),
        low_start=offsets[0:-1:2].copy(),
        high_start=offsets[1::2].copy(),
        messages=int(offsets[-1]),
        up_start=up_start,
        up_edge=up_edge,
        down_start=down_start,
        down_edge=down_edge,
        near_start=near_start,
        near_edge=near_order % max(1, len(edges)),
        usage_start=usage_start,
        usage_first=timeline.first[usage_order].astype(np.int64),
        usage_last=timeline.last[usage_order].astype(np.int64),
        amount_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        amount=_joined([entry.amounts for entry in entries]),
        limit=float(problem.usage_limit) if problem.usage_limit is not None else UNLIMITED,
        times=timeline.times if len(timeline.times) else np.zeros(1, dtype=np.int64),
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)


def _group(keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(keys, kind="stable").astype(np.int64)
    return np.searchsorted(keys[order], np.arange(count + 1)).astype(np.int64), order
