from __future__ import annotations

import numpy as np
from bench.published.fronts import both, front, in_a_row, least_cost, least_costs, rough_costs, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st

POINTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=6)


def front_of(points: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return front(*(np.array([0.0, *(p[k] for p in points)]) for k in (0, 1)))


@settings(max_examples=150, deadline=None)
@given(POINTS, POINTS, st.integers(0, 4), st.integers(0, 50))
def test_sums_of_fronts_and_their_hulls(
    ends: list[tuple[int, int]], layer: list[tuple[int, int]], count: int, need: int
) -> None:
    end, one = front_of(ends), front_of(layer)
    total = [(np.zeros(1), np.zeros(1))]
    sums = {(0.0, 0.0)}
    for _ in range(count):
        total.append(both(*total[-1], *one))
        sums = {(a + c, b + g) for a, b in sums for c, g in zip(*one, strict=True)}
    best = min(
        (a + c for a, b in sums for c, g in zip(*end, strict=True) if b + g >= need),
        default=np.inf,
    )
    assert least_cost(*end, *total[count], float(need)) == best
    kind, counts, needs = np.zeros(1, dtype=np.int64), np.array([count]), np.array([float(need)])
    assert least_costs(in_a_row([end]), in_a_row(total), kind, counts, needs)[0] == best
    steps = steps_of(*end)
    rough = rough_costs(in_a_row([(steps[:, 0], steps[:, 1])]), steps_of(*one), kind, counts, needs)[0]
    assert rough[1] <= best + 1e-9 and best <= rough[0] + 1e-9
