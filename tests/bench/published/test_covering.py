from __future__ import annotations

import itertools

import numpy as np
import pytest
from bench.published.covering import cheapest_cover, cover_in_ratio_order
from hypothesis import given, settings
from hypothesis import strategies as st

ITEMS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(-1, 30))
def test_cheapest_cover_is_the_best_subset(items: list[tuple[int, int]], need: int) -> None:
    items.sort(key=lambda item: item[0] / item[1])
    costs, gains = (np.array([item[k] for item in items], dtype=float) for k in (0, 1))
    subsets = [s for n in range(len(items) + 1) for s in itertools.combinations(range(len(items)), n)]
    best = min((costs[list(s)].sum() for s in subsets if gains[list(s)].sum() >= need), default=np.inf)
    cost, bound, chosen = cheapest_cover(costs, gains, float(need), 10**6)
    assert cost == bound == best
    if np.isfinite(best):
        assert costs[chosen].sum() == best and gains[chosen].sum() >= need
    answer, relaxed = cover_in_ratio_order(costs, gains, np.ones((1, len(items)), dtype=bool), np.array([float(need)]))
    assert relaxed[0] <= best + 1e-12 and answer[0] >= best
    assert np.isfinite(answer[0]) == np.isfinite(best)


def test_a_search_cut_short_still_bounds() -> None:
    costs, gains = np.array([1.0, 1.1, 1.3, 1.7]), np.array([3.0, 3.1, 3.3, 3.4])
    exact, _, _ = cheapest_cover(costs, gains, 6.3, 10**6)
    _, bound, _ = cheapest_cover(costs, gains, 6.3, 3)
    assert bound <= exact
    assert exact == pytest.approx(2.3)
