"""A program lets gradients come back from every result; a price is that of a step that goes back from the loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.cluster import parse_cluster
from shardwright.costs.memory import memory
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.costs.pricing import price
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.plans import Plan
from shardwright.program import Kind, Program, build
from shardwright.simulator import simulate_plan


class Telling(nn.Module):
    """A loss, its logits, and something of which no loss is made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.aside = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(16, 64)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.inner(x))
        logits = self.head(hidden)
        return functional.cross_entropy(logits, labels), logits, self.aside(hidden)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Telling(), (torch.randn(32, 16), torch.randint(0, 64, (32,))))


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return plan_graph(graph, parse_cluster("2xH100"), Options("data-parallel", baselines=(), fewer_devices=False))


@pytest.fixture(scope="module")
def program(graph: Graph, plan: Plan) -> Program:
    return build(
        graph,
        plan.stages[0].strategy,
        replace(plan.stages[0].decisions, otherwise=PricedDecisions(plan.meshes[0])),
        device="cuda",
    )


def test_what_is_simulated_is_what_runs(graph: Graph, plan: Plan) -> None:
    decisions = replace(plan.stages[0].decisions, otherwise=PricedDecisions(plan.meshes[0]))
    run = build(graph, plan.stages[0].strategy, decisions, (0,), device="cuda")
    assert simulate_plan(plan, graph).stage().program.instructions == run.instructions
    assert len(run.roots) == 3


def test_what_nobody_brings_a_gradient_for_takes_no_time(plan: Plan, program: Program) -> None:
    """The sum of the two gradients of the logits hands one on; the backward of the other result and the sum with what it
    would bring for the hidden values have nothing to do."""
    told = sorted((program.instructions[n].kind.value, program.instructions[n].name) for n in program.idle)
    logits, hidden = (program.graph.ops[1 + n].outputs[0] for n in (1, 0))
    assert [kind for kind, _ in told] == ["accumulate", "accumulate", "input", "weight"]
    assert {name for kind, name in told if kind == "accumulate"} == {logits, hidden}
    events = price(program, plan.meshes[0]).events
    assert all(events[n].seconds == events[n].host == 0.0 for n in program.idle)
    assert all(e.seconds > 0 for e in events if e.kind is Kind.INPUT and events.index(e) not in program.idle)


def test_it_takes_no_memory(plan: Plan, program: Program) -> None:
    device = plan.meshes[0].device
    born = {storage.born for storage in memory(program, device).storages}
    assert born.isdisjoint(program.idle)


def test_a_stage_goes_back_from_what_others_read_of_it(graph: Graph, plan: Plan) -> None:
    decisions = replace(plan.stages[0].decisions, otherwise=PricedDecisions(plan.meshes[0]))
    outputs = [out.name for out in graph.outputs]  # type: ignore[union-attr]
    every = build(graph, plan.stages[0].strategy, decisions, device="cuda", sent=outputs[1:])
    assert not every.idle
    one = build(graph, plan.stages[0].strategy, decisions, device="cuda", sent=outputs[1:2])
    assert one.idle and all("aside" in one.instructions[n].module or n in one.idle for n in one.idle)
