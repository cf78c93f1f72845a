"""The host's time: kernels counted per gradient, the runtime's Python per event."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardwright.cluster import Device, Profile
from shardwright.costs.host import dispatch_seconds, modules_entered
from shardwright.costs.host_runtime import Runtime, with_runtime
from shardwright.costs.pricing import Event
from shardwright.frontend import capture
from shardwright.program import Instruction, Kind, Phase
from shardwright.program.instructions import Traveller
from shardwright.program.steps import BoundStep, Line, Step

TABLE = (
    ("linear", 2e-5, 3e-5),
    ("matmul", 1e-5, 2e-5),
    ("mm", 8e-6, 2e-5),
    ("mul", 6e-6, 9e-6),
    ("add", 6e-6, 1e-6),
    ("sum", 7e-6, 5e-6),
    ("view", 4e-6, 5e-6),
    ("module", 1e-6, 0.0),
)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device("d", "cuda", 10**11, 1e12, 7e-6, (("float32", 1e13),), profile=Profile("by hand", (), TABLE))


class Products(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.table = torch.nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        return torch.matmul(F.relu(hidden), self.table).sum()


def test_every_gradient_of_a_product_is_a_kernel(device):
    graph = capture(Products(), (torch.zeros(2, 4),))
    found = {op.name: dispatch_seconds(op, graph.tensors, (1, 0, 1, 1), device) for op in graph.ops}
    assert found["linear"] == pytest.approx((2e-5, 2e-5))  # of its weight and its bias; not of the input
    assert found["linear_1"] == pytest.approx((2e-5, 2e-5))  # of its weight and its input; it has no bias
    assert found["matmul"] == pytest.approx((8e-6, 2e-5))  # of matrices
    assert found["tanh"] == pytest.approx((6e-6, 9e-6))  # a kernel, and a function of the backward pass


@pytest.mark.parametrize("first", [True, False])
def test_a_recurrence_is_issued_step_by_step_and_layer_by_layer(device, first):
    """Its kernels are launched one by one, so that it is the host's time that a small recurrence takes."""
    model = torch.nn.LSTM(4, 4, num_layers=2, bidirectional=True, batch_first=first)
    graph = capture(model, (torch.zeros(*((3, 5) if first else (5, 3)), 4),))
    op = next(op for op in graph.ops if "lstm" in op.target)
    timed = replace(device, profile=Profile("by hand", (), (*TABLE, ("lstm", 1e-5, 3e-5))))
    steps = 5 * 2 * 2
    assert dispatch_seconds(op, graph.tensors, (1, 0, 1, 1), timed) == pytest.approx((steps * 1e-5, steps * 3e-5))
    called = (*TABLE, ("lstm", 1e-5, 3e-5), ("lstm_call", 4e-4, 5e-4))  # what a call takes, however short, is no step's
    timed = replace(device, profile=Profile("by hand", (), called))
    seconds = dispatch_seconds(op, graph.tensors, (1, 0, 1, 1), timed)
    assert seconds == pytest.approx((4e-4 + steps * 1e-5, 5e-4 + steps * 3e-5))
    assert dispatch_seconds(op, graph.tensors, (1, 0, 1, 1), device) == pytest.approx((6e-6, 9e-6))


class Broadcasts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = (x + self.row) * self.row
        return scaled.unflatten(0, (1, 2)).sum()


def test_what_was_broadcast_is_summed(device):
    graph = capture(Broadcasts(), (torch.zeros(2, 4),))
    found = {op.name: dispatch_seconds(op, graph.tensors, (0, 1, 1, 0), device) for op in graph.ops}
    assert found["add"] == pytest.approx((6e-6, 1e-6 + 7e-6))
    assert found["mul"] == pytest.approx((6e-6, 2 * 9e-6 + 7e-6))  # of both factors; the row's is summed
    assert found["unflatten"] == pytest.approx((4e-6, 5e-6))


def test_an_operator_that_nobody_could_look_at_is_a_kernel(device):
    graph = capture(Products(), (torch.zeros(2, 4),))
    tanh = next(op for op in graph.ops if op.name == "tanh")
    assert dispatch_seconds(tanh, graph.tensors, (0, 0, 0, 0), device) == pytest.approx((6e-6, 9e-6))


def test_modules_are_counted_where_they_are_entered():
    graph = capture(Products(), (torch.zeros(2, 4),))
    entered = modules_entered(graph.ops)
    assert entered["linear"] == entered["linear_1"] == 1
    assert entered["relu"] == 0


def test_the_runtime_costs_by_parameter_collective_and_exchange(device):
    one = Traveller(0, Step("all_gather", 0, 0, None, 4, 8), BoundStep("all_gather", Line("axis", 2, 0)))

    def event(kind: Kind, stream: str = "axis", collective: str = "", travellers: int = 0) -> Event:
        instruction = Instruction(kind, Phase.FORWARD, "a", stream, collective=collective, steps=(one,) * travellers)
        return Event(instruction, 1.0, 1e-6)

    events = [
        event(Kind.OPERATOR, "compute"),
        event(Kind.CHANGE, collective="all_gather", travellers=1),
        event(Kind.GATHER, collective="all_gather", travellers=3),
        event(Kind.EXCHANGE, collective="all_reduce"),
        event(Kind.UPDATE, "compute"),
    ]
    found = with_runtime(events, 5, device, Runtime(1, parameter=10, collective=20, exchange=30, traveller=5))
    added = [0.0, 80e-6, 140e-6, 120e-6, 204e-6]
    assert [event.host for event in found] == pytest.approx([1e-6 + more for more in added])
    uncalibrated = replace(device, profile=None)
    assert with_runtime(events, 5, uncalibrated, Runtime(1, 10, 20, 30, 5)) == tuple(events)
    replayed = with_runtime(events, 5, device, Runtime(1, 10, 20, 30, 5), recorded=True)
    assert [event.host for event in replayed] == pytest.approx([0.0, 0.0, 0.0, 0.0, 205e-6])
    assert [event.seconds for event in replayed] == [1.0] * 5
