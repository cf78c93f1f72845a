"""Compiled latency: the finish time of one sample under a placement, and annealing over placements.

Units of execution are single nodes on pooled hosts and whole subgraphs on accelerators. A unit starts when all inputs are
there (and its predecessor on the same accelerator is done); an accelerator pays for every input from outside and every
output that leaves. Longest path over the units, in one walk over the edges; a cycle of units has no schedule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.jit import copy, kernel


class Units(NamedTuple):
    """Nodes, subgraphs and the edges between nodes, as arrays."""

    host_time: np.ndarray  # [nodes]
    slot_time: np.ndarray  # [nodes, slots]
    pays: np.ndarray  # [slots]
    follows: np.ndarray  # [slots] the subgraph that runs before it on the same device, or -1
    transfer: np.ndarray  # [nodes]
    start: np.ndarray  # node -> its edges
    target: np.ndarray


class Groups(NamedTuple):
    """Blocks of nodes that move together, where each may go, and what devices hold."""

    block_start: np.ndarray
    block_nodes: np.ndarray  # nodes of each block
    near_start: np.ndarray
    near: np.ndarray  # blocks with an edge to or from each block
    allowed: np.ndarray  # [blocks, slots + 1], the last column is the host
    device: np.ndarray  # [slots]
    room: np.ndarray  # [devices]
    memory: np.ndarray  # [nodes]


class Scratch(NamedTuple):
    """What one walk over the units writes; ``finish`` is its answer."""

    finish: np.ndarray  # [nodes + slots]
    ready: np.ndarray  # [nodes + slots]
    length: np.ndarray  # [slots]
    waiting: np.ndarray  # [nodes + slots]
    queue: np.ndarray  # [nodes + slots]
    stamp: np.ndarray  # [slots]
    member_next: np.ndarray  # [nodes]
    member_head: np.ndarray  # [slots]


@kernel()
def scratch_for(nodes: int, slots: int) -> Scratch:
    """Room for walks over so many units."""
    finish, ready, length = np.zeros(nodes + slots), np.zeros(nodes + slots), np.zeros(slots)
    waiting, queue = np.zeros(nodes + slots, dtype=np.int64), np.zeros(nodes + slots, dtype=np.int64)
    stamp, member_head = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
    member_next = np.zeros(nodes, dtype=np.int64)
    return Scratch(finish, ready, length, waiting, queue, stamp, member_next, member_head)


@kernel()
def finish_time(slot: np.ndarray, units: Units, scratch: Scratch) -> float:  # slot: [nodes] subgraph, or -1 on a host
    """The latency, or infinity when units wait for each other in a cycle."""
    host_time, slot_time, pays, follows = units.host_time, units.slot_time, units.pays, units.follows
    transfer, start, target = units.transfer, units.start, units.target
    finish, ready, length, waiting = scratch.finish, scratch.ready, scratch.length, scratch.waiting
    queue, stamp, member_next, member_head = scratch.queue, scratch.stamp, scratch.member_next, scratch.member_head
    n, slots = len(slot), len(pays)
    ready[:] = 0.0
    length[:] = 0.0
    waiting[:] = 0
    stamp[:] = -1
    member_head[:] = -1
    for v in range(n):
        s = slot[v]
        if s >= 0:
            length[s] += slot_time[v, s]
            member_next[v] = member_head[s]
            member_head[s] = v
        leaves = False
        for e in range(start[v], start[v + 1]):
            w = target[e]
            r = slot[w]
            if r >= 0 and r == s:
                continue
            leaves = True
            waiting[n + r if r >= 0 else w] += 1
            if r >= 0 and stamp[r] != v:
                stamp[r] = v
                length[r] += transfer[v] * pays[r]
        if leaves and s >= 0:
            length[s] += transfer[v] * pays[s]
    for s in range(slots):
        if follows[s] >= 0:
            waiting[n + s] += 1
    tail = 0
    for v in range(n):
        if slot[v] < 0 and waiting[v] == 0:
            queue[tail] = v
            tail += 1
    for s in range(slots):
        if waiting[n + s] == 0:
            queue[tail] = n + s
            tail += 1
    head, latest, done = 0, 0.0, 0
    while head < tail:
        unit = queue[head]
        head += 1
        done += 1
        finish[unit] = ready[unit] + (host_time[unit] if unit < n else length[unit - n])
        latest = max(latest, finish[unit])
        v = unit if unit < n else member_head[unit - n]
        while v >= 0:
            for e in range(start[v], start[v + 1]):
                w = target[e]
                other = n + slot[w] if slot[w] >= 0 else w
                if other == unit:
                    continue
                ready[other] = max(ready[other], finish[unit])
                waiting[other] -= 1
                if waiting[other] == 0:
                    queue[tail] = other
                    tail += 1
            v = member_next[v] if unit >= n else -1
        if unit >= n:
            for s in range(slots):
                if follows[s] == unit - n:
                    ready[n + s] = max(ready[n + s], finish[unit])
                    waiting[n + s] -= 1
                    if waiting[n + s] == 0:
                        queue[tail] = n + s
                        tail += 1
    every = slots
    for v in range(n):
        if slot[v] < 0:
            every += 1
    return latest if done == every else np.inf


@kernel(nogil=True)
def anneal(
    slot: np.ndarray,
    groups: Groups,
    units: Units,
    steps: int,
    heat: float,
    seed: int,
    stop: np.ndarray,  # [1] whether time is up
) -> tuple[np.ndarray, float]:
    """Simulated annealing from ``slot``: move a block (and now and then its like-placed neighbours) to another slot."""
    np.random.seed(seed)
    block_start, block_nodes, allowed = groups.block_start, groups.block_nodes, groups.allowed
    near_start, near = groups.near_start, groups.near
    device, room, memory = groups.device, groups.room, groups.memory
    n, slots = len(slot), len(units.pays)
    scratch = scratch_for(n, slots)
    held = np.zeros(len(room))
    for v in range(n):
        if slot[v] >= 0:
            held[device[slot[v]]] += memory[v]
    current = slot.copy()
    value = finish_time(current, units, scratch)
    best, best_value = current.copy(), value
    blocks = len(block_start) - 1
    picked = np.empty(blocks, dtype=np.int64)
    old = np.empty(blocks, dtype=np.int64)
    for step in range(steps):
        if stop[0]:
            break
        temperature = heat * (1.0 - step / steps)
        b = np.random.randint(blocks)
        if near_start[b + 1] > near_start[b] and np.random.random() < 0.8:
            c = near[np.random.randint(near_start[b], near_start[b + 1])]
            to = current[block_nodes[block_start[c]]]
        else:
            to = np.random.randint(slots + 1) - 1
        own = current[block_nodes[block_start[b]]]
        if to == own:
            continue
        count = 1
        picked[0] = b
        most = 1 if np.random.random() < 0.5 else np.random.randint(2, 12)
        i = 0
        while i < count and count < most:  # grow a connected group of the same slot
            for e in range(near_start[picked[i]], near_start[picked[i] + 1]):
                c = near[e]
                if current[block_nodes[block_start[c]]] == own and count < most:
                    seen = False
                    for j in range(count):
                        if picked[j] == c:
                            seen = True
                            break
                    if not seen:
                        picked[count] = c
                        count += 1
            i += 1
        valid = True
        size = 0.0
        for i in range(count):
            if not allowed[picked[i], to]:
                valid = False
            for e in range(block_start[picked[i]], block_start[picked[i] + 1]):
                size += memory[block_nodes[e]]
        if not valid:
            continue
        if to >= 0 and (own < 0 or device[own] != device[to]) and held[device[to]] + size > room[device[to]]:
            continue
        for i in range(count):
            old[i] = own
            for e in range(block_start[picked[i]], block_start[picked[i] + 1]):
                current[block_nodes[e]] = to
        new = finish_time(current, units, scratch)
        if new <= value or np.random.random() < np.exp((value - new) / max(temperature, 1e-300)):
            value = new
            if own >= 0:
                held[device[own]] -= size
            if to >= 0:
                held[device[to]] += size
            if value < best_value:
                best_value = value
                copy(current, best)
        else:
            for i in range(count):
                for e in range(block_start[picked[i]], block_start[picked[i] + 1]):
                    current[block_nodes[e]] = old[i]
    return best, best_value
