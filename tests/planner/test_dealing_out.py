"""One mesh over unlike nodes: rows dealt out by speed, each kind simulated, never slower than in equal parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, plan_jointly
from shardwright.planner.dealing_out import with_shares
from shardwright.planner.joint import NEVER, find_pipelines
from shardwright.planner.trials import predict
from shardwright.plans import Plan
from shardwright.plans.proof_text import proof_text
from shardwright.plans.serial import from_json, to_json
from shardwright.search.joint.timed import Run, Timed
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
    slow, fast = dealt.stages[0].strategy.shares["node"]
    assert slow < fast and slow * 32 == round(slow * 32)
    assert dealt.prediction.step_seconds < 0.9 * equal.prediction.step_seconds
    steps = [
        simulate(graph, dealt.stages[0].strategy, dealt.meshes[0], coordinate=(place, 0)).seconds for place in range(2)
    ]
    assert dealt.prediction.step_seconds == max(steps) < 1.3 * min(steps)
    assert dealt.prediction.step_seconds == simulate_plan(dealt, graph).seconds
    other = replace(dealt.stages[0].strategy, shares={"node": (fast, slow)})
    assert predict(graph, other, dealt.meshes[0], "adamw").step_seconds > equal.prediction.step_seconds
    assert [row.name for row in dealt.candidates][:2] == ["auto", "equal parts"]
    assert any("rows on H100" in note for note in dealt.notes)
    again = from_json(to_json(dealt), "plan")
    assert (again.stages[0].strategy, again.meshes[0]) == (dealt.stages[0].strategy, dealt.meshes[0])


def test_no_share_is_below_the_bound(graph: Graph, equal: Plan, dealt: Plan) -> None:
    """Equal parts of the weakest devices are no bound for shares; no dealing of the rows is below that of the fastest."""
    assert dealt.proof.step_bound < dealt.prediction.step_seconds < equal.proof.step_bound
    assert "rows in unequal shares, never fewer for H100" in proof_text(dealt)
    for rows in range(2, 31, 2):
        shared = replace(dealt.stages[0].strategy, shares={"node": (rows / 32, 1 - rows / 32)})
        assert predict(graph, shared, dealt.meshes[0], "adamw").step_seconds > dealt.proof.step_bound


def test_who_counts_as_the_fastest_has_no_less_than_an_equal_part(
    graph: Graph, equal: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what it takes in equal parts would be no bound."""
    monkeypatch.setattr("shardwright.planner.dealing_out._speed", lambda device: (-device.peak("bfloat16"),))
    assert with_shares(equal, graph, CLUSTER, QUICK).stages[0].strategy.shares == {}


def test_each_kind_must_have_room(graph: Graph, equal: Plan, dealt: Plan) -> None:
    """The faster kind holds more rows: where it has no room for them, it is given fewer."""
    assert dealt.prediction.memory_bytes > equal.prediction.memory_bytes
    limit = (dealt.prediction.memory_bytes + equal.prediction.memory_bytes) / 2
    assert not predict(graph, dealt.stages[0].strategy, dealt.meshes[0], "adamw", limit).fits
    tight = with_shares(equal, graph, CLUSTER, replace(QUICK, memory_limit=limit))
    assert tight.prediction.fits and tight.prediction.memory_bytes <= limit


def test_like_devices_have_equal_parts(graph: Graph, equal: Plan) -> None:
    alike = parse_cluster("2x2xH100")
    assert mesh_of(alike).kinds == ()
    assert with_shares(equal, graph, alike, QUICK) is equal


def test_a_stage_across_unlike_nodes_is_simulated_on_each_kind(graph: Graph) -> None:
    """The slower kind at its share decides; given the larger one, it decides for worse."""
    joint = find_pipelines(graph, CLUSTER, QUICK, names=())
    space = joint.space.spaces[0]
    across = [row for row in space.rows if row.price.strategy.shares and row.units == 4]
    found = Timed(space, across).plan([Run(0, 2, 4)])
    assert found is not None and space.bound() <= found.step_seconds
    plan = joint.deliver(found)
    (stage,) = plan.stages
    slow, fast = stage.strategy.shares["node"]
    assert slow < fast
    times = simulate_plan(plan, graph).times[0, space.size]
    turned = replace(plan, stages=(replace(stage, strategy=replace(stage.strategy, shares={"node": (fast, slow)})),))
    other = simulate_plan(turned, graph)
    assert other.seconds > 1.5 * plan.prediction.step_seconds
    assert other.times[0, space.size].bytes.held == times.bytes.held  # of the kind with more rows, whichever that is
    equal = replace(plan, stages=(replace(stage, strategy=replace(stage.strategy, shares={})),))
    assert plan.prediction.step_seconds < simulate_plan(equal, graph).seconds
    assert times.bytes.held > simulate_plan(equal, graph).times[0, space.size].bytes.held
