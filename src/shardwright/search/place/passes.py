"""The alternative objective, largest forward load plus largest backward load, exact over contiguous placements.

With the forward loads limited to F, the chain search finds the smallest largest backward load B(F). B never falls as F
does, so walking F down from the first answer visits every point of the trade-off that can still win, and the walk ends when
even the lower bound of one pass added to the other's value cannot beat the best sum (appendix of the 2020 placement paper).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from shardwright.search.place.measure import stage_costs
from shardwright.search.place.problem import Placement, Workload

if TYPE_CHECKING:
    from shardwright.search.place.contiguous import ChainSearch

_LESS = 1 - 1e-9


def best_sum_of_passes(
    search: ChainSearch, workload: Workload, start: Placement | None, seconds: float
) -> tuple[Placement | None, float]:
    """The contiguous placement with the smallest sum of the two largest loads, and a lower bound on that sum.

    The walk begins below the sum that ``start`` has; after ``seconds`` the bound is what the steps so far prove.
    """
    deadline = time.perf_counter() + seconds
    best, value = start, 2 * search.everything() + 1.0
    if start is not None:
        value = float(stage_costs(workload, start).loads(search.rules).max(axis=0).sum())
    least_forward, least_backward = search.lower_bound(0), search.lower_bound(1)
    forward, backward = value, least_backward
    while True:
        limits = np.array([min(forward, value * _LESS - backward), value * _LESS - least_forward])
        if limits[0] < least_forward * _LESS or limits[1] < least_backward * _LESS:
            return best, value
        if time.perf_counter() > deadline:
            return best, min(value, least_forward + backward)
        found = search.under(limits)
        if found is None:
            return best, value
        loads = stage_costs(workload, found).loads(search.rules).max(axis=0)
        if loads.sum() < value:
            best, value = found, float(loads.sum())
        if loads[0] <= least_forward:
            return best, value
        # Smaller forward limits only raise the backward load, so they must at least make up for it.
        forward, backward = float(loads[0]) * _LESS, max(backward, float(loads[1]))
