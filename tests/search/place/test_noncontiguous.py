"""The non-contiguous integer program against brute force, and never worse than the contiguous optimum."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("field", ["size", "fast", "host"])
def test_a_number_beyond_64_bits_fits_nowhere_or_is_a_device_nobody_takes(field: str, tmp_path: Path) -> None:
    huge = {field: 10**18}
    nodes = [{"id": str(i), "times": [float(i + 1), None if i == 3 else 4.0], "size": 5.0} for i in range(6)]
    nodes[2] |= {"times": [huge.get("fast", 3.0), huge.get("host", 4.0)], "size": huge.get("size", 5.0)}
    kinds = [{"name": "fast", "count": 2, "memory": 50.0}, {"name": "host", "count": 1, "host": True}]
    edges = [
        {"sourceId": a, "destId": b, "cost": 0.1} for a, b in ("01", "03", "05", "12", "14", "23", "25", "34", "45")
    ]
    path = tmp_path / "huge.json"
    path.write_text(json.dumps({"kinds": kinds, "nodes": nodes, "edges": edges}))
    assert place_anywhere(read_workload(path), Rules(), time_limit=5.0).cost < 13.0
