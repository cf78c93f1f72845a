"""Gathered parameters kept until backward: those used last first, never beyond the room there is."""

from __future__ import annotations

import pytest

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, describe_graph, plan_graph, predict
from shardwright.search.formulate import Described
from shardwright.search.keeping import keep_gathered
from shardwright.search.strategies import find_strategy
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("2xH100")
MESH = mesh_of(CLUSTER)


@pytest.fixture(scope="module")
def described() -> Described:
    resolved = resolve("gpt:layers=4,width=256,heads=4,seq=64,vocab=512", batch=64)
    return describe_graph(capture(resolved.model, resolved.args, resolved.kwargs))


def test_with_room_for_all_fsdp_becomes_zero_2(described: Described) -> None:
    fsdp = find_strategy(described, MESH, "fsdp").strategy
    zero_2 = find_strategy(described, MESH, "zero-2").strategy
    kept = keep_gathered(described.graph, described.rules, fsdp, float("inf"))
    assert kept is not None
    assert kept.regathered == frozenset() == zero_2.regathered
    assert (kept.splits, kept.resting) == (zero_2.splits, zero_2.resting)


def test_what_is_used_last_is_kept_first_and_memory_grows_by_the_room_at_most(described: Described) -> None:
    graph = described.graph
    fsdp = find_strategy(described, MESH, "fsdp").strategy
    before = predict(graph, fsdp, MESH, "adamw")
    room = sum(graph.tensors[t].bytes for t in fsdp.regathered) / 3
    kept = keep_gathered(graph, described.rules, fsdp, room)
    assert kept is not None
    stays = fsdp.regathered - kept.regathered
    assert stays and kept.regathered
    assert sum(graph.tensors[t].bytes for t in stays) <= room
    after = predict(graph, kept, MESH, "adamw")
    assert after.memory_bytes <= before.memory_bytes + 1.02 * room
    assert after.sum_seconds < before.sum_seconds
    weights = {p.paths[0]: p.tensor for p in graph.parameters if p.paths[0].endswith("feed.up.weight")}
    assert weights["blocks.3.feed.up.weight"] in stays
    assert weights["blocks.0.feed.up.weight"] in kept.regathered


def test_without_room_nothing_changes(described: Described) -> None:
    fsdp = find_strategy(described, MESH, "fsdp").strategy
    assert keep_gathered(described.graph, described.rules, fsdp, 0.0) is None


def test_the_plan_found_is_no_slower_than_zero_2_which_nobody_asked_for(described: Described) -> None:
    found = plan_graph(described.graph, CLUSTER, Options(fewer_devices=False))
    other = plan_graph(described.graph, CLUSTER, Options(search="zero-2", baselines=(), fewer_devices=False))
    assert found.prediction.step_seconds <= other.prediction.step_seconds * (1 + 1e-9)
