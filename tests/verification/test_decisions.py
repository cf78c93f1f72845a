"""Open answers are found where rounding leaves them open, and turning one gives the exact gradients of the other side."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from shardwright.verification.batches import repeated
from shardwright.verification.decisions import Decisions, jumps
from shardwright.verification.judging import judged
from shardwright.verification.recorded import train

DOUBLE = torch.float64


def questions(function, x: torch.Tensor):
    with Decisions() as decisions:
        function(x.clone())
    return decisions.questions


def gradient(function, x: torch.Tensor, moves=()) -> torch.Tensor:
    x = x.clone().requires_grad_()
    with Decisions(moves):
        function(x * 1).sum().backward()
    assert x.grad is not None
    return x.grad


def open_answers(function, x: torch.Tensor, error: torch.Tensor, reach: float = 4.0):
    return jumps(questions(function, x), questions(function, x + error), reach)


ZERO = torch.tensor([1.0, 3e-6, -2e-6, -1.0, 0.0], dtype=DOUBLE)
ERROR = torch.tensor([0.0, -1e-6, 0.0, 0.0, 0.0], dtype=DOUBLE)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        functional.relu,
        torch.nn.ReLU(inplace=True),
        torch.Tensor.relu_,
        lambda x: x.relu(),
        functional.leaky_relu,
    ],
)
def test_numbers_near_zero_are_turned(function):
    found = open_answers(function, ZERO, ERROR)
    assert [jump.element for jump in found] == [4, 2, 1] and not any(jump.crossed for jump in found)
    base = gradient(function, ZERO)
    for jump in found:
        turned = gradient(function, ZERO, [jump])
        assert (turned != base).nonzero().flatten().tolist() == [jump.element]
    everything = gradient(function, ZERO, found)
    assert everything[1] == base[3] and everything[2] == everything[4] == base[0]


def test_reach_and_crossing():
    error = torch.tensor([0.0, 0.0, 2.5e-6, 0.0, 0.0], dtype=DOUBLE)
    found = open_answers(torch.relu, ZERO, error, reach=1.0)
    assert [(jump.element, jump.crossed) for jump in found] == [(4, False), (2, True)]
    assert not open_answers(torch.relu, ZERO, torch.zeros_like(ZERO))


@pytest.mark.parametrize("padding", [0, 1])
def test_the_runner_up_of_a_window_takes_its_place(padding):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 7, dtype=DOUBLE)
    x[1, 2, 3, 3], x[1, 2, 3, 4] = 5.0, 5.0 - 1e-6

    def pool(x):
        return functional.max_pool2d(x, 3, stride=2, padding=padding)

    found = open_answers(pool, x, 1e-6 * torch.randn_like(x))
    assert found and {jump.element for jump in found} == {(1 * 3 + 2) * 49 + 3 * 7 + 4}
    base, turned = gradient(pool, x), gradient(pool, x, found[:1])
    moved = turned - base
    assert moved[1, 2, 3, 3] == -moved[1, 2, 3, 4] < 0 and moved.count_nonzero() == 2


def test_equal_numbers_in_a_window_are_no_question():
    x = torch.zeros(1, 1, 4, 4, dtype=DOUBLE)
    error = torch.zeros_like(x)
    error[0, 0, 0, 0] = 1e-6
    assert not open_answers(lambda x: functional.max_pool2d(x, 2), x, error)


def test_the_next_best_is_chosen():
    x = torch.tensor([[0.1, 0.5, 0.3, 0.3 + 1e-6], [0.9, 0.1, 0.5, 0.2]], dtype=DOUBLE)
    found = open_answers(lambda x: x.topk(2, dim=-1), x, torch.full_like(x, 1e-6))
    assert [jump.element for jump in found] == [2]
    turned = gradient(lambda x: x.topk(2, dim=-1).values, x, found)
    assert torch.equal(turned, torch.tensor([[0.0, 1, 1, 0], [1, 0, 1, 0]], dtype=DOUBLE))


class Sums(torch.nn.Module):
    """Sums that float32 loses: the first unit is zero there and 2⁻²⁵ in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.small = torch.nn.Parameter(torch.tensor([2.0**-25, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        units = torch.relu((self.weight * x + self.small) - torch.tensor([1.0, 0.1]))
        return (units * torch.tensor([3.0, 0.7])).sum()


def test_a_jump_of_one_process_excuses_nothing():
    """One process in float32 misses half of the gradient by a jump; a run may, but not by anything else."""
    model, x = Sums(), torch.tensor([1.0, 0.3])
    run = train(copy.deepcopy(model), repeated((x,), {}, 1), keep=True)
    assert run.gradients[0]["weight"][0] == 0
    found = [item for item in judged(model, repeated((x,), {}, 1), run) if item.what == "gradient"]
    assert all(item.agrees and item.kink for item in found)
    assert all(item.yardstick < 1e-6 for item in found)
    run.gradients[0]["weight"] *= 1 + 1e-4
    wrong = {
        item.name for item in judged(model, repeated((x,), {}, 1), run) if item.what == "gradient" and not item.agrees
    }
    assert "weight at step 1" in wrong


class Several(torch.nn.Module):
    """Many units, three of which stand within rounding of zero, which random nearby parameters hardly turn together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.nn.Parameter(torch.rand(8, 64))
        self.bias = torch.nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ self.weight.T + self.bias - shift) * torch.arange(1.0, 9.0)).sum()


def test_several_answers_are_turned_together():
    model, x = Several(), torch.rand(4, 64)
    with torch.no_grad():
        exact = x.double() @ model.weight.double().T + model.bias.double()
        rounding = float(((x @ model.weight.T + model.bias).double() - exact).abs().max())
    shift = torch.zeros(4, 8, dtype=DOUBLE)
    units = [(0, 1), (2, 5), (3, 7)]
    for unit in units:
        shift[unit] = float(exact[unit].float())  # float32 of what stands there: the difference is a rounding
    answers = exact - shift > 0
    other = shift.clone()
    for unit in units:
        other[unit] += (2 if answers[unit] else -2) * rounding + float(exact[unit] - shift[unit])
    run = train(copy.deepcopy(model), repeated((x, other.float()), {}, 1), keep=True)
    found = [item for item in judged(model, repeated((x, shift.float()), {}, 1), run) if item.what == "gradient"]
    assert all(item.agrees and item.kink for item in found)
    run.gradients[0]["bias"][4] *= 1 + 1e-4
    found = [item for item in judged(model, repeated((x, shift.float()), {}, 1), run) if item.what == "gradient"]
    assert not all(item.agrees for item in found)
