"""What people do without a solver: one device, equal shares along the graph, local search from random starts.

Human expert splits are read with ``formats.read_split``. All of them are placements like any other and are measured by
the same code; only local search is not contiguous (as in the 2020 placement paper's comparison).
"""

from __future__ import annotations

import numpy as np

from shardwright.search.place.heuristics import SWAP_LIMIT, refine
from shardwright.search.place.lines import Cut
from shardwright.search.place.problem import Placement, Rules, Stage, Workload, one_stage_per_device
from shardwright.search.place.reductions import contract_classes, reduce


def one_device(workload: Workload, kind: int = 0) -> Placement:
    """Everything on the first device of a kind, whether or not it fits."""
    return Placement(np.zeros(workload.nodes, dtype=np.int64), (Stage(kind, (0,)),))


def equal_shares(workload: Workload, kind: int = 0) -> Placement:
    """Greedy by topological order: each device of the kind takes the next equal share of the work."""
    blocks = reduce(workload)
    times = blocks.times.sum(axis=2)[:, kind]
    done = np.cumsum(times) - times / 2
    count = workload.kinds[kind].count
    share = np.minimum((done / max(times.sum(), 1e-300) * count).astype(np.int64), count - 1)
    return Placement(blocks.back(share), tuple(Stage(kind, (i,)) for i in range(count)))


def local_search(workload: Workload, rules: Rules | None = None, *, starts: int = 10, seed: int = 0) -> Placement:
    """The best of several random assignments of the co-location classes, each improved by moves and swaps."""
    blocks = contract_classes(workload)
    stages = one_stage_per_device(workload.kinds)
    kinds = np.array([stage.kind for stage in stages])
    times = blocks.times.sum(axis=2)
    rng = np.random.default_rng(seed)
    best, value = None, np.inf
    for _ in range(starts if blocks.count <= SWAP_LIMIT else 1):
        allowed = np.isfinite(times[:, kinds])
        drawn = np.argmax(np.where(allowed, rng.random(allowed.shape), -1.0), axis=1)
        improved, load = refine(blocks, Cut(drawn, kinds), rules or Rules(), passes=50, ordered=False)
        if load < value or best is None:
            best, value = improved, load
    assert best is not None
    return Placement(blocks.back(best.stage_of), stages)
