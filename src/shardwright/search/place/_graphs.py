"""Compiled graph routines shared by the placement solvers: adjacency in compressed rows, components, orders."""

from __future__ import annotations

import numpy as np

from shardwright.jit import kernel


def rows(count: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compressed rows: the values of key ``k`` are ``values[start[k]:start[k + 1]]``, in their original order."""
    start = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys, minlength=count), out=start[1:])
    return start, values[np.argsort(keys, kind="stable")].astype(np.int64)


@kernel()
def components_kernel(count: int, start: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Strongly connected components (Tarjan 1972, without recursion), numbered in a topological order."""
    index = np.full(count, -1, dtype=np.int64)
    low = np.zeros(count, dtype=np.int64)
    component = np.full(count, -1, dtype=np.int64)
    stack = np.empty(count, dtype=np.int64)
    path = np.empty(count, dtype=np.int64)
    cursor = start[:-1].copy()
    clock, found, top = 0, 0, 0
    for root in range(count - 1, -1, -1):  # backwards, so that the flipped numbering visits low numbers first
        if index[root] >= 0:
            continue
        depth = 0
        path[0] = root
        index[root] = low[root] = clock
        clock += 1
        stack[top] = root
        top += 1
        while depth >= 0:
            node = path[depth]
            if cursor[node] < start[node + 1]:
                nxt = target[cursor[node]]
                cursor[node] += 1
                if index[nxt] < 0:
                    index[nxt] = low[nxt] = clock
                    clock += 1
                    stack[top] = nxt
                    top += 1
                    depth += 1
                    path[depth] = nxt
                elif component[nxt] < 0 and index[nxt] < low[node]:
                    low[node] = index[nxt]
                continue
            if low[node] == index[node]:
                while True:
                    top -= 1
                    component[stack[top]] = found
                    if stack[top] == node:
                        break
                found += 1
            depth -= 1
            if depth >= 0 and low[node] < low[path[depth]]:
                low[path[depth]] = low[node]
    return found - 1 - component


@kernel()
def ready_order_kernel(count: int, start: np.ndarray, target: np.ndarray, priority: np.ndarray) -> np.ndarray:
    """A topological order that always takes the ready node of the largest priority (a binary heap)."""
    waiting = np.zeros(count, dtype=np.int64)
    for t in target:
        waiting[t] += 1
    heap = np.empty(count, dtype=np.int64)
    size = 0
    order = np.empty(count, dtype=np.int64)
    taken = 0
    for v in range(count):
        if waiting[v] == 0:
            size = _push(heap, size, v, priority)
    while size > 0:
        v = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sift(heap, size, priority)
        order[taken] = v
        taken += 1
        for e in range(start[v], start[v + 1]):
            w = target[e]
            waiting[w] -= 1
            if waiting[w] == 0:
                size = _push(heap, size, w, priority)
    return order[:taken]


@kernel()
def depth_order_kernel(count: int, start: np.ndarray, target: np.ndarray) -> np.ndarray:
    """A topological order that follows each branch as far as it goes (a stack of ready nodes)."""
    waiting = np.zeros(count, dtype=np.int64)
    for t in target:
        waiting[t] += 1
    stack = np.empty(count, dtype=np.int64)
    top = 0
    order = np.empty(count, dtype=np.int64)
    taken = 0
    for v in range(count - 1, -1, -1):
        if waiting[v] == 0:
            stack[top] = v
            top += 1
    while top > 0:
        top -= 1
        v = stack[top]
        order[taken] = v
        taken += 1
        for e in range(start[v + 1] - 1, start[v] - 1, -1):
            w = target[e]
            waiting[w] -= 1
            if waiting[w] == 0:
                stack[top] = w
                top += 1
    return order[:taken]


@kernel()
def critical_path_kernel(order: np.ndarray, start: np.ndarray, target: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """For every node the heaviest path from it to a sink, itself included; ``order`` is topological."""
    length = weight.copy()
    for i in range(len(order) - 1, -1, -1):
        v = order[i]
        best = 0.0
        for e in range(start[v], start[v + 1]):
            best = max(best, length[target[e]])
        length[v] = weight[v] + best
    return length


@kernel()
def _push(heap: np.ndarray, size: int, item: int, priority: np.ndarray) -> int:
    heap[size] = item
    child = size
    while child > 0:
        parent = (child - 1) // 2
        if not _before(heap[child], heap[parent], priority):
            break
        heap[child], heap[parent] = heap[parent], heap[child]
        child = parent
    return size + 1


@kernel()
def _sift(heap: np.ndarray, size: int, priority: np.ndarray) -> None:
    parent = 0
    while True:
        best = parent
        for child in (2 * parent + 1, 2 * parent + 2):
            if child < size and _before(heap[child], heap[best], priority):
                best = child
        if best == parent:
            return
        heap[best], heap[parent] = heap[parent], heap[best]
        parent = best


@kernel()
def _before(a: int, b: int, priority: np.ndarray) -> bool:
    return priority[a] > priority[b] or (priority[a] == priority[b] and a < b)
