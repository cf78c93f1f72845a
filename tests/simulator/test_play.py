"""A step of a pipeline on all kinds of ranks: what waits for what, what is told of it, and that alike ranks cost nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwright.cli.explain import rank_lines
from shardwright.cluster import Cluster, parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_pipeline
from shardwright.plans import Plan
from shardwright.program import Kind, Phase
from shardwright.simulator import simulate_plan
from shardwright.simulator.engine import Streams
from shardwright.zoo.reference import resolve


@pytest.fixture(scope="module")
def graph() -> Graph:
    found = resolve("gpt:layers=2,width=512,heads=4,vocab=1000,seq=256,batch=16", device="meta")
    return capture(found.model, found.args, found.kwargs)


def _plan(graph: Graph, cluster: Cluster, count: int = 4) -> Plan:
    return plan_pipeline(graph, cluster, Pipelining(2, count, "1f1b", ["blocks.1"]), Options(search="data-parallel"))


def _slow(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, network=replace(cluster.network, bandwidth=cluster.network.bandwidth / factor))


def test_passes_wait_for_what_they_read_and_for_their_device(graph: Graph) -> None:
    timeline = simulate_plan(_plan(graph, parse_cluster("2x1xH100")), graph)
    played, timing = timeline.played, timeline.timing
    for starts, ends in zip(timing.starts, timing.ends, strict=True):
        assert all(end <= start * (1 + 1e-12) for end, start in zip(ends, starts[1:], strict=False))
    for trip in played.trips:
        place = [(a.kind == "F", a.microbatch) for a in timing.schedule.orders[trip.target]].index(
            (not trip.what.startswith("gradient"), trip.microbatch)
        )
        assert timing.starts[trip.target][place] >= trip.end
    assert len(played.trips) == 8
    assert timeline.seconds == max(one.end for one in played.closing)


def test_a_slow_network_is_exposed_and_its_parcels_queue(graph: Graph) -> None:
    cluster = parse_cluster("2x1xH100")
    plan = _plan(graph, cluster)
    fast, slow = (simulate_plan(replace(plan, cluster=_slow(cluster, f)), graph) for f in (1.0, 1e4))
    link = sum(trip.end - trip.start for trip in slow.played.trips if trip.source == 0)
    assert slow.seconds > link > fast.seconds
    assert slow.stages[1].exposed_seconds > 0.5 * link
    assert slow.stages[1].bubble > fast.stages[1].bubble
    leaving = [(trip.start, trip.end) for trip in slow.played.trips if trip.source == 0]
    assert all(end <= start for (_, end), (start, _) in pairwise(leaving))


def test_alike_ranks_are_simulated_once(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, place = [0], Streams.place

    def counted(self: Streams, *about: object) -> tuple[float, float]:
        placed[0] += 1
        return place(self, *about)  # type: ignore[arg-type]

    found = []
    for cluster in ("2x2xH100", "2x4xH100"):
        plan = _plan(graph, parse_cluster(cluster))
        placed[0] = 0
        monkeypatch.setattr(Streams, "place", counted)
        simulate_plan(plan, graph)
        monkeypatch.undo()
        found.append(placed[0])
    assert found[1] < 1.1 * found[0]  # twice the ranks; their sums take other legs


def test_memory_is_that_of_the_passes_under_way(graph: Graph) -> None:
    """1F1B: the first of two stages holds two micro-batches at a time, however many there are; GPipe holds all."""
    cluster = parse_cluster("2x1xH100")
    plan = _plan(graph, cluster)
    gpipe = plan_pipeline(graph, cluster, Pipelining(2, 4, "gpipe", ["blocks.1"]))
    one, all_of_them = (simulate_plan(p, graph) for p in (plan, gpipe))
    held = one.stage().bytes.held
    assert all_of_them.memory[0] - one.memory[0] == pytest.approx(2 * held)
    bare = one.stage().bytes
    assert one.memory[0] >= bare.resting + bare.kept + 2 * held
    parameters = sum(graph.tensors[p.tensor].bytes for p in graph.parameters)
    assert bare.kept < parameters


def test_gradients_of_micro_batches_are_added_up_in_time(graph: Graph) -> None:
    """Every micro-batch but the first adds its gradients to those before: two are read, one is written."""
    cluster, bandwidth = parse_cluster("2x1xH100"), parse_cluster("2x1xH100").device.bandwidth
    for count in (1, 4):
        timeline = simulate_plan(_plan(graph, cluster, count), graph)
        times = timeline.stage()
        arrivals = [event.seconds for event in times.events if event.kind is Kind.ARRIVE]
        expected = 3 * (count - 1) / count * times.bytes.kept / bandwidth
        assert arrivals and sum(arrivals) == pytest.approx(expected)
        assert (sum(times.events[n].seconds for n in times.passes["B"]) >= expected > 0) == (count > 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_priced_of_a_stage_is_what_it_runs(graph: Graph, schedule: str) -> None:
    """Backward passes are in two where the schedule has them so, and nowhere else."""
    plan = plan_pipeline(graph, parse_cluster("2x1xH100"), Pipelining(2, 4, schedule), Options(search="data-parallel"))
    timeline = simulate_plan(plan, graph)
    assert timeline.seconds == plan.prediction.step_seconds
    for rank in range(2):
        listed = [line.instruction for line in rank_lines(plan, graph, rank) if line.program is not None]
        stage = timeline.stage(rank)
        once = [stage.events[n].instruction for n in stage.passes["B"] if stage.events[n].kind is not Kind.ARRIVE]
        first = [i for i in listed if i.phase is Phase.BACKWARD and i.microbatch == 0]
        assert [(i.kind, i.name) for i in once] == [(i.kind, i.name) for i in first]
        assert bool(stage.passes["W"]) == (schedule == "zb-h1")
