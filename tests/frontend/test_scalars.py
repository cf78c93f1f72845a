"""Tensors without dims where Python numbers stand, and what else models do that a trace does not see."""

from __future__ import annotations

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import AssumptionBroken
from shardwright.frontend import capture
from shardwright.frontend.replay import replay
from shardwright.verification.prepare import subject


class Gathering(nn.Module):
    """Positions as vision-language models make them: one number read from every row's data, in a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        largest = [row.max() for row in x.detach()]
        return x / torch.tensor(largest, device=x.device).unsqueeze(1) + torch.tensor([largest[0], 2]).sum()


class Calibrated(nn.Module):
    """Quantization reads the range of its activations beside autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.data.max() + x.data


@torch.jit.script
def scripted(x: Tensor, factor: int) -> Tensor:
    size = torch.tensor(x.size(-1), dtype=torch.float) * factor
    if torch.jit.is_scripting():
        return x / torch.sqrt(size)
    return x * torch.rsqrt(size)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return scripted(self.linear(x), 2)


class Padded(nn.Module):
    """Strides in buffers, as codecs keep them, say how much is padded and to what size is interpolated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.tensor(5))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = functional.pad(x, (self.kernel // 2, self.kernel - 2))
        return functional.interpolate(x[:, None], size=lengths.max() + 1)[:, 0]


class OneByOne(nn.Module):
    """A mixture of experts that goes through the experts that are hit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        hit = torch.bincount(chosen, minlength=3).nonzero()
        for row in hit:
            (mine,) = torch.where(chosen == row[0])
            out = out.index_add(0, mine, x[mine] @ self.experts[row[0]])
        return out


X = torch.rand(3, 4) + 1


@pytest.mark.parametrize("kind", [Gathering, Calibrated])
def test_what_a_trace_does_not_see(kind: type[nn.Module]) -> None:
    faithful(kind(), (X.clone().requires_grad_(),))


def test_torchscript_runs_as_the_python_it_was_made_of() -> None:
    found = subject(lambda: (Scripted(), (X,), {}), True)
    assert "aten.rsqrt.default" in targets(found.graph)
    (output,) = (replay(found.graph, found.model, found.args, found.kwargs),)
    torch.testing.assert_close(output, found.model(*found.args))
    assert type(scripted).__call__ is torch.jit.ScriptFunction.__call__


def test_tensors_that_are_sizes_are_those_of_the_example() -> None:
    lengths = torch.tensor([3, 5, 2])
    graph = faithful(Padded(), (X, lengths), meta=False)
    assert "shardwright.assumed.default" in targets(graph)
    with pytest.raises(AssumptionBroken, match="captured for 6, this batch gives 9"):
        replay(graph, Padded(), (X, lengths + 3), {})


def test_rows_are_taken_one_by_one_as_often_as_in_the_example() -> None:
    model, chosen = OneByOne(), torch.tensor([2, 0, 2])
    graph = faithful(model, (X, chosen), meta=False)
    assert "shardwright.unknown_extents.default" in targets(graph)
    again = torch.tensor([0, 1, 1])  # other experts, as many of them
    torch.testing.assert_close(replay(graph, model, (X, again), {}), model(X, again))
    for others, count in ((torch.tensor([0, 1, 2]), 3), (torch.tensor([1, 1, 1]), 1)):
        with pytest.raises(AssumptionBroken, match=f"captured for 2, this batch gives {count}"):
            replay(graph, model, (X, others), {})


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(4, 4), torch.arange(12.0).view(3, 4)[:, :]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.positions.type_as(x))


def test_tensors_that_are_plain_attributes_are_double_too() -> None:
    found = subject(lambda: (Attribute(), (X,), {}), True)
    assert found.model.positions.dtype == torch.float64
    assert capture(Attribute(), (X,)).ops
