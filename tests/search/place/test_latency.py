"""Latency: the finish time against a plain fixed point, the optimum against brute force, bounds below it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible, ProblemError
from shardwright.search.place.deadline import Deadline
from shardwright.search.place.formats import read_workload
from shardwright.search.place.latency import (
    greedy_fills,
    latency_cost,
    latency_violations,
    place_for_latency,
    slots_of,
)
from shardwright.search.place.latency_bounds import critical_path, path_bound
from shardwright.search.place.problem import DeviceKind, Workload

from .plain import workloads

ENDLESS = Deadline(1e6)
LISTED = {  # greedy, latency of the throughput optimum, CPUs only
    "layer_bert24_inference": (100.219, 108.031, 924.06),
    "layer_gnmt_inference": (268.5, 244.331, 1824.35),
    "op_bert_l-3_inference": (416.204, 414.441, 1099.93),
    "op_resnet50_inference": (839.536, 1123.653, 6666.67),
}


def plain_latency(workload: Workload, slot_of: list[int], subgraphs: int) -> float:
    """Finish times by repeated relaxation; infinite where they never settle (units waiting for each other)."""
    kinds = [k for k, kind in enumerate(workload.kinds) if not kind.host for _ in range(kind.count * subgraphs)]
    units = sorted({("host", v) if s < 0 else ("slot", s) for v, s in enumerate(slot_of)})
    unit = [("host", v) if s < 0 else ("slot", s) for v, s in enumerate(slot_of)]
    host = next(k for k, kind in enumerate(workload.kinds) if kind.host)
    needs: dict[tuple[str, int], set[tuple[str, int]]] = {u: set() for u in units}
    length = dict.fromkeys(units, 0.0)
    for v in range(workload.nodes):
        length[unit[v]] += workload.times[v, host if slot_of[v] < 0 else kinds[slot_of[v]]]
    for a in range(workload.nodes):
        others = {unit[b] for x, b in workload.edges.tolist() if x == a and unit[b] != unit[a]}
        for other in others:
            needs[other].add(unit[a])
            if other[0] == "slot":
                length[other] += workload.transfer[a] * workload.kinds[kinds[other[1]]].pays
        if others and slot_of[a] >= 0:
            length[unit[a]] += workload.transfer[a] * workload.kinds[kinds[slot_of[a]]].pays
    for kind, s in units:
        for earlier in range(s - s % subgraphs, s) if kind == "slot" else ():
            if ("slot", earlier) in length:
                needs["slot", s].add(("slot", earlier))
    finish: dict[tuple[str, int], float] = {}
    while len(finish) < len(units):
        ready = [u for u in units if u not in finish and needs[u] <= finish.keys()]
        if not ready:
            return float("inf")
        for u in ready:
            finish[u] = max((finish[w] for w in needs[u]), default=0.0) + length[u]
    return max(finish.values())


def plain_best_latency(workload: Workload, subgraphs: int) -> float:
    devices = [(k, i) for k, kind in enumerate(workload.kinds) if not kind.host for i in range(kind.count)]
    slots = range(-1, len(devices) * subgraphs)
    host = next(k for k, kind in enumerate(workload.kinds) if kind.host)
    best = float("inf")
    for slot_of in itertools.product(slots, repeat=workload.nodes):
        device = [s // subgraphs for s in slot_of]
        if any(device[v] != device[list(workload.classes).index(c)] for v, c in enumerate(workload.classes)):
            continue
        if any(
            sum(workload.memory[v] for v in range(workload.nodes) if device[v] == d) > workload.kinds[k].room
            for d, (k, _) in enumerate(devices)
        ):
            continue
        times = [workload.times[v, host if d < 0 else devices[d][0]] for v, d in enumerate(device)]
        if np.isfinite(times).all():
            best = min(best, plain_latency(workload, list(slot_of), subgraphs))
    return best


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2]), st.booleans())
def test_is_the_brute_force_optimum(data: st.DataObject, subgraphs: int, unlike: bool) -> None:
    workload = data.draw(workloads(training=False, unlike=unlike, most_nodes=4))
    expected = plain_best_latency(workload, subgraphs)
    try:
        found = place_for_latency(workload, subgraphs=subgraphs, time_limit=30, workers=1)
    except Infeasible:
        assert expected == float("inf")
        return
    assert latency_violations(workload, found.answer, subgraphs) == []
    assert latency_cost(workload, found.answer) == pytest.approx(found.cost)
    assert found.cost == pytest.approx(expected, rel=1e-6)
    assert found.lower_bound <= expected * (1 + 1e-9) + 1e-9
    assert critical_path(workload) <= expected + 1e-9
    assert path_bound(workload, subgraphs, ENDLESS) <= expected + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([1, 2]))
def test_finish_times_are_the_plain_ones(data: st.DataObject, subgraphs: int) -> None:
    workload = data.draw(workloads(training=False, most_nodes=6))
    slots = slots_of(workload, subgraphs)
    choice = st.integers(-1, len(slots.stages) - 1)
    slot_of = [data.draw(choice) for _ in range(workload.nodes)]
    times = np.where(np.array(slot_of) >= 0, slots.slot_time[np.arange(workload.nodes), slot_of], slots.host_time)
    if np.isfinite(times).all():
        assert slots.finish_times(np.array(slot_of))[0] == pytest.approx(plain_latency(workload, slot_of, subgraphs))


@pytest.mark.parametrize("name", LISTED)
def test_no_worse_than_the_listed_baselines(name: str, published: Path) -> None:
    workload = read_workload(published / "place" / "latency" / f"{name}.json.xz")
    greedy, throughput, cpus = LISTED[name]
    slots = slots_of(workload)
    assert slots.finish_times(np.full(workload.nodes, -1))[0] == pytest.approx(cpus, rel=1e-5)
    found = place_for_latency(workload, time_limit=4)
    assert latency_violations(workload, found.answer) == []
    assert found.cost < min(greedy, throughput)
    assert found.lower_bound > 0.8 * found.cost


def test_bert_is_proved_and_greedy_was_already_best(published: Path) -> None:
    workload = read_workload(published / "place" / "latency" / "layer_bert24_inference.json.xz")
    found = place_for_latency(workload, time_limit=10)
    assert found.optimal
    assert found.cost == pytest.approx(100.2185, rel=1e-6)
    slots = slots_of(workload)
    assert min(slots.finish_times(fill)[0] for fill in greedy_fills(slots)) == pytest.approx(found.cost)


@pytest.mark.parametrize(("name", "share", "known"), [("op_bert_l-3", 0.998, 408.474), ("op_resnet50", 0.974, 651.121)])
def test_paths_pay_for_what_lies_beside_them(name: str, share: float, known: float, published: Path) -> None:
    """Without that the bounds were 0.976 and 0.813 times the best latencies known (0.939 without the memory of ways)."""
    workload = read_workload(published / "place" / "latency" / f"{name}_inference.json.xz")
    assert share * known <= path_bound(workload, 1, ENDLESS) <= known


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(0, 2), st.integers(1, 2))
def test_a_way_beside_the_path_is_never_charged_too_much(data: st.DataObject, beside: int, along: int) -> None:
    """A diamond whose sides have so many nodes, tight in memory: every placement is looked at."""
    nodes = along + beside + 2
    chains = [[0, *range(1, 1 + along), nodes - 1], [0, *range(1 + along, nodes - 1), nodes - 1]]
    edges = {edge for chain in chains for edge in itertools.pairwise(chain)}
    numbers = st.sampled_from([0.25, 1.0, 2.0, 3.0, 5.0])
    drawn = np.array([[data.draw(numbers) for _ in range(nodes)] for _ in range(3)])
    workload = Workload(
        kinds=(
            DeviceKind("accelerator", 3, data.draw(st.sampled_from([5.0, 7.0, 9.0]))),
            DeviceKind("cpu", 1, host=True),
        ),
        times=np.column_stack([drawn[0], 8 * drawn[0]]),
        memory=drawn[1],
        transfer=drawn[2],
        edges=np.array(sorted(edges)),
        classes=np.array([data.draw(st.integers(0, 2 * nodes)) for _ in range(nodes)]),
    )
    slots = slots_of(workload)
    every = (np.array(choice) for choice in itertools.product(range(-1, 3), repeat=nodes))
    best = min(slots.finish_times(choice)[0] for choice in every if slots.fits(choice))
    assert path_bound(workload, 1, ENDLESS) <= best * (1 + 1e-9)


def test_refuses_training() -> None:
    both = Workload(
        (DeviceKind("accelerator", 1),), np.ones((2, 1)), np.zeros(2), np.zeros(2), np.array([[0, 1]]), np.array([0, 1])
    )
    with pytest.raises(ProblemError, match="forward"):
        place_for_latency(both)
