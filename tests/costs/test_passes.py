"""What a stage holds after its last pass: the gradients that are still on their way, and what was made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from shardwright.cluster import mesh_of, parse_cluster
from shardwright.costs.memory import memory
from shardwright.costs.passes import StageBytes, stage_bytes
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths
from shardwright.operators.strategy import Strategy
from shardwright.planner import Options, plan_graph
from shardwright.plans import Plan
from shardwright.program import build
from shardwright.program.passes import reduced_apart, split_backward
from shardwright.simulator import simulate_plan
from shardwright.zoo.reference import resolve


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


def _apart(plan: Plan, graph: Graph) -> tuple[StageBytes, float, int]:
    """What the stage of a plan on one mesh would hold with gradients reduced after the backward pass, the most after it,
    and what is there at the end of the step as it is."""
    stage = simulate_plan(plan, graph).stage()
    program, device = reduced_apart(stage.program), stage.mesh.device
    held = stage_bytes(program, memory(program, device), device, 1, ())
    return held, held.resting + held.kept + held.closing, stage.memory.curve[-1]


@pytest.mark.parametrize("search", ["data-parallel", "fsdp", "zero-1"])
def test_gradients_count_once_at_the_end(graph: Graph, search: str) -> None:
    """Reduced apart: the optimizer finds there what it finds on one mesh, and before it there are at most
    all gradients as they were kept back, with one bundle of them on its way."""
    options = Options(search, baselines=(), fewer_devices=False, max_axes=1, optimizer="sgd")
    plan = plan_graph(graph, parse_cluster("4xH100"), options)
    held, last, on_one_mesh = _apart(plan, graph)
    whole, bundle = 6 * 2048 * 2048 * 4, 2048 * 2048 * 4
    assert held.kept == whole
    assert max(on_one_mesh, held.resting + held.kept) <= last <= held.resting + held.kept + 2 * bundle


def test_the_optimizer_counts_beside_the_gradients_that_are_left(graph: Graph) -> None:
    """AdamW's temporaries are as large as the parameters; the gradients that were kept back have been let go of by then."""
    plan = plan_graph(
        graph, parse_cluster("4xH100"), Options("data-parallel", baselines=(), fewer_devices=False, max_axes=1)
    )
    held, last, on_one_mesh = _apart(plan, graph)
    loss = 4  # is let go of in the backward pass of a stage
    assert last == max(on_one_mesh - loss, held.resting + held.kept)


@pytest.mark.parametrize("lightly", [False, True])
def test_what_was_computed_again_is_there_until_the_gradients_of_the_weights(lightly: bool) -> None:
    """Recomputing saves bytes up to the first half of a backward pass, not between its halves: the second half reads the
    same values, and the first had to compute them."""
    resolved = resolve("gpt:layers=3,width=256,heads=4,vocab=512,seq=128", batch=4)
    graph, mesh = capture(resolved.model, resolved.args, resolved.kwargs), mesh_of(parse_cluster("1xH100"))
    whole = Strategy(
        mesh.names, {op.name: (None,) for op in graph.ops}, {name: (Replicate(),) for name in graph.sources}
    )
    paths = block_paths(graph)
    again = replace(whole, recomputed=paths, lightly=frozenset(paths if lightly else ()))
    held = []
    for strategy in (whole, again):
        program = build(graph, strategy, PricedDecisions(mesh), device="cuda")
        values = [v for v, value in enumerate(program.flow.values) if value.tensor not in graph.parameter_of]
        program = split_backward(program, values)
        held.append(stage_bytes(program, memory(program, mesh.device), mesh.device, 4, ()))
    plain, recomputed = held
    assert recomputed.held < 0.8 * plain.held
    assert recomputed.held_for_weights == pytest.approx(plain.held_for_weights, rel=0.02)
