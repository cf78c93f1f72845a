"""The alternative objective, largest forward load plus largest backward load, exact over contiguous placements.

With the forward loads limited to F, the chain search finds the smallest largest backward load B(F). B never falls as F
does, so walking F down from the first answer visits every point of the trade-off that can still win, and the walk ends when
even the lower bound of one pass added to the other's value cannot beat the best sum (appendix of the 2020 placement paper).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwright.search.place.measure import stage_costs
from shardwright.search.place.problem import Placement, Workload

if TYPE_CHECKING:
    from shardwright.search.place.contiguous import ChainSearch

_LESS = 1 - 1e-9


def best_sum_of_passes(search: ChainSearch, workload: Workload) -> Placement | None:
    """The contiguous placement with the smallest sum of the two largest loads."""
    best: Placement | None = None
    value = search.everything() * 2 + 1.0
    least_forward, least_backward = search.lower_bound(0), search.lower_bound(1)
    forward = value
    while True:
        limits = np.array([min(forward, value - least_backward), value - least_forward])
        if limits[0] < least_forward * _LESS or limits[1] < least_backward * _LESS:
            return best
        found = search.under(limits)
        if found is None:
            return best
        loads = stage_costs(workload, found).loads(search.rules).max(axis=0)
        if loads.sum() < value:
            best, value = found, float(loads.sum())
        if loads[0] <= least_forward:
            return best
        # Smaller forward limits only raise the backward load, so they must at least make up for it.
        forward = min(float(loads[0]), value - float(loads[1])) * _LESS
