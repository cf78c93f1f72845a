"""What a stage holds after its last pass: the gradients that are still on their way, and what was made of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.simulator import simulate_plan, simulate_plan_pipeline


class Layers(nn.Module):
    """Little but weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return capture(Layers(), (torch.empty(8, 2048),))


@pytest.mark.parametrize("search", ["data-parallel", "fsdp", "zero-1"])
def test_gradients_count_once_at_the_end(graph: Graph, search: str) -> None:
    """A plan on one mesh as one stage: the optimizer finds there what it finds on one mesh, and before it there are at most
    all gradients as they were kept back, with one bundle of them on its way."""
    options = Options(search, baselines=(), fewer_devices=False, max_axes=1, optimizer="sgd")
    plan = plan_graph(graph, parse_cluster("4xH100"), options)
    timeline = simulate_plan_pipeline(plan, graph)
    held = timeline.times[0, max(timeline.pipeline.micro.sizes)].bytes
    last = timeline.memory_curve(0)[-1][1]
    whole, bundle = 6 * 2048 * 2048 * 4, 2048 * 2048 * 4
    assert held.kept == whole
    on_one_mesh = simulate_plan(plan, graph).memory.curve[-1]
    assert max(on_one_mesh, held.resting + held.kept) <= last <= held.resting + held.kept + 2 * bundle


def test_the_optimizer_counts_beside_the_gradients_that_are_left(graph: Graph) -> None:
    """AdamW's temporaries are as large as the parameters; the gradients that were kept back have been let go of by then."""
    plan = plan_graph(
        graph, parse_cluster("4xH100"), Options("data-parallel", baselines=(), fewer_devices=False, max_axes=1)
    )
    timeline = simulate_plan_pipeline(plan, graph)
    held = timeline.times[0, max(timeline.pipeline.micro.sizes)].bytes
    last = timeline.memory_curve(0)[-1][1]
    loss = 4  # is let go of in the backward pass of a stage
    assert last == max(simulate_plan(plan, graph).memory.curve[-1] - loss, held.resting + held.kept)
