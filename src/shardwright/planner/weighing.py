"""A bound on the step by weighing streams against each other: for any weights that add up to one, the step takes at least
the weighted sum of the seconds in which a rank's streams are busy.

One stream is computation together with every change of layout it waits for, each mesh axis is another. A plan is as fast
as computation alone allows only if its traffic hides under it: gradients that need longer on a slow link than all
computation takes cannot. For given weights the least sum over all plans is a choice problem like any other
(:class:`~shardwright.search.bills.Pricing`, ``links``), so every one solved is a bound. Which weights give the greatest is
a concave problem: each answer's own seconds on every stream are a plane above it (cutting planes, Kelley 1960), and the next
weights lie halfway from the best so far to where the lowest of the planes is highest.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import inf

import numpy as np

from shardwright.cluster import Mesh
from shardwright.planner.trials import LEAST_UNHIDDEN, Trials
from shardwright.search.bills import LEAST, Pricing
from shardwright.search.choose import evaluate

LEAST_COMPUTE = Pricing(changes=0.0, traffic=0.0, least=True)
"""Operators and updates alone."""

GRID = 24
"""The planes are looked at where weights are multiples of one over this."""

ROUNDS = 6
"""How many weights are tried."""

WORTHWHILE = 1.005
"""No further weights are tried where the planes leave less to gain than this factor."""


def weighed(trials: Trials, mesh: Mesh, name: str, more: float = 0.0, enough: float = inf) -> float:
    """Seconds that no step of a search on a mesh undercuts; no greater ones are looked for than ``enough``.

    ``more`` seconds every strategy computes beside what is chosen.

    >>> weighed(trials, mesh, "auto")  # doctest: +SKIP
    """
    best, answer = trials.least(mesh, name, LEAST_UNHIDDEN, enough=enough - more)
    best += more
    if best >= enough or _all_sent(trials, mesh, name, answer) <= best:
        return best  # every link is idle while the answer computes: no weights make more of it
    streams = 1 + len(mesh.axes)
    single = [trials.bounding(mesh, name, _pricing(row)).problem for row in np.eye(streams)]
    grid, planes, kept = _grid(streams), list[np.ndarray](), np.eye(streams)[0]
    for _ in range(ROUNDS):
        seconds = np.array([evaluate(problem, answer).cost for problem in single])
        planes.append(grid @ seconds + grid[:, 0] * more)
        lowest = np.min(planes, axis=0)
        if best >= enough or lowest.max() <= WORTHWHILE * best:
            break
        weights = (kept + grid[int(lowest.argmax())]) / 2
        bound, answer = trials.least(mesh, name, _pricing(weights), enough=enough - weights[0] * more)
        bound += weights[0] * more
        if bound > best:
            best, kept = bound, weights
    return best


def _all_sent(trials: Trials, mesh: Mesh, name: str, answer: np.ndarray) -> float:
    """Seconds of all that an answer sends along any axis, and a little more: what its parameters are copied for."""
    whole, own = (evaluate(trials.bounding(mesh, name, p).problem, answer).cost for p in (LEAST, LEAST_COMPUTE))
    return whole - own


def _pricing(weights: np.ndarray) -> Pricing:
    first, *links = (float(weight) for weight in weights)
    return Pricing(compute=first, changes=first, least=True, links=tuple(links))


@lru_cache
def _grid(streams: int) -> np.ndarray:
    """All weights that are multiples of one over :data:`GRID`."""
    places = np.array(list(combinations(range(GRID + streams - 1), streams - 1))).reshape(-1, streams - 1)
    ends = np.full((len(places), 1), GRID + streams - 1)
    return (np.diff(np.hstack([np.full_like(ends, -1), places, ends]), axis=1) - 1) / GRID
