"""Heuristics and baselines: always valid, their loads recompute, and close to the optimum where it is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from shardwright.errors import Infeasible
from shardwright.search.place import baselines
from shardwright.search.place.formats import read_split, read_workload
from shardwright.search.place.heuristics import candidates, place_heuristically, refine, stage_totals
from shardwright.search.place.lines import cut_best, fill_to_limit, line_up
from shardwright.search.place.measure import throughput_cost, violations
from shardwright.search.place.problem import DeviceKind, Rules, Workload
from shardwright.search.place.reductions import reduce

from .plain import plain_best, plain_value, workloads
from .test_contiguous import OPTIMA


def layered(nodes: int, width: int, devices: int, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    target = np.repeat(np.arange(width, nodes), 2)
    source = (target // width - 1) * width + rng.integers(0, width, len(target))
    return Workload(
        kinds=(DeviceKind("accelerator", devices),),
        times=rng.exponential(1.0, (nodes, 1)),
        memory=np.ones(nodes),
        transfer=rng.exponential(0.1, nodes),
        edges=np.unique(np.stack([source, target], axis=1), axis=0),
    )


@settings(max_examples=80, deadline=None)
@given(workloads(unlike=True))
def test_valid_recomputes_and_bounded(workload: Workload) -> None:
    for rules in (Rules(), Rules(overlap=True)):
        try:
            found = place_heuristically(workload, rules)
        except Infeasible:
            continue
        assert violations(workload, found.answer) == []
        assert plain_value(workload, found.answer, rules) == pytest.approx(found.cost)
        best = plain_best(workload, rules)
        assert found.lower_bound - 1e-9 <= best <= found.cost + 1e-9


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_moves_keep_their_books(workload: Workload) -> None:
    """The loads that refinement updates move by move are those of its final answer, and never above the start's."""
    blocks = reduce(workload)
    for cut in candidates(blocks, Rules()):
        if not np.isfinite(stage_totals(blocks, cut)).all():
            continue
        _, before = refine(blocks, cut, Rules(), passes=0)
        improved, after = refine(blocks, cut, Rules(), passes=20)
        _, counted = refine(blocks, improved, Rules(), passes=0)
        assert after <= before + 1e-9
        assert counted == pytest.approx(after)


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_best_cut_is_never_above_filling(workload: Workload) -> None:
    blocks = reduce(workload)
    line = line_up(blocks, np.arange(blocks.count))
    filled = fill_to_limit(line, Rules())
    if filled is None:
        return
    best = cut_best(line, Rules(), *filled)
    assert best is not None
    loads = [stage_totals(blocks, cut) for cut in (filled[0], best)]
    pays = [np.array([k.pays for k in workload.kinds])[cut.kinds] for cut in (filled[0], best)]
    worst = [(t[:, 0] + t[:, 1:3].sum(axis=1) * p).max() for t, p in zip(loads, pays, strict=True)]
    assert worst[0] <= filled[1] * (1 + 1e-9) + 1e-9
    assert worst[1] <= worst[0] + 1e-9


@pytest.mark.parametrize("name", OPTIMA)
def test_within_a_tenth_of_the_optimum(name: str, published: Path) -> None:
    workload = read_workload(published / "place" / "throughput" / f"{name}.json.xz")
    found = place_heuristically(workload)
    assert violations(workload, found.answer) == []
    assert found.cost <= 1.1 * OPTIMA[name]


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("bert24_inference", 20.084),
        ("bert24_training", 49.405),
        ("gnmt_inference", 46.209),
        ("resnet50_inference", 43.918),
        ("inceptionv3_inference", 102.482),
    ],
)
def test_expert_splits_cost_what_is_listed(name: str, load: float, published: Path) -> None:
    path = published / "place" / "throughput" / f"layer_{name}.json.xz"
    split = read_split(published / "place" / "experts" / f"{name}_expert.json.xz", path)
    workload = read_workload(path)
    assert throughput_cost(workload, split) == pytest.approx(load, abs=1e-3)
    assert violations(workload, split) == []


def test_a_large_layered_graph_is_balanced() -> None:
    workload = layered(30_000, 100, 16)
    found = place_heuristically(workload)
    assert violations(workload, found.answer) == []
    assert found.cost == pytest.approx(throughput_cost(workload, found.answer))
    assert found.gap < 0.1


def test_baselines_are_placements() -> None:
    workload = layered(200, 10, 4)
    single = throughput_cost(workload, baselines.one_device(workload))
    assert single == pytest.approx(workload.times.sum())
    shares = baselines.equal_shares(workload)
    assert violations(workload, shares) == []
    assert throughput_cost(workload, shares) < single
    searched = baselines.local_search(workload)
    assert violations(workload, searched, contiguous=False) == []
    assert throughput_cost(workload, searched) < single
