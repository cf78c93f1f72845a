"""The time limit of latency: compiled loops stop in their middle, programs too large to state are given up, answers stand.

No test looks at a clock: what would not stop by itself for minutes either stops at the flag, or the test never ends.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from shardwright.search.place import DeviceKind, Workload, latency_violations, place
from shardwright.search.place.contiguous import ChainSearch
from shardwright.search.place.deadline import Deadline
from shardwright.search.place.latency import _annealed, best_start, latency_cost, slots_of
from shardwright.search.place.latency_bounds import critical_path, path_bound
from shardwright.search.place.latency_program import solve_latency
from shardwright.search.place.problem import Rules
from shardwright.search.place.reductions import reduce


def chains(width: int, length: int, room: float = 1e9) -> Workload:
    """So many chains side by side between a first and a last node: as many ideals as ``(length + 1) ** width``."""
    draw = np.random.default_rng(0)
    nodes = 2 + width * length
    ladders = [[0, *range(1 + k * length, 1 + (k + 1) * length), nodes - 1] for k in range(width)]
    times, transfer = draw.uniform(1, 2, nodes), draw.uniform(1, 2, nodes)
    return Workload(
        kinds=(DeviceKind("accelerator", 6, room), DeviceKind("cpu", 4, host=True)),
        times=np.column_stack([times, 10 * times]),
        memory=np.ones(nodes),
        transfer=transfer,
        edges=np.array([pair for ladder in ladders for pair in itertools.pairwise(ladder)]),
    )


def test_annealing_stops_at_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.search.place import latency

    monkeypatch.setattr(latency, "_ANNEALING_VISITS", 10**15)
    slots = slots_of(chains(2, 2000))
    start = np.full(slots.workload.nodes, -1, dtype=np.int64)
    with Deadline(0.2) as deadline:
        found = _annealed(slots, start, 10**12, 0, deadline.flag)
    assert deadline.passed and slots.fits(found)


def test_chains_of_ideals_stop_at_the_flag() -> None:
    blocks = reduce(chains(3, 36, room=50.0))
    assert blocks.count > 100
    with Deadline(0.2) as deadline:
        search = ChainSearch(blocks, Rules(), summed=True, most_ideals=60_000, stop=deadline.flag)
        assert search.under(np.array([1e300])) is None and search.kept > 50_000
    assert deadline.flag[0]


def test_bounds_of_paths_stop_at_the_flag_and_hold() -> None:
    """A path of 60,000 nodes without a limit of memory: all pairs of its cuts would take hours."""
    workload = chains(1, 60_000)
    with Deadline(0.5) as deadline:
        bound = path_bound(workload, 1, deadline)
    assert deadline.flag[0] and bound <= critical_path(workload) * 10


def test_a_program_that_cannot_be_stated_in_time_proves_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortools.sat.python import cp_model

    def never(*arguments: object) -> None:
        raise AssertionError("the program was solved after its time")

    monkeypatch.setattr(cp_model.CpSolver, "solve", never)
    slots = slots_of(chains(2, 1000))
    with Deadline(0.1) as deadline:
        assert solve_latency(slots, None, 17.0, 1e9, deadline, 1, 0) == (None, 17.0)


@pytest.mark.parametrize("solver", ["auto", "heuristic", "greedy"])
def test_no_time_at_all_still_gives_a_placement_and_a_bound(solver: str) -> None:
    workload = chains(3, 30, room=40.0)
    found = place(workload, "latency", solver=solver, time_limit=1e-9)
    assert not latency_violations(workload, found.answer)
    assert found.cost == pytest.approx(latency_cost(workload, found.answer))
    assert 0 < critical_path(workload) * (1 - 1e-9) <= found.lower_bound <= found.cost


def test_with_no_time_starts_are_the_quick_ones() -> None:
    slots = slots_of(replace(chains(2, 20), kinds=(DeviceKind("accelerator", 2, 1e9), DeviceKind("cpu", 1, host=True))))
    with Deadline(0.0) as deadline:
        start = best_start(slots, deadline, seed=0)
    assert start is not None and slots.fits(start)
