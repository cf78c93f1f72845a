"""The trade-off curve: monotone, from the fastest to the smallest, and near the exact one where that can be enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.planner.frontier import frontier
from shardwright.plans import Plan
from shardwright.search.choose import evaluate
from shardwright.search.formulate import formulate
from shardwright.simulator import simulate
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("2xH100")


def _points(plans: list[Plan]) -> list[tuple[float, float]]:
    return [(plan.prediction.memory_bytes, plan.prediction.step_seconds) for plan in plans]


@pytest.fixture(scope="module")
def gpt() -> Graph:
    resolved = resolve("gpt:small,width=256,heads=4,seq=64", batch=64)
    return capture(resolved.model, resolved.args, resolved.kwargs)


def test_the_curve_falls_from_the_fastest_plan_to_the_smallest(gpt: Graph) -> None:
    points = _points(frontier(gpt, CLUSTER, Options(), steps=5))
    assert 2 <= len(points) <= 5
    for (memory, seconds), (less, longer) in itertools.pairwise(points):
        assert less < memory and longer > seconds
    best = plan_graph(gpt, CLUSTER, Options(fewer_devices=False)).prediction
    assert points[0][1] <= best.step_seconds * (1 + 1e-9)
    smallest = plan_graph(gpt, CLUSTER, Options(search="least-memory")).prediction
    assert points[-1][0] <= smallest.memory_bytes * (1 + 1e-9)


def test_a_recipe_has_a_curve_of_its_own(gpt: Graph) -> None:
    plans = frontier(gpt, CLUSTER, Options(search="fsdp", baselines=()), steps=3)
    assert plans and all(plan.search == "fsdp" for plan in plans)


class Tiny(torch.nn.Module):
    """Two products and a loss: a batch so large that gathering weights is cheaper than moving activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2048, 2048, bias=False)
        self.second = torch.nn.Linear(2048, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def _exact(graph: Graph) -> list[tuple[float, float]]:
    """Every strategy of a tiny model simulated: the undominated pairs of memory and time, the fastest first."""
    mesh = mesh_of(CLUSTER)
    stated = formulate(graph, mesh)
    found = set()
    for choice in itertools.product(*(range(size) for size in stated.problem.sizes)):
        if np.isfinite(evaluate(stated.problem, np.array(choice)).cost):
            timeline = simulate(graph, stated.strategy(np.array(choice)), mesh)
            found.add((timeline.seconds, float(timeline.peak_bytes)))
    curve: list[tuple[float, float]] = []
    for seconds, memory in sorted(found):
        if not curve or memory < curve[-1][0]:
            curve.append((memory, seconds))
    return curve


def test_against_every_strategy_of_a_tiny_model() -> None:
    """Both ends are met; no plan is slower than what fits into its memory, no strategy is far from every plan.

    Plans may even lie below the enumerated curve: gathered parameters that stay until backward are not enumerated.
    """
    with torch.device("meta"):
        model, x = Tiny(), torch.empty(16384, 2048)
    graph = capture(model, (x,), {})
    exact = _exact(graph)
    assert len(exact) >= 3
    points = _points(frontier(graph, CLUSTER, Options(recompute="none"), steps=8))
    assert points[0][1] <= exact[0][1] * 1.02
    assert points[-1][0] <= exact[-1][0] * 1.02
    for memory, seconds in points:
        assert seconds <= 1.02 * min(s for m, s in exact if m <= memory * 1.001)
    for memory, seconds in exact:
        assert min(s for m, s in points if m <= memory * 1.02) <= 1.02 * seconds
