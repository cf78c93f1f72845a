"""Piper's published optima, and its rule written down plainly on small graphs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.published.piper import read_piper, solve_piper, stage_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import Infeasible, ProblemError

DATA = Path(__file__).parents[2] / "data" / "joint"
GIB = 2**30


@pytest.mark.parametrize(
    ("devices", "gib", "listed"),
    [(8, 8, 0.1658558), (8, 80, 0.1220073), (32, 2, 0.0665495), (64, 2, 0.0320301), (64, 8, 0.0202006)],
)
def test_bert_32_is_proved(devices: int, gib: int, listed: float) -> None:
    problem = read_piper(DATA / "bert32a100.json", devices=devices, memory=gib * GIB, bandwidth=25 * GIB)
    found = solve_piper(problem)
    assert found.cost == pytest.approx(listed, rel=3e-6)  # as many digits as are listed
    assert found.optimal
    rows = stage_rows(problem, found.answer)
    assert sorted(node for row in rows for node in row["nodes"]) == list(range(37))
    assert all(row["memory"] <= gib * GIB for row in rows)
    assert sum(row["devices"] for row in rows) <= devices


def test_bert_32_does_not_fit() -> None:
    with pytest.raises(Infeasible, match="8 devices"):
        solve_piper(read_piper(DATA / "bert32a100.json", devices=8, memory=2 * GIB, bandwidth=25 * GIB))


def test_resnet_50_is_proved() -> None:
    found = solve_piper(read_piper(DATA / "piper_resnet50.json", devices=8, memory=4 * GIB, bandwidth=25 * GIB))
    assert found.cost == pytest.approx(73.493286, rel=1e-7)
    assert found.optimal


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    edges = [pair for pair in itertools.combinations(range(n), 2) if draw(st.booleans())]

    def way(node: int, slow: float, light: int, parameters: int, sync: int) -> dict[str, Any]:
        return {
            "timePerSample": 1.0 + slow,
            "parameterSize": float(parameters),
            "memoryUsageA": float(4 - light),
            "memoryUsageB": 1.0,
            "syncTimeFw": {str(a): float(sync) for a, b in edges if b == node},
            "syncTimeBw": {str(b): float(sync) for a, b in edges if a == node},
        }

    nodes = []
    for node in range(n):
        parameters, sync = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        speed = draw(st.sampled_from([0.0, 0.5, 2.0]))
        ways = [way(node, speed, 0, parameters, sync)]
        ways.append(way(node, speed + draw(st.sampled_from([0.3, 0.7])), draw(st.integers(1, 4)), parameters, sync))
        fast = [{**w, "timePerSample": w["timePerSample"] * 0.6} for w in ways]
        nodes.append({"id": node, "TMPCs": {"1": ways, "2": fast}})
    return {
        "maxDevices": draw(st.integers(1, 3)),
        "maxMemoryPerDevice": draw(st.sampled_from([6.0, 9.0, 14.0, 100.0])),
        "bandwidth": 8.0,
        "mbsInBatch": 4,
        "nodes": nodes,
        "edges": [{"sourceId": a, "destId": b, "communicationCost": 1.5} for a, b in edges],
    }


def plain_best(data: dict[str, Any]) -> float:
    """Every ordered partition, every degree, every way of every node, by the published rule."""
    n = len(data["nodes"])
    edges = [(e["sourceId"], e["destId"], e["communicationCost"]) for e in data["edges"]]
    best = math.inf
    for labels in itertools.product(range(n), repeat=n):
        count = max(labels) + 1
        if set(labels) != set(range(count)) or any(labels[a] > labels[b] for a, b, _ in edges):
            continue
        for degrees in itertools.product([(t, d) for t in (1, 2) for d in (1, 2, 4)], repeat=count):
            if sum(t * d for t, d in degrees) > data["maxDevices"]:
                continue
            slowest = 0.0
            for stage, (t, d) in enumerate(degrees):
                members = [v for v in range(n) if labels[v] == stage]
                held = math.ceil(sum(d for _, d in degrees[stage:]) / d)
                least = math.inf
                for ways in itertools.product((0, 1), repeat=len(members)):
                    rows = {v: data["nodes"][v]["TMPCs"][str(t)][w] for v, w in zip(members, ways, strict=True)}
                    memory = sum(r["memoryUsageA"] * held + r["memoryUsageB"] for r in rows.values())
                    if memory > data["maxMemoryPerDevice"]:
                        continue
                    moved = sum(c + rows[b]["syncTimeFw"][str(a)] for a, b, c in edges if b in rows and a not in rows)
                    moved += sum(c + rows[a]["syncTimeBw"][str(b)] for a, b, c in edges if a in rows and b not in rows)
                    parameters = sum(r["parameterSize"] for r in rows.values())
                    sums = 4 * (d - 1) * parameters / d / data["mbsInBatch"]
                    time = sum(r["timePerSample"] for r in rows.values()) / d
                    least = min(least, time + (2 * moved / d + sums) / data["bandwidth"])
                slowest = max(slowest, least)
            best = min(best, slowest)
    return best


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_small_graphs_against_trying_everything(data: dict[str, Any]) -> None:
    best = plain_best(data)
    if not np.isfinite(best):
        with pytest.raises(Infeasible):
            solve_piper(read_piper(data))
        return
    found = solve_piper(read_piper(data))
    assert found.cost == pytest.approx(best, rel=1e-12)
    assert found.optimal


def test_three_ways_are_refused_with_a_remedy() -> None:
    way = {"timePerSample": 1.0, "parameterSize": 0.0, "memoryUsageA": 0.0, "memoryUsageB": 0.0}
    way |= {"syncTimeFw": {}, "syncTimeBw": {}}
    data = {"maxDevices": 1, "maxMemoryPerDevice": 1.0, "bandwidth": 1.0, "mbsInBatch": 1, "edges": []}
    with pytest.raises(ProblemError, match="3 ways"):
        read_piper({**data, "nodes": [{"id": 0, "TMPCs": {"1": [way, way, way]}}]})
