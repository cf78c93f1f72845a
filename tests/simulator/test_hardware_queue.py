"""A plan's step with work queues in hardware: its rows, what they cost, and who wins when."""

from __future__ import annotations

import json

import pytest

from cli.test_commands import run
from shardwright.cluster import parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.simulator import simulate_plan
from shardwright.simulator.hardware_queue import Work, scenes, work_of
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("4xH100")


@pytest.fixture(scope="module")
def graph():
    built = resolve("gpt:layers=2,width=256,heads=4,vocab=512", batch=32)
    return capture(built.model, built.args, built.kwargs)


def planned(graph, search):
    return plan_graph(graph, CLUSTER, Options(search, (), max_axes=1, fewer_devices=False))


def test_rows_and_what_is_not_shared_make_the_step(graph):
    plan = planned(graph, "fsdp")
    work = work_of(plan, graph)
    assert (work.workers, work.rows) == (4, 32)
    assert work.row_seconds * 8 + work.fixed_seconds == pytest.approx(simulate_plan(plan, graph).seconds, rel=1e-9)
    assert work.latency == 2 * plan.meshes[0].axes[0].latency and work.travel > 0


def test_equal_shares_of_equal_devices_are_the_plan_s_step():
    work = Work(4, 32, 2.0, 0.5, 0.0, 0.0)
    for scene in scenes(work):
        assert scene.possible <= min(scene.queues, scene.both, scene.software, scene.equal) * (1 + 1e-9)
        assert scene.queues <= scene.equal * (1 + 1e-9)  # free queues never cost anything
    slow = next(scene for scene in scenes(work) if scene.name == "one at half speed")
    assert slow.equal == 32.5 and slow.software < 22.0 and slow.queues < 22.0


def test_a_latency_of_many_rows_does_not_pay():
    free, dear = (scenes(Work(4, 32, 2.0, 0.5, 0.0, 0.0), latency)[0] for latency in (0.0, 40.0))
    assert dear.queues > free.queues and dear.queues > dear.equal


def test_plans_without_rows_to_hand_over_are_refused(graph):
    with pytest.raises(ShardwrightError, match="no rows"):
        work_of(planned(graph, "megatron"), graph)


def test_the_command_prints_a_row_for_every_scene(graph, tmp_path, monkeypatch, capsys):
    path = str(tmp_path / "plan.json")
    planned(graph, "fsdp").save(path)
    assert run(monkeypatch, "simulate", path, "--hardware-queue", "--json") == 0
    told = json.loads(capsys.readouterr().out)["hardware_queue"]
    assert told["work"]["workers"] == 4 and len(told["scenes"]) == 6
    assert run(monkeypatch, "simulate", path, "--hardware-queue", "--queue-latency", "0") == 0
    assert "one at half speed" in capsys.readouterr().out
    assert run(monkeypatch, "simulate", path, "--queue-latency", "1") == 2
