"""Which memory limit binds, what needs least, and what users are told when nothing fits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.search.choose import Edge, Problem, Usage, evaluate, solve
from shardwright.search.limits import by_memory, more_room
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("2xH100")


@pytest.fixture(scope="module")
def gpt() -> Graph:
    resolved = resolve("gpt:small", batch=64)
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.fixture(scope="module")
def smallest(gpt: Graph) -> float:
    return plan_graph(gpt, CLUSTER, Options(search="least-memory")).prediction.memory_bytes


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_by_memory_finds_the_least_usage_of_all_choices(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, size=4)
    forbidden = np.where(random.random((sizes[0], sizes[1])) < 0.3, np.inf, 0.0)
    forbidden[0, 0] = 0.0
    edges = [
        Edge(0, 1, random.random((sizes[0], sizes[1])) + forbidden),
        Edge(2, 3, random.random((sizes[2], sizes[3]))),
    ]
    usages = [Usage(node, 0, 1, random.integers(1, 100, size).astype(float)) for node, size in enumerate(sizes)]
    problem = Problem([random.random(size) for size in sizes], edges, usages, float("inf"))
    found = evaluate(problem, solve(by_memory(problem)).answer)
    every = [evaluate(problem, np.array(c)) for c in itertools.product(*map(range, sizes))]
    least = min(e.peak for e in every if np.isfinite(e.cost))
    assert least <= found.peak <= least * 1.01  # seconds may be worth a few thousandths of the bytes


def test_the_limit_that_was_asked_for_is_named_with_the_smallest_peak(gpt: Graph, smallest: float) -> None:
    options = Options(memory_limit=0.9 * smallest)
    with pytest.raises(Infeasible, match="memory limit of") as caught:
        plan_graph(gpt, CLUSTER, options)
    named = re.search(r"needs ([\d.]+) MB per device, more than the memory limit of ([\d.]+) MB", caught.value.message)
    assert named is not None
    needed = 1e6 * float(named[1])
    assert options.memory_limit < needed <= 1.005 * smallest  # three digits are told
    assert f"Raise the limit above {named[1]} MB" in caught.value.remedy
    assert plan_graph(gpt, CLUSTER, replace(options, memory_limit=1.005 * needed)).prediction.fits


def test_least_memory_is_no_larger_than_any_other_plan(gpt: Graph, smallest: float) -> None:
    """The search's estimate does not see all bytes, so recipes take part in the choice of the smallest too."""
    others = plan_graph(gpt, CLUSTER, Options(baselines=("data-parallel", "fsdp", "megatron"), recompute="blocks"))
    for candidate in others.candidates:
        assert candidate.prediction is not None
        assert smallest <= candidate.prediction.memory_bytes


def test_a_recipe_that_cannot_fit_says_what_it_keeps_at_least(gpt: Graph) -> None:
    with pytest.raises(Infeasible, match=r"every data-parallel strategy take at least .* more than the 10 kB allowed"):
        plan_graph(gpt, CLUSTER, Options(search="data-parallel", memory_limit=1e4, recompute="none"))


def test_asking_to_recompute_where_there_are_no_blocks_is_refused() -> None:
    resolved = resolve("alexnet:small", batch=4)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    with pytest.raises(ShardwrightError, match="no repeated block") as caught:
        plan_graph(graph, CLUSTER, Options(recompute="blocks"))
    assert "auto or none" in caught.value.remedy


def test_who_lacks_memory_is_never_told_to_ask_for_less() -> None:
    """Where the device has room above the limit that was asked for, the limit goes up; else the device is too small."""
    device = parse_cluster("8xH100").device
    usable = float(device.usable_memory)
    assert more_room(device, 0.5 * usable, 0.7 * usable).startswith("Raise the limit above")
    for limit, needed in ((usable, 1.5 * usable), (0.5 * usable, 1.5 * usable)):
        assert "more memory" in more_room(device, limit, needed)
