"""What a user gets by pinning one parameter is found unasked: two problems of ``bench/bounds.py`` where it was not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from bounds import TOLERANCE, cluster_of, random_problem
from shardwright.cluster import meshes
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.planner.trials import FLAT, NO_GAP, Trials
from shardwright.planner.varying import NEAR, varied
from shardwright.search.bills import EXPECTED
from shardwright.search.formulate import describe_graph


@pytest.mark.parametrize(
    ("seed", "pin"),
    [
        (15, "right.0.weight=S1"),  # towers on 8xA100-40GB: a little more in sum, 4 % less in time
        (49, "out.weight=S0"),  # words on 2x2xA100-40GB: an answer half a rung below the last that was tried
    ],
)
def test_a_pin_finds_nothing_faster(seed: int, pin: str) -> None:
    _, model, example, cluster = random_problem(seed)
    graph = capture(model, example, {})
    free, pinned = (
        plan_graph(graph, cluster_of(cluster), Options(baselines=(), fewer_devices=False, pins=pins, max_axes=1))
        for pins in ((), (pin,))
    )
    assert free.prediction.step_seconds <= pinned.prediction.step_seconds * (1 + TOLERANCE)


def test_neighbours_differ_and_are_near_in_sum() -> None:
    _, model, example, cluster = random_problem(15)
    graph = capture(model, example, {})
    trials, mesh = Trials(describe_graph(graph), FLAT, NO_GAP), meshes(cluster_of(cluster), 1)[0]
    least, best = trials.least(mesh, "auto", EXPECTED, limited=False)
    found = varied(trials, mesh, [EXPECTED])
    costs = [searched.solution.cost for searched in found]
    assert len({searched.solution.answer.tobytes() for searched in found} | {best.tobytes()}) == len(found) + 1
    assert costs == sorted(costs) and least <= costs[0] and costs[-1] <= NEAR * least
