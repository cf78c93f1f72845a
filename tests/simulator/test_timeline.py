"""A simulated step: bounds, overlap, memory over time, and the trace, on small models and several strategies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwright import zoo
from shardwright.cluster import Mesh, mesh_of, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.simulator import Timeline, simulate
from shardwright.simulator.peaks import peak_of
from shardwright.simulator.trace import trace, write_trace

SEARCHES = ["data-parallel", "fsdp", "zero-2", "megatron", "megatron-sp"]


def _graph(name: str, **sizes: int) -> Graph:
    with torch.device("meta"):
        model, args, kwargs = zoo.build(name, **(dict(zoo.entry(name).small) | sizes))
    return capture(model, args, kwargs)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return _graph("gpt", width=512, seq=128, batch=16, vocab=1024, heads=8)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of(parse_cluster("2x4xH200"), (2, 4))


def _strategy(graph: Graph, mesh: Mesh, search: str) -> Strategy:
    formulation = formulate(graph, mesh, within=restriction(search, len(mesh.sizes)))
    return formulation.strategy(solve(formulation.problem, time_limit=10).answer)


@pytest.fixture(scope="module")
def timelines(graph: Graph, mesh: Mesh) -> dict[str, Timeline]:
    return {search: simulate(graph, _strategy(graph, mesh, search), mesh) for search in SEARCHES}


@pytest.mark.parametrize("search", SEARCHES)
def test_between_the_bounds(timelines: dict[str, Timeline], search: str) -> None:
    timeline = timelines[search]
    (rank,) = timeline.ranks
    assert rank.lower_bound <= timeline.seconds * (1 + 1e-9)
    assert timeline.seconds <= sum(event.seconds + event.host for event in rank.events) * (1 + 1e-9)
    assert 0 <= timeline.exposed_seconds <= timeline.seconds
    assert all(0 <= share <= 1 for share in rank.utilisation.values())


@pytest.mark.parametrize("search", SEARCHES)
def test_dependencies_point_back(timelines: dict[str, Timeline], search: str) -> None:
    for number, event in enumerate(timelines[search].ranks[0].events):
        assert all(earlier < number for earlier in event.after)


def test_gradient_reductions_hide_under_the_backward_pass(timelines: dict[str, Timeline]) -> None:
    """Data parallelism's communication is exposed only after the last backward event, however much there is."""
    timeline = timelines["data-parallel"]
    reductions = sum(e.seconds for e in timeline.ranks[0].events if e.kind == "reduce")
    assert reductions > 0
    assert timeline.exposed_seconds < timeline.ranks[0].load["node"] + timeline.ranks[0].load["gpu"]


def test_gathers_run_ahead_of_use(timelines: dict[str, Timeline]) -> None:
    events = timelines["fsdp"].ranks[0].events
    first_product = next(i for i, e in enumerate(events) if e.kind == "operator" and e.name == "linear")
    bundles = [i for i, e in enumerate(events) if e.name.endswith(" parameters") and e.collective]
    forward = [i for i in bundles if events[i].phase == "forward"]
    ahead = {events[i].node: i for i in reversed(forward)}.values()  # along a second axis they go on one by one
    assert {events[i].module[:8] for i in ahead} >= {"blocks.0", "blocks.1"}
    assert max(ahead) < first_product  # all of this small model is under way by then


def test_sharded_parameters_are_gathered_again_unless_kept(timelines: dict[str, Timeline]) -> None:
    def gathers(search: str, phase: str) -> int:
        return sum(e.collective == "all_gather" and e.phase == phase for e in timelines[search].ranks[0].events)

    assert gathers("fsdp", "backward") > 0
    assert gathers("zero-2", "backward") == 0
    assert timelines["fsdp"].communication_bytes > timelines["zero-2"].communication_bytes


def test_sharding_saves_memory(timelines: dict[str, Timeline]) -> None:
    rest = {s: peak_of(timelines[s], 0).breakdown for s in ("data-parallel", "fsdp")}
    assert rest["fsdp"]["parameters"] * 7 < rest["data-parallel"]["parameters"]
    assert timelines["fsdp"].peak_bytes < timelines["data-parallel"].peak_bytes


@pytest.mark.parametrize("search", SEARCHES)
def test_memory_over_time_agrees_with_memory_over_events(timelines: dict[str, Timeline], search: str) -> None:
    timeline = timelines[search]
    use = timeline.stage().memory
    peak = peak_of(timeline, 0)
    assert sum(peak.breakdown.values()) == max(use.curve) == sum(thing.bytes for thing in peak.alive)
    assert use.peak >= max(use.curve)  # rounding only adds
    assert use.peak <= 1.05 * max(use.curve)
    assert use.reserved >= use.peak
    seconds = [second for second, _ in timeline.memory_curve()]
    assert seconds == sorted(seconds)
    at_rest = sum(s.bytes for s in use.storages if s.born < 0)
    assert timeline.memory_curve()[-1][1] == at_rest  # everything else has died
    assert len(peak.largest) == 10 and peak.largest[0].bytes == max(thing.bytes for thing in peak.alive)


def test_inference_keeps_nothing_for_backward(graph: Graph, mesh: Mesh) -> None:
    strategy = _strategy(graph, mesh, "data-parallel")
    training, inference = simulate(graph, strategy, mesh), simulate(graph, strategy, mesh, training=False)
    assert {e.phase for e in inference.ranks[0].events} == {"forward"}
    assert inference.peak_bytes < 0.5 * training.peak_bytes
    assert "optimizer state" not in peak_of(inference, 0).breakdown


def test_the_optimizer_counts(graph: Graph, mesh: Mesh) -> None:
    strategy = _strategy(graph, mesh, "data-parallel")
    held = {o: peak_of(simulate(graph, strategy, mesh, optimizer=o), 0).breakdown for o in ("adamw", "momentum", "sgd")}
    parameters = held["adamw"]["parameters"]
    assert held["adamw"]["optimizer state"] == 2 * parameters
    assert held["momentum"]["optimizer state"] == parameters
    assert "optimizer state" not in held["sgd"]


def test_trace_is_what_perfetto_reads(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    timeline = timelines["fsdp"]
    write_trace(timeline, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document == json.loads(json.dumps(trace(timeline)))
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.seconds * 1e6)
    by_row: dict[int, float] = {}
    for event in sorted(spans, key=lambda e: e["ts"]):  # spans of one row never overlap
        assert event["ts"] >= by_row.get(event["tid"], 0.0) - 1e-6
        by_row[event["tid"]] = event["ts"] + event["dur"]
    counters = [e for e in document["traceEvents"] if e["ph"] == "C"]
    assert max(e["args"]["bytes alive"] for e in counters) <= timeline.peak_bytes
    assert any(e["args"].get("module") == "blocks.0.feed.up.weight" for e in spans)
