"""A custom ``autograd.Function`` keeps its own backward; export alone would drop it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.frontend import capture

OPERATOR = "shardwright.autograd_function.default"


class Backwards(torch.autograd.Function):
    """Forward squares; backward lies, so that a dropped backward shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor * 100, None


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, x: Tensor, options: dict[str, int], y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mask)
        return x * mask, y[:, : options["columns"]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[Any, ...]:
        return None, grad * 3, None, torch.cat((other, other), 1) * 5


class StraightThrough(torch.autograd.Function):
    """Returns its input itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Backwards.apply(self.linear(x), 0.5)
        mask = (x > 0).to(torch.int32)
        left, right = Halves.apply(mask, hidden, {"columns": 2}, self.linear(x))
        return StraightThrough.apply(left).sum(1) + right.sum(1)


def test_custom_backwards_are_kept() -> None:
    torch.manual_seed(0)
    graph = faithful(Model(), (torch.randn(3, 4),))
    assert targets(graph).count(OPERATOR) == 3


class Masked(torch.autograd.Function):
    """Makes a tensor of its own, where PyTorch makes tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, torch.tensor(torch.finfo(x.dtype).min))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_that_makes_tensors_runs_without_values() -> None:
    """Plans ask what an operator leaves in memory by running it on meta."""
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    (made,) = torch.ops.shardwright.autograd_function(f"{__name__}:Masked", [x], '["<tensor>"]')
    (gradient,) = torch.autograd.grad(made, x, torch.empty_like(made))
    assert made.is_meta and gradient.shape == (3, 4)


class Picky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class CallsPicky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Picky.apply(x, torch.relu)


class CallsLocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        class Local(StraightThrough):
            pass

        return Local.apply(x)


@pytest.mark.parametrize("model", [CallsPicky(), CallsLocal()])
def test_what_cannot_be_written_down_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match="cannot be written down") as refusal:
        capture(model, (torch.randn(3, 4),))
    assert "custom_op" in refusal.value.remedy


def test_apply_is_restored() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(CaptureError):
        capture(CallsPicky(), (torch.randn(3, 4),))
    assert torch.autograd.Function.__dict__["apply"] is before


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
        scores = self.linear(x).log_softmax(-1).transpose(0, 1)
        steps = torch.full((x.shape[0],), x.shape[1])
        return nn.functional.ctc_loss(scores, words, steps, lengths, reduction="sum", zero_infinity=True)


def test_ctc_loss_stays_whole() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(3, 9, 5), torch.randint(1, 7, (3, 4)), torch.tensor([4, 2, 3]))
    assert "shardwright.ctc_loss.default" in targets(faithful(Ctc(), inputs))


class Reversible(torch.autograd.Function):
    """Keeps nothing but its result: the modules are asked again in the backward pass."""

    @staticmethod
    def forward(ctx, x, layers):
        return layers(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Reformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        return Reversible.apply(x, self.layers)


def test_a_function_of_modules_is_refused_by_its_line():
    with pytest.raises(
        CaptureError, match=r"test_custom_functions.py:\d+ the model calls .*Reversible with a"
    ) as refusal:
        capture(Reformer(), (torch.zeros(2, 4),))
    assert "Call the module itself" in refusal.value.remedy
