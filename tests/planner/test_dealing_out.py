"""One mesh over unlike nodes: rows dealt out by speed, each kind simulated, never slower than in equal parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, plan_jointly
from shardwright.planner.dealing_out import with_shares
from shardwright.planner.joint import NEVER
from shardwright.planner.trials import predict
from shardwright.plans import Plan
from shardwright.plans.serial import from_json, to_json
from shardwright.simulator import simulate, simulate_plan
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("2xA100+2xH100")
QUICK = Options(baselines=(), recompute="none", fewer_devices=False)


@pytest.fixture(scope="module")
def graph() -> Graph:
    resolved = resolve("gpt:layers=2,width=1024,heads=8,vocab=512,seq=512", batch=32, dtype="bfloat16")
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.fixture(scope="module")
def equal(graph: Graph) -> Plan:
    return plan_graph(graph, CLUSTER, QUICK)


@pytest.fixture(scope="module")
def dealt(graph: Graph) -> Plan:
    return plan_jointly(graph, CLUSTER, QUICK, pipelines=NEVER)[0]


def test_faster_devices_have_more_rows_and_all_are_done_at_once(graph: Graph, equal: Plan, dealt: Plan) -> None:
    slow, fast = dealt.strategy.shares["node"]
    assert slow < fast and slow * 32 == round(slow * 32)
    assert dealt.prediction.step_seconds < 0.9 * equal.prediction.step_seconds
    steps = [simulate(graph, dealt.strategy, dealt.mesh, coordinate=(place, 0)).seconds for place in range(2)]
    assert dealt.prediction.step_seconds == max(steps) < 1.3 * min(steps)
    assert dealt.prediction.step_seconds == simulate_plan(dealt, graph).seconds
    other = replace(dealt.strategy, shares={"node": (fast, slow)})
    assert predict(graph, other, dealt.mesh, "adamw").step_seconds > equal.prediction.step_seconds
    assert [row.name for row in dealt.candidates][:2] == ["auto", "equal parts"]
    assert any("rows on H100" in note for note in dealt.notes)
    again = from_json(to_json(dealt), "plan")
    assert (again.strategy, again.mesh) == (dealt.strategy, dealt.mesh)


def test_no_share_is_below_the_bound(graph: Graph, equal: Plan, dealt: Plan) -> None:
    """Equal parts of the weakest devices are no bound for shares; no dealing of the rows is below that of the fastest."""
    assert dealt.proof.step_bound < dealt.prediction.step_seconds < equal.proof.step_bound
    assert "unequal shares between unlike nodes" in dealt.proof.scope
    for rows in range(2, 31, 2):
        shared = replace(dealt.strategy, shares={"node": (rows / 32, 1 - rows / 32)})
        assert predict(graph, shared, dealt.mesh, "adamw").step_seconds > dealt.proof.step_bound


def test_each_kind_must_have_room(graph: Graph, equal: Plan, dealt: Plan) -> None:
    """The faster kind holds more rows: where it has no room for them, it is given fewer."""
    assert dealt.prediction.memory_bytes > equal.prediction.memory_bytes
    limit = (dealt.prediction.memory_bytes + equal.prediction.memory_bytes) / 2
    assert not predict(graph, dealt.strategy, dealt.mesh, "adamw", limit).fits
    tight = with_shares(equal, graph, CLUSTER, replace(QUICK, memory_limit=limit))
    assert tight.prediction.fits and tight.prediction.memory_bytes <= limit


def test_like_devices_have_equal_parts(graph: Graph, equal: Plan) -> None:
    alike = parse_cluster("2x2xH100")
    assert mesh_of(alike).kinds == ()
    assert with_shares(equal, graph, alike, QUICK) is equal
