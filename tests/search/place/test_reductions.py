"""Reductions: classes, twins of backward-only classes, cycles, free blocks; and the way back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from shardwright.search.place.measure import stage_costs, throughput_cost
from shardwright.search.place.problem import DeviceKind, Placement, Stage, Workload, one_stage_per_device
from shardwright.search.place.reductions import (
    absorb_free_blocks,
    class_order,
    contract_classes,
    fuse_cycles,
    reduce,
    strong_components,
)

from .plain import forward_pairs, plain_load, plain_value, workloads


def chain(times: list[float], edges: list[tuple[int, int]], **more: object) -> Workload:
    n = len(times)
    return Workload(
        kinds=(DeviceKind("accelerator", 2),),
        times=np.array(times)[:, None],
        memory=np.zeros(n),
        transfer=np.ones(n),
        edges=np.array(edges),
        **more,  # type: ignore[arg-type]  # keyword arguments of tests
    )


def test_a_class_across_the_graph_makes_one_block_of_what_lies_between() -> None:
    workload = chain([1.0, 1.0, 1.0, 1.0], [(0, 1), (1, 2), (2, 3)], classes=np.array([5, 6, 5, 7]))
    assert fuse_cycles(contract_classes(workload)).count == 2


def test_backward_only_classes_are_tied_by_mirrored_edges() -> None:
    backward = np.array([False, False, True, True])
    workload = chain([1.0] * 4, [(0, 1), (2, 3)], backward=backward, classes=np.array([0, 1, 2, 0]))
    assert class_order(workload).tolist() == [[0, 1], [0, 2]]


def test_free_ends_join_their_only_neighbour() -> None:
    workload = chain([0.0, 2.0, 3.0, 0.0], [(0, 1), (1, 2), (2, 3)])
    blocks = absorb_free_blocks(contract_classes(workload))
    assert blocks.count == 2
    assert blocks.back(np.array([10, 20])).tolist() == [10, 10, 20, 20]


def test_components_come_in_topological_order() -> None:
    edges = np.array([[4, 2], [2, 3], [3, 2], [2, 0], [0, 1]])
    found = strong_components(5, edges)
    assert found[2] == found[3]
    assert all(found[a] <= found[b] for a, b in edges)
    assert sorted(set(found.tolist())) == [0, 1, 2, 3]


@settings(max_examples=80, deadline=None)
@given(workloads())
def test_order_edges_are_those_of_the_rule_and_blocks_keep_sums(workload: Workload) -> None:
    expected = {(a, b) for a, b in forward_pairs(workload) if a != b}
    assert {(a, b) for a, b in class_order(workload).tolist()} == expected
    blocks = reduce(workload)
    assert (blocks.order[:, 0] < blocks.order[:, 1]).all()
    np.testing.assert_allclose(blocks.memory.sum(), workload.memory.sum())
    np.testing.assert_allclose(blocks.times.sum(axis=(0, 2)), workload.times.sum(axis=0))


@settings(max_examples=80, deadline=None)
@given(workloads(unlike=True))
def test_measured_loads_are_the_plain_ones(workload: Workload) -> None:
    from shardwright.search.place.problem import Rules

    stages = one_stage_per_device(workload.kinds)
    host = len(stages) - 1
    stage_of = np.array([(3 * c) % len(stages) for c in workload.classes])
    kinds = np.array([stage.kind for stage in stages])
    stage_of = np.where(np.isfinite(workload.times[np.arange(workload.nodes), kinds[stage_of]]), stage_of, host)
    placement = Placement(stage_of, stages)
    for rules in (Rules(), Rules(overlap=True), Rules(separate_passes=True), Rules(True, False, True)):
        loads = stage_costs(workload, placement).loads(rules)
        for s, stage in enumerate(stages):
            members = {*np.flatnonzero(stage_of == s).tolist()}
            np.testing.assert_allclose(loads[s], plain_load(workload, members, stage.kind, 1, rules))
        assert abs(throughput_cost(workload, placement, rules) - plain_value(workload, placement, rules)) < 1e-9


def test_stages_that_share_a_device_add_up() -> None:
    workload = chain([1.0, 2.0, 4.0], [(0, 1), (1, 2)])
    shared = Placement(np.array([0, 1, 2]), (Stage(0, (0,)), Stage(0, (1,)), Stage(0, (0,))))
    assert throughput_cost(workload, shared) == (1 + 1) + (4 + 1)
