"""The exact contiguous search against brute force, and against the published optima."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible, TooLarge
from shardwright.search.place.contiguous import place_contiguous
from shardwright.search.place.formats import read_workload
from shardwright.search.place.measure import throughput_cost, violations
from shardwright.search.place.problem import DeviceKind, Rules, Workload

from .plain import plain_best, plain_value, workloads

OPTIMA = {
    "layer_bert24_inference": 17.78990625,
    "layer_bert24_training": 41.7458125,
    "layer_gnmt_inference": 32.910658203125,
    "layer_resnet50_inference": 33.774666015625,
    "layer_resnet50_training": 78.6318125,
    "op_bert_l-3_inference": 27.9185676799,
    "op_bert_l-3_training": 65.3031491221,
    "op_bert_l-6_inference": 29.5795058065,
    "op_resnet50_inference": 124.348849774,
}


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.booleans(),
    st.sampled_from(
        [Rules(), Rules(overlap=True), Rules(replicate=True), Rules(separate_passes=True), Rules(True, True)]
    ),
)
def test_is_the_brute_force_optimum(data: st.DataObject, unlike: bool, rules: Rules) -> None:
    workload = data.draw(workloads(unlike=unlike, most_nodes=5, parameters=rules.replicate))
    expected = plain_best(workload, rules)
    try:
        found = place_contiguous(workload, rules)
    except Infeasible:
        assert expected == float("inf")
        return
    assert violations(workload, found.answer) == []
    assert plain_value(workload, found.answer, rules) == pytest.approx(found.cost)
    assert found.cost == pytest.approx(expected)
    assert found.optimal and found.lower_bound == found.cost


@settings(max_examples=60, deadline=None)
@given(workloads(most_nodes=6, training=False))
def test_a_fixed_order_is_valid_and_no_better_than_free_order(workload: Workload) -> None:
    try:
        free = place_contiguous(workload)
    except Infeasible:
        return
    from shardwright.search.place.reductions import reduce

    try:
        along = place_contiguous(workload, order=np.arange(reduce(workload).count))
    except Infeasible:
        return  # memory may only allow another order
    assert violations(workload, along.answer) == []
    assert along.cost >= free.cost - 1e-9
    assert along.lower_bound <= free.cost + 1e-9 and not along.optimal


@pytest.mark.parametrize("name", OPTIMA)
def test_published_optima(name: str, published: Path) -> None:
    workload = read_workload(published / "place" / "throughput" / f"{name}.json.xz")
    found = place_contiguous(workload)
    assert found.cost == pytest.approx(OPTIMA[name], rel=1e-6)
    assert violations(workload, found.answer) == []
    assert throughput_cost(workload, found.answer) == found.cost


def test_solves_what_the_published_program_does_not(published: Path) -> None:
    workload = read_workload(published / "place" / "throughput" / "layer_inceptionv3_inference.json.xz")
    found = place_contiguous(workload)
    assert found.optimal and found.seconds < 120
    assert found.cost == pytest.approx(51.5519, rel=1e-5)  # the listed fixed-order value, here proved optimal
    assert violations(workload, found.answer) == []


def test_refuses_when_nothing_fits() -> None:
    heavy = Workload(
        (DeviceKind("accelerator", 2, 1.0),), np.ones((2, 1)), np.full(2, 5.0), np.zeros(2), np.zeros((0, 2))
    )
    with pytest.raises(Infeasible):
        place_contiguous(heavy)


def test_refuses_too_many_ideals() -> None:
    wide = Workload((DeviceKind("accelerator", 2),), np.ones((40, 1)), np.zeros(40), np.zeros(40), np.zeros((0, 2)))
    with pytest.raises(TooLarge, match="ideals"):
        place_contiguous(wide, most_ideals=1000)
