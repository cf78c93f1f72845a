"""Preprocessing with a way back: co-location classes, cycles made by contraction, nodes that cost nothing.

Every step maps ``Blocks`` to smaller ``Blocks``; ``block_of`` carries an answer back to the nodes. The training rule
is that of the placement paper: contiguity is asked of the forward nodes, backward nodes follow their class, and a class
without a forward node takes part through a forward twin of no cost, tied to the others by the mirror image of its edges.
Transfers keep their meaning through contraction: each is a sender's block, the blocks that receive, and a cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwright.search.place.problem import DeviceKind, FloatArray, IntArray, Workload


@dataclass(frozen=True, eq=False)
class Blocks:
    """Sets of nodes that stay together. ``order`` are the edges contiguity respects; columns of times are passes."""

    kinds: tuple[DeviceKind, ...]
    times: FloatArray  # [blocks, kinds, 2]
    memory: FloatArray  # [blocks]
    parameters: FloatArray  # [blocks]
    order: IntArray  # [edges, 2]
    home: IntArray  # [transfers] block of the sending node
    cost: FloatArray  # [transfers, 2]
    receiver_start: IntArray  # [transfers + 1]
    receivers: IntArray  # blocks other than the home with an edge from the sender
    block_of: IntArray  # [nodes]
    sync_bandwidth: float

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.memory)

    def back(self, stage_of_block: IntArray) -> IntArray:
        """The stage of every node, from the stage of every block."""
        return np.asarray(stage_of_block, dtype=np.int64)[self.block_of]


def reduce(workload: Workload) -> Blocks:
    """All reductions that keep the contiguous throughput optimum; blocks come out in a topological order."""
    return in_topological_order(absorb_free_blocks(fuse_cycles(contract_classes(workload))))


def contract_classes(workload: Workload) -> Blocks:
    """One block per co-location class."""
    classes = workload.classes
    count = int(classes.max(initial=-1)) + 1
    passes = workload.backward.astype(np.int64)
    by_pass = np.zeros((2 * count, len(workload.kinds)))
    np.add.at(by_pass, 2 * classes + passes, workload.times)
    times = by_pass.reshape(count, 2, -1).swapaxes(1, 2)
    source, target = workload.edges[:, 0], classes[workload.edges[:, 1]]
    cut = classes[source] != target
    arrivals = distinct(source[cut] * max(count, 1) + target[cut])
    senders, receivers = arrivals // max(count, 1), arrivals % max(count, 1)
    sending, first = np.unique(senders, return_index=True)
    cost = np.zeros((len(sending), 2))
    cost[np.arange(len(sending)), passes[sending]] = workload.transfer[sending]
    return Blocks(
        kinds=workload.kinds,
        times=times,
        memory=np.bincount(classes, weights=workload.memory, minlength=count),
        parameters=np.bincount(classes, weights=workload.parameter_bytes, minlength=count),
        order=class_order(workload),
        home=classes[sending],
        cost=cost,
        receiver_start=np.append(first, len(receivers)).astype(np.int64),
        receivers=receivers.astype(np.int64),
        block_of=classes,
        sync_bandwidth=workload.sync_bandwidth,
    )


def class_order(workload: Workload) -> IntArray:
    """The edges between classes that contiguity respects: forward edges, and mirrored ones of classes without forward."""
    classes, backward = workload.classes, workload.backward
    source, target = workload.edges[:, 0], workload.edges[:, 1]
    has_forward = np.zeros(int(classes.max(initial=-1)) + 1, dtype=bool)
    has_forward[classes[~backward]] = True
    forward = ~backward[source] & ~backward[target]
    mirrored = backward[source] & backward[target] & ~(has_forward[classes[source]] & has_forward[classes[target]])
    pairs = np.concatenate(
        [
            np.stack([classes[source[forward]], classes[target[forward]]], axis=1),
            np.stack([classes[target[mirrored]], classes[source[mirrored]]], axis=1),
        ]
    )
    return _distinct_pairs(pairs, len(has_forward))


def fuse_cycles(blocks: Blocks) -> Blocks:
    """Contract every cycle of the order: its blocks cannot be apart in a contiguous placement."""
    labels = strong_components(blocks.count, blocks.order)
    return merge(blocks, labels) if labels.max(initial=-1) + 1 < blocks.count else blocks


def absorb_free_blocks(blocks: Blocks) -> Blocks:
    """Merge every block of no cost that has a single neighbour into that neighbour.

    Moving it there never costs anything: no other block sees it. Blocks with memory move only when memory cannot bind.
    """
    roomy = blocks.memory.sum() <= min((kind.room for kind in blocks.kinds), default=0.0)
    free = (blocks.times == 0).all(axis=(1, 2))
    free &= (blocks.memory == 0) | roomy
    free &= (blocks.parameters == 0) | np.isinf(blocks.sync_bandwidth)
    neighbours: list[set[int]] = [set() for _ in range(blocks.count)] if free.any() else []
    if not neighbours:
        return blocks
    counts = np.diff(blocks.receiver_start)
    homes = np.repeat(blocks.home, counts)
    for a, b in [*blocks.order.tolist(), *zip(homes.tolist(), blocks.receivers.tolist(), strict=True)]:
        neighbours[a].add(b)
        neighbours[b].add(a)
    into = np.arange(blocks.count)
    queue = [b for b in np.flatnonzero(free).tolist() if len(neighbours[b]) == 1]
    while queue:
        block = queue.pop()
        if len(neighbours[block]) != 1:
            continue  # its only neighbour has meanwhile been merged into it
        (keeper,) = neighbours[block]
        into[block] = keeper
        neighbours[block] = set()
        neighbours[keeper].discard(block)
        if free[keeper] and len(neighbours[keeper]) == 1:
            queue.append(keeper)
    if (into == np.arange(blocks.count)).all():
        return blocks
    while (into != into[into]).any():
        into = into[into]
    return merge(blocks, np.unique(into, return_inverse=True)[1])


def in_topological_order(blocks: Blocks) -> Blocks:
    """Renumber the blocks so that every order edge goes from a smaller to a larger number."""
    return merge(blocks, strong_components(blocks.count, blocks.order))


def merge(blocks: Blocks, labels: IntArray) -> Blocks:
    """The blocks with equal labels put together (labels are 0..k-1)."""
    labels = np.asarray(labels, dtype=np.int64)
    count = int(labels.max(initial=-1)) + 1
    times = np.zeros((count, *blocks.times.shape[1:]))
    np.add.at(times, labels, blocks.times)
    transfers = np.repeat(np.arange(len(blocks.home)), np.diff(blocks.receiver_start))
    home = labels[blocks.home]
    receivers = labels[blocks.receivers]
    outside = receivers != home[transfers]
    arrivals = distinct(transfers[outside] * max(count, 1) + receivers[outside])
    transfers, receivers = arrivals // max(count, 1), arrivals % max(count, 1)
    kept, first = np.unique(transfers, return_index=True)
    merged = replace(
        blocks,
        times=times,
        memory=np.bincount(labels, weights=blocks.memory, minlength=count),
        parameters=np.bincount(labels, weights=blocks.parameters, minlength=count),
        order=_distinct_pairs(labels[blocks.order], count),
        home=home[kept],
        cost=blocks.cost[kept],
        receiver_start=np.append(first, len(receivers)).astype(np.int64),
        receivers=receivers.astype(np.int64),
        block_of=labels[blocks.block_of],
    )
    return _join_equal_transfers(merged)


def strong_components(count: int, edges: IntArray) -> IntArray:
    """The strongly connected component of every node, numbered in a topological order.

    >>> strong_components(3, np.array([[2, 0], [0, 1], [1, 0]])).tolist()
    [1, 1, 0]
    """
    from shardwright.search.place._graphs import components_kernel, rows

    edges = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    return components_kernel(count, *rows(count, edges[:, 0], edges[:, 1]))


def distinct(keys: IntArray) -> IntArray:
    """The different keys in ascending order (sorting: numpy's own, hash-based, is many times slower on millions)."""
    ranked = np.sort(keys)
    return ranked[np.concatenate([[True], ranked[1:] != ranked[:-1]])] if len(ranked) else ranked


def _distinct_pairs(pairs: IntArray, count: int) -> IntArray:
    apart = pairs[pairs[:, 0] != pairs[:, 1]]
    keys = distinct(apart[:, 0] * max(count, 1) + apart[:, 1])
    return np.stack([keys // max(count, 1), keys % max(count, 1)], axis=1)


def _join_equal_transfers(blocks: Blocks, limit: int = 100_000) -> Blocks:
    """Add up the costs of transfers with the same sender and receivers (left alone on huge graphs: it only saves time)."""
    if not 0 < len(blocks.home) <= limit:
        return blocks
    groups: dict[tuple[int, ...], int] = {}
    ends = blocks.receiver_start
    keys = [(int(h), *blocks.receivers[ends[t] : ends[t + 1]].tolist()) for t, h in enumerate(blocks.home)]
    number = np.array([groups.setdefault(key, len(groups)) for key in keys])
    if len(groups) == len(keys):
        return blocks
    cost = np.zeros((len(groups), 2))
    np.add.at(cost, number, blocks.cost)
    receivers = [np.array(key[1:], dtype=np.int64) for key in groups]
    return replace(
        blocks,
        home=np.array([key[0] for key in groups], dtype=np.int64),
        cost=cost,
        receiver_start=np.cumsum([0, *map(len, receivers)]).astype(np.int64),
        receivers=np.concatenate(receivers),
    )
