"""Plans with stages: where the model is cut, how stages are split, what is predicted of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, Pipelining, plan_pipeline
from shardwright.planner.cutting import Line, Named, microbatch_counts
from shardwright.plans import Plan, from_json, to_json
from shardwright.search.joint.cuts import cut_into
from shardwright.simulator import simulate_plan
from shardwright.zoo.reference import resolve


@pytest.fixture(scope="module")
def graph() -> Graph:
    found = resolve("gpt:layers=4,width=1024,heads=4,vocab=2048,seq=1024,batch=8", device="meta")
    return capture(found.model, found.args, found.kwargs)


@pytest.fixture(scope="module")
def made(graph: Graph) -> Plan:
    return plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(4, 8, "1f1b"))


def test_a_plan_with_stages_survives_its_file_and_is_simulated_the_same(made: Plan, graph: Graph) -> None:
    again = from_json(to_json(made))
    assert again == made
    again.check(graph)
    timeline = simulate_plan(again, graph)
    assert timeline.seconds == pytest.approx(made.prediction.step_seconds)
    assert [stage.prediction for stage in made.stages] == list(timeline.stages)


def test_no_stage_is_empty_where_sending_is_dear(graph: Graph) -> None:
    cluster = parse_cluster("2xH100")
    node = cluster.nodes[0]
    slow = replace(cluster, nodes=(replace(node, link=replace(node.link, bandwidth=1e3)),))
    parameters = {p.tensor for p in graph.parameters}
    reads = {op.name: set(op.inputs) for op in graph.ops}
    for stage in cut_into(Line.of(graph, mesh_of(parse_cluster("1xH100")), slow), 2):
        assert any(reads[name] & parameters for name in stage)


def test_stages_are_balanced_and_their_bubble_is_that_of_the_schedule(made: Plan) -> None:
    busy = [stage.prediction.busy_seconds for stage in made.stages if stage.prediction is not None]
    assert max(busy) < 1.3 * min(busy)
    # Of equal stages, 1F1B idles for three of eleven slots (Narayanan et al. 2019); hops and the last step come on top.
    assert 3 / 11 <= max(s.prediction.bubble for s in made.stages if s.prediction is not None) < 0.45
    assert made.proof.step_bound <= made.prediction.step_seconds


def test_the_found_order_is_no_slower_and_more_micro_batches_fill_the_pipeline(made: Plan, graph: Graph) -> None:
    found = plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(4, 8, "auto"), Options(time_limit=1.0))
    assert found.prediction.step_seconds <= made.prediction.step_seconds * (1 + 1e-9)
    few = plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(4, 2, "1f1b"))
    assert simulate_plan(few, graph).bubble > simulate_plan(made, graph).bubble


def test_stages_have_meshes_of_their_own(graph: Graph) -> None:
    plan = plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(2, 2, "gpipe"), Options(search="data-parallel"))
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert all(any(split != (None,) for split in stage.strategy.splits.values()) for stage in plan.stages)


def test_cuts_by_hand(graph: Graph) -> None:
    names = cut_into(Named.of(graph, ["blocks.1", "blocks.3"]), 3)
    first = {op.name: op.module for op in graph.ops}
    assert [first[part[0]].split(".")[1] for part in names[1:]] == ["1", "3"]
    with pytest.raises(ShardwrightError, match=r"no module 'blocks\.9'"):
        Named.of(graph, ["blocks.9"])
    with pytest.raises(ShardwrightError, match="empty stage"):
        Named.of(graph, ["blocks.3", "blocks.1"])


def test_stages_that_cannot_be_are_refused(graph: Graph) -> None:
    four = parse_cluster("4xH100")
    with pytest.raises(ShardwrightError, match="cannot be cut into 4 stages: there are 2 pieces"):
        plan_pipeline(graph, four, Pipelining(4, 4, "1f1b", ("blocks.1",)))
    with pytest.raises(ShardwrightError, match="cannot be cut into 4000 stages"):
        cut_into(Line.of(graph, mesh_of(parse_cluster("1xH100")), four), 4000)


def test_numbers_of_micro_batches_divide_the_batch() -> None:
    """Where four stages were asked for a batch of ten, it was cut into four unlike micro-batches."""
    assert microbatch_counts(10, (4, 8, 16)) == [2, 5, 10]
    assert microbatch_counts(8, (1, 2, 4)) == [1, 2, 4]
    assert microbatch_counts(7, (4, 6)) == [] == microbatch_counts(1, (4, 16, 64))


def test_what_does_not_fit_is_refused(graph: Graph) -> None:
    with pytest.raises(ShardwrightError, match="cannot be shared equally"):
        plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(3, 2, "gpipe"))
    with pytest.raises(ShardwrightError, match="batch of 8 cannot be cut into 16"):
        plan_pipeline(graph, parse_cluster("4xH100"), Pipelining(2, 16, "gpipe"))


class Contrasted(torch.nn.Module):
    """Batch norms, if asked for, and a loss of all rows together."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        norm = torch.nn.BatchNorm1d(8) if normed else torch.nn.LayerNorm(8)
        self.first, self.second = torch.nn.Sequential(torch.nn.Linear(8, 8), norm), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return (x @ x.t()).logsumexp(1).mean()


def test_a_loss_of_all_rows_together_waits_for_all_forward_passes() -> None:
    graph = capture(Contrasted(normed=False), (torch.randn(8, 8),))
    plan = plan_pipeline(graph, parse_cluster("2xH100"), Pipelining(2, 4, "1f1b"))
    assert plan.schedule == plan.schedule.forwards_first()
    assert any("needs the whole batch" in note for note in plan.notes)


def test_batch_norms_may_be_asked_for_per_piece() -> None:
    graph = capture(Contrasted(normed=True), (torch.randn(8, 8),))
    with pytest.raises(ShardwrightError, match=r"batch_norm.*changes the buffer") as refused:
        plan_pipeline(graph, parse_cluster("2xH100"), Pipelining(2, 4, "1f1b"))
    assert "--batch-norm per-piece" in refused.value.remedy
    plan = plan_pipeline(graph, parse_cluster("2xH100"), Pipelining(2, 4, "1f1b", (), "per-piece"))
    again = from_json(to_json(plan))
    assert again == plan
    assert again.batch_norm == "per-piece"
    assert simulate_plan(again, graph).seconds == pytest.approx(plan.prediction.step_seconds)
