"""Lower bounds on latency: what one path alone already costs.

Nodes on a path run one after the other. On an accelerator a contiguous subgraph holds a consecutive piece of the path, and
every change of place is paid on both sides; memory says how long a piece can be, and the accelerators how many pieces
there are; edges that skip along the path are paid like those of the path. A piece that holds an ancestor and a descendant
of a node beside the path holds that node too, its time and its memory. One that is left by a way beside the path holds
the way's first nodes, none or all of them, and sends what the last of these makes; one that is entered holds the last ones
and receives what comes before: of those choices that fit into memory the cheapest counts. The cheapest way to cut the path
into pieces, by dynamic programming, is therefore below every placement's latency. Paths are chosen by time alone and by
mixtures of time, memory and transfer cost; the best bound counts.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from shardwright.jit import kernel
from shardwright.search.place._graphs import critical_path_kernel, depth_order_kernel, rows
from shardwright.search.place.deadline import Deadline
from shardwright.search.place.problem import Workload


def critical_path(workload: Workload) -> float:
    """No latency is below this: the heaviest path with every node on its fastest device and free transfers."""
    start, target, order = _graph(workload)
    return float(critical_path_kernel(order, start, target, _fastest(workload)).max(initial=0.0))


def path_bound(workload: Workload, subgraphs: int, deadline: Deadline) -> float:
    """The best bound of one path cut into pieces that fit, over a family of heavy paths, as many as there is time for."""
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
    together = workload.classes if subgraphs == 1 else np.arange(workload.nodes)  # what no cut comes between
    class_memory = np.bincount(workload.classes, weights=workload.memory)
    share = class_memory[workload.classes] / np.bincount(workload.classes)[workload.classes]
    fastest = _fastest(workload)
    best = 0.0
    for memory_weight in (0.0, 0.1, 0.3, 1.0, 3.0, 30.0):
        for transfer_weight in (0.0, 0.1, 1.0):
            if deadline.passed:
                return best
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
            ways = _Ways(*_ways_beside(order, start, target, _positions(workload, path), transfer, together, len(path)))
            beside = _beside(workload, path, ways)
            routes = _routes(workload, path, ways, transfer, device_time, together)
            bound = _cheapest_pieces(
                _Along(host_time[path], device_time[path], held, transfer[path], *links, low, high),
                beside,
                routes,
                room,
                pieces,
                deadline.flag,
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


def _positions(workload: Workload, path: np.ndarray) -> np.ndarray:
    position = np.full(workload.nodes, -1, dtype=np.int64)
    position[path] = np.arange(len(path))
    return position


class _Ways(NamedTuple):
    """What lies beside a path: per node the last position above it and the first below it, per position the dearest way."""

    above: np.ndarray  # node -> position, or -1
    below: np.ndarray  # node -> position, or the number of nodes
    reach: np.ndarray  # position -> where its way comes back, or -1
    end: np.ndarray  # position -> the last node of that way
    via: np.ndarray  # node -> the node before it on its way, on the path or beside it


class _Along(NamedTuple):
    """A path by position. A piece that holds position p holds everything from ``low[p]`` to ``high[p]``."""

    host_time: np.ndarray
    device_time: np.ndarray
    held: np.ndarray  # bytes
    transfer: np.ndarray
    last: np.ndarray  # its last successor on the path, or -1
    before_start: np.ndarray  # its predecessors on the path
    before: np.ndarray
    low: np.ndarray
    high: np.ndarray


class _Routes(NamedTuple):
    """Ways beside a path, flat: where each leaves it and comes back, and for every cut of it what lies before that cut."""

    leaves: np.ndarray  # [ways] position
    returns: np.ndarray  # [ways] position
    start: np.ndarray  # [ways + 1] its cuts
    tensor: np.ndarray  # [cuts] what crosses, infinite where a class must stay together
    memory: np.ndarray  # [cuts] bytes of the nodes before it
    time: np.ndarray  # [cuts] their seconds


def _routes(
    workload: Workload,
    path: np.ndarray,
    ways: _Ways,
    transfer: np.ndarray,
    device_time: np.ndarray,
    together: np.ndarray,
) -> _Routes:
    """Memory counts only where no node of the class is on the path, which counts that of the whole class."""
    met = np.isin(workload.classes, workload.classes[path])
    leaves = np.flatnonzero(ways.reach >= 0)
    start, tensor, memory, time = [0], list[float](), list[float](), list[float]()
    for position in leaves.tolist():
        nodes = [int(ways.end[position])]
        while nodes[-1] != path[position]:
            nodes.append(int(ways.via[nodes[-1]]))
        nodes = [*reversed(nodes), int(path[ways.reach[position]])]
        held = seconds = 0.0
        for node, after in itertools.pairwise(nodes):
            if node != nodes[0]:
                held += 0.0 if met[node] else float(workload.memory[node])
                seconds += float(device_time[node])
            tensor.append(np.inf if together[node] == together[after] else float(transfer[node]))
            memory.append(held)
            time.append(seconds)
        start.append(len(tensor))
    flat = (np.array(values, dtype=float) for values in (tensor, memory, time))
    return _Routes(leaves, ways.reach[leaves], np.array(start, dtype=np.int64), *flat)


def _beside(workload: Workload, path: np.ndarray, ways: _Ways) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Nodes beside the path between two of its positions: grouped by the first, the second, their times and memory.

    Memory only where no node of the class is on the path, which counts that of the whole class.
    """
    position = _positions(workload, path)
    between = np.flatnonzero((position < 0) & (ways.above >= 0) & (ways.below < workload.nodes))
    own = [k for k, kind in enumerate(workload.kinds) if not kind.host and kind.count > 0]
    times = workload.times[between][:, own].min(axis=1) if own else np.full(len(between), np.inf)
    met = np.zeros(int(workload.classes.max(initial=0)) + 1, dtype=bool)
    met[workload.classes[path]] = True
    memory = np.where(met[workload.classes[between]], 0.0, workload.memory[between])
    first, members = rows(len(path), ways.above[between], np.arange(len(between)))
    return first, ways.below[between][members], times[members], memory[members]


@kernel()
def _ways_beside(
    order: np.ndarray,
    start: np.ndarray,
    target: np.ndarray,
    position: np.ndarray,
    transfer: np.ndarray,
    together: np.ndarray,
    length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `_Ways`. A node's way comes from the last position above it, so ways of two positions share no node;
    of the ways of a position the one counts whose cheapest tensor is dearest."""
    n = len(position)
    above, below = np.full(n, -1, dtype=np.int64), np.full(n, n, dtype=np.int64)
    reach, cost, narrow = np.full(length, -1, dtype=np.int64), np.zeros(length), np.zeros(n)
    end, via = np.full(length, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    most = transfer.sum()
    for v in order:
        here = position[v] if position[v] >= 0 else above[v]
        for e in range(start[v], start[v + 1]):
            w = target[e]
            least = most if together[v] == together[w] else transfer[v]
            if position[v] < 0:
                least = min(least, narrow[v])
            back = position[w] >= 0 and position[v] < 0 and here >= 0
            if back and (least > cost[here] or (least == cost[here] and position[w] > reach[here])):
                reach[here], cost[here], end[here] = position[w], least, v
            if here > above[w]:
                above[w], narrow[w], via[w] = here, least, v
            elif here == above[w] and least > narrow[w]:
                narrow[w], via[w] = least, v
    for v in order[::-1]:
        for e in range(start[v], start[v + 1]):
            w = target[e]
            below[v] = min(below[v], position[w] if position[w] >= 0 else below[w])
    return above, below, reach, end, via


def _spans(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last position on the path of each position's class: one subgraph per device must hold all of them."""
    _, first, number = np.unique(classes, return_index=True, return_inverse=True)
    last = np.zeros(len(first), dtype=np.int64)
    last[number] = np.arange(len(classes))
    return first[number].astype(np.int64), last[number]


@kernel()
def _cheapest_cut(routes: _Routes, way: int, room: float, first: bool) -> float:
    """What a piece pays for a way it holds the first nodes of, or the last ones, as many as fit; infinite if none may do."""
    best, whole = np.inf, routes.start[way + 1] - 1
    for cut in range(routes.start[way], routes.start[way + 1]):
        memory, time = routes.memory[cut], routes.time[cut]
        if not first:
            memory, time = routes.memory[whole] - memory, routes.time[whole] - time
        if memory <= room:
            best = min(best, routes.tensor[cut] + time)
    return best


@kernel(nogil=True)
def _cheapest_pieces(
    along: _Along,
    beside: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    routes: _Routes,
    room: float,
    pieces: int,
    stop: np.ndarray,
) -> float:
    """Smallest total of a path cut into pieces on accelerators (at most ``pieces``, each within ``room``) and hosts;
    infinite when time is up.

    A way beside the path is paid only
    where the output of the position it starts from is not, because that may be the tensor that changes place.
    """
    host_time, device_time, held, transfer = along.host_time, along.device_time, along.held, along.transfer
    last, before_start, before, low, high = along.last, along.before_start, along.before, along.low, along.high
    beside_start, beside_below, beside_time, beside_memory = beside
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
            if stop[0]:
                return np.inf
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
            for u in range(beside_start[begin], beside_start[begin + 1]):
                if beside_below[u] < end:  # an ancestor and a descendant are inside, so is the node
                    time += beside_time[u]
                    memory += beside_memory[u]
            least, most = min(least, low[begin]), max(most, high[begin])
            if memory > room or most >= end:
                break
            if least < begin:
                continue
            total = time + received
            for way in range(len(routes.leaves)):
                there, back = routes.leaves[way], routes.returns[way]
                if begin <= there < end and back >= end and last[there] < end:
                    total += _cheapest_cut(routes, way, room - memory, True)
                elif there < begin <= back < end and arrived[there] != end:
                    total += _cheapest_cut(routes, way, room - memory, False)
            for used in range(1, pieces + 1):
                best[end, used] = min(best[end, used], best[begin, used - 1] + total)
    return best[n, pieces]
