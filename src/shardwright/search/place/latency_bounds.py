"""Lower bounds on latency: what one path alone already costs.

Nodes on a path run one after the other. On an accelerator a contiguous subgraph holds a consecutive piece of the path, and
every change of place is paid on both sides; memory says how long a piece can be, and the accelerators how many pieces
there are; edges that skip along the path are paid like those of the path. The cheapest way to cut the path into pieces, by
dynamic programming, is therefore below every placement's latency. Paths are chosen by time alone and by mixtures of time,
memory and transfer cost; the best bound counts.
"""

from __future__ import annotations

import numpy as np

from shardwright.jit import kernel
from shardwright.search.place._graphs import critical_path_kernel, depth_order_kernel, rows
from shardwright.search.place.problem import Workload


def critical_path(workload: Workload) -> float:
    """No latency is below this: the heaviest path with every node on its fastest device and free transfers."""
    start, target, order = _graph(workload)
    return float(critical_path_kernel(order, start, target, _fastest(workload)).max(initial=0.0))


def path_bound(workload: Workload, subgraphs: int = 1) -> float:
    """The best bound of one path cut into pieces that fit, over a family of heavy paths."""
    accelerators = [kind for kind in workload.kinds if not kind.host and kind.count > 0]
    if workload.nodes == 0:
        return 0.0
    start, target, order = _graph(workload)
    hosts = [k for k, kind in enumerate(workload.kinds) if kind.host and kind.count > 0]
    own = [k for k, kind in enumerate(workload.kinds) if not kind.host and kind.count > 0]
    host_time = workload.times[:, hosts].min(axis=1) if hosts else np.full(workload.nodes, np.inf)
    device_time = workload.times[:, own].min(axis=1) if own else np.full(workload.nodes, np.inf)
    room = max((kind.room for kind in accelerators), default=0.0) * (1 + 1e-9)
    pieces = sum(kind.count for kind in accelerators) * subgraphs
    transfer = workload.transfer * min((kind.pays for kind in accelerators), default=0.0)
    class_memory = np.bincount(workload.classes, weights=workload.memory)
    share = class_memory[workload.classes] / np.bincount(workload.classes)[workload.classes]
    fastest = _fastest(workload)
    best = 0.0
    for memory_weight in (0.0, 0.1, 0.3, 1.0, 3.0, 30.0):
        for transfer_weight in (0.0, 0.1, 1.0):
            weight = fastest / max(fastest.sum(), 1e-300)
            weight = weight + memory_weight * share / max(share.sum(), 1e-300)
            weight = weight + transfer_weight * transfer / max(transfer.sum(), 1e-300)
            length = critical_path_kernel(order, start, target, weight)
            path = _heaviest_path(length, start, target)
            # A class lies on one device: its whole memory counts where the path first meets it.
            _, first = np.unique(workload.classes[path], return_index=True)
            held = np.zeros(len(path))
            held[first] = class_memory[workload.classes[path[first]]]
            low, high = (
                _spans(workload.classes[path]) if subgraphs == 1 else (np.arange(len(path)), np.arange(len(path)))
            )
            links = _links(workload, path)
            bound = _cheapest_pieces(
                host_time[path], device_time[path], held, transfer[path], *links, low, high, room, pieces
            )
            if np.isfinite(bound):
                best = max(best, bound)
    return best


def _graph(workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start, target = rows(workload.nodes, workload.edges[:, 0], workload.edges[:, 1])
    return start, target, depth_order_kernel(workload.nodes, start, target)


def _fastest(workload: Workload) -> np.ndarray:
    return workload.times[:, [kind.count > 0 for kind in workload.kinds]].min(axis=1)


def _heaviest_path(length: np.ndarray, start: np.ndarray, target: np.ndarray) -> np.ndarray:
    path = [int(np.argmax(length))]
    while start[path[-1]] < start[path[-1] + 1]:
        successors = target[start[path[-1]] : start[path[-1] + 1]]
        path.append(int(successors[np.argmax(length[successors])]))
    return np.array(path)


def _links(workload: Workload, path: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The edges between nodes of the path, by position: the last successor of each, and the predecessors of each."""
    position = np.full(workload.nodes, -1)
    position[path] = np.arange(len(path))
    ends = position[workload.edges]
    ends = ends[(ends >= 0).all(axis=1)]
    last = np.full(len(path), -1, dtype=np.int64)
    np.maximum.at(last, ends[:, 0], ends[:, 1])
    return last, *rows(len(path), ends[:, 1], ends[:, 0])


def _spans(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last position on the path of each position's class: one subgraph per device must hold all of them."""
    _, first, number = np.unique(classes, return_index=True, return_inverse=True)
    last = np.zeros(len(first), dtype=np.int64)
    last[number] = np.arange(len(classes))
    return first[number].astype(np.int64), last[number]


@kernel()
def _cheapest_pieces(
    host_time: np.ndarray,
    device_time: np.ndarray,
    held: np.ndarray,
    transfer: np.ndarray,
    last: np.ndarray,
    before_start: np.ndarray,
    before: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    room: float,
    pieces: int,
) -> float:
    """Smallest total of a path cut into pieces on accelerators (at most ``pieces``, each within ``room``) and hosts.

    A piece that holds position p holds everything from ``low[p]`` to ``high[p]``.
    """
    n = len(held)
    pieces = min(pieces, n)
    best = np.full((n + 1, pieces + 1), np.inf)
    best[0, :] = 0.0
    arrived = np.full(n, -1, dtype=np.int64)
    for end in range(1, n + 1):
        for used in range(pieces + 1):
            best[end, used] = best[end - 1, used] + host_time[end - 1]
        time, memory, received, least, most = 0.0, 0.0, 0.0, n, -1
        for begin in range(end - 1, -1, -1):
            time += device_time[begin]
            if last[begin] >= end:
                time += transfer[begin]  # it leaves the piece
            if arrived[begin] == end:
                received -= transfer[begin]  # it is inside now
            for e in range(before_start[begin], before_start[begin + 1]):
                if arrived[before[e]] != end:
                    arrived[before[e]] = end
                    received += transfer[before[e]]
            memory += held[begin]
            least, most = min(least, low[begin]), max(most, high[begin])
            if memory > room or most >= end:
                break
            if least < begin:
                continue
            for used in range(1, pieces + 1):
                best[end, used] = min(best[end, used], best[begin, used - 1] + time + received)
    return best[n, pieces]
