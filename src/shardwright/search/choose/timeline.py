"""The points in time at which a usage limit can bind.

Usage only matters where it can peak: just before something is freed, after something was allocated. Every other
moment's set of living entries is contained in one of those, so a limit kept there is kept always. The contest's
30,000 points shrink to the few thousand critical ones, and every usage entry becomes a range of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.search.choose.problem import Problem


@dataclass(frozen=True)
class Timeline:
    """Critical times, and for each usage entry of the problem the range ``[first, last)`` of them it covers."""

    times: np.ndarray
    first: np.ndarray
    last: np.ndarray


def critical_times(problem: Problem) -> Timeline:
    """The timeline of a problem; entries without duration cover nothing.

    >>> from shardwright.search.choose.problem import Usage
    >>> one = np.ones(1)
    >>> usages = [Usage(0, 0, 4, one), Usage(0, 1, 2, one), Usage(0, 3, 5, one)]
    >>> critical_times(Problem(costs=[one], usages=usages)).times.tolist()
    [1, 3]
    """
    starts = np.array([usage.start for usage in problem.usages], dtype=np.int64)
    stops = np.array([usage.stop for usage in problem.usages], dtype=np.int64)
    real = starts < stops
    events = np.unique(np.concatenate([starts[real], stops[real]]))
    begins = np.isin(events, starts[real])
    ends = np.isin(events, stops[real])
    times = events[:-1][begins[:-1] & ends[1:]]
    return ranges_in(problem, times)


def ranges_in(problem: Problem, times: np.ndarray) -> Timeline:
    """The ranges that the problem's usage entries cover among given times."""
    starts = np.array([usage.start for usage in problem.usages], dtype=np.int64)
    stops = np.array([usage.stop for usage in problem.usages], dtype=np.int64)
    first, last = np.searchsorted(times, starts), np.searchsorted(times, stops)
    return Timeline(times, first, np.maximum(first, last))
