"""The non-contiguous integer program against brute force, and never worse than the contiguous optimum."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible, ProblemError
from shardwright.search.place.formats import read_workload
from shardwright.search.place.measure import violations
from shardwright.search.place.noncontiguous import place_anywhere
from shardwright.search.place.problem import Rules, Workload

from .plain import plain_best, plain_value, workloads
from .test_contiguous import OPTIMA


@settings(max_examples=60, deadline=None)
@given(
    workloads(unlike=True, most_nodes=5), st.sampled_from([Rules(), Rules(overlap=True), Rules(separate_passes=True)])
)
def test_is_the_brute_force_optimum(workload: Workload, rules: Rules) -> None:
    expected = plain_best(workload, rules, contiguous=False)
    try:
        found = place_anywhere(workload, rules, time_limit=30, workers=1)
    except Infeasible:
        assert expected == float("inf")
        return
    assert violations(workload, found.answer, contiguous=False) == []
    assert plain_value(workload, found.answer, rules) == pytest.approx(found.cost)
    assert found.cost == pytest.approx(expected)
    assert found.optimal


@pytest.mark.parametrize("name", ["layer_resnet50_training", "op_bert_l-3_inference"])
def test_never_worse_than_contiguous_even_without_time(name: str, published: Path) -> None:
    workload = read_workload(published / "place" / "throughput" / f"{name}.json.xz")
    found = place_anywhere(workload, time_limit=1.5)
    assert violations(workload, found.answer, contiguous=False) == []
    assert found.cost <= OPTIMA[name] * (1 + 1e-9)
    assert 0 < found.lower_bound <= found.cost


def test_refuses_replication(published: Path) -> None:
    workload = read_workload(published / "place" / "throughput" / "layer_bert24_inference.json.xz")
    with pytest.raises(ProblemError, match="contiguous"):
        place_anywhere(workload, Rules(replicate=True))
