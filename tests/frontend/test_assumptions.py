"""Decisions on data are those of the example, and a batch that decides otherwise is told so."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn

from shardwright.errors import AssumptionBroken, CaptureError
from shardwright.frontend import capture
from shardwright.frontend.replay import replay


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        if not torch.isfinite(x).all():
            x = torch.nan_to_num(x)
        for row, length in enumerate(lengths.tolist()):
            x = x + x[:, :length].sum() * row
        return x * 2 if torch.equal(lengths, torch.ones_like(lengths)) else x * x.max().item()


LENGTHS = torch.tensor([1, 3])


def test_the_graph_is_for_the_examples_decisions() -> None:
    graph = faithful(Deciding(), (torch.randn(2, 4), LENGTHS), meta=False)
    assert targets(graph).count("shardwright.assumed.default") == 3
    assert sum("looks at its data at" in note and "test_assumptions.py:" in note for note in graph.notes) == 3


def test_the_model_is_left_as_it_was() -> None:
    model = Deciding()
    x, before = torch.randn(2, 4), copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    capture(model, (x, LENGTHS))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("x", "lengths", "about"),
    [
        (torch.full((2, 4), float("inf")), LENGTHS, "captured for True, this batch gives False"),
        (torch.randn(2, 4), torch.tensor([1, 4]), r"captured for \[1, 3\], this batch gives \[1, 4\]"),
        (torch.randn(2, 4), torch.tensor([1, 1]), r"captured for \[1, 3\]"),
    ],
)
def test_a_batch_that_decides_otherwise_is_refused_by_name(x: Tensor, lengths: Tensor, about: str) -> None:
    model = Deciding()
    graph = capture(model, (torch.randn(2, 4), LENGTHS))
    with pytest.raises(AssumptionBroken, match=about) as refusal:
        replay(graph, model, (x, lengths))
    assert "test_assumptions.py:" in refusal.value.message
    # The remedy: capture with such a batch.
    again = capture(model, (x, lengths))
    replay(again, model, (x, lengths))


def test_without_values_the_line_is_named_and_the_remedy_works() -> None:
    model = Deciding()
    with pytest.raises(CaptureError, match=r"test_assumptions\.py") as refusal:
        capture(model.to("meta"), (torch.randn(2, 4, device="meta"), LENGTHS.to("meta")))
    assert "with the model and its inputs on the CPU" in refusal.value.remedy
    capture(Deciding(), (torch.randn(2, 4), LENGTHS))


class Scaled(nn.Module):
    """Decides by a number with a fraction, asks it twice on a line, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        if loss.item() > 0.5 and loss.item() < 1e9:
            return loss * loss.item()
        return 2 * loss


def test_a_branch_on_a_number_with_a_fraction_is_an_assumption() -> None:
    large, small = torch.full((2, 4), 9.0), torch.zeros(2, 4)
    model = Scaled()
    graph = faithful(model, (large,), meta=False)
    assert targets(graph).count("shardwright.assumed.default") == 2
    nn.init.zeros_(model.linear.bias)
    with pytest.raises(AssumptionBroken, match="captured for True, this batch gives False"):
        replay(graph, model, (small,))
    replay(graph, model, (large + 1,))


class Rolling(nn.Module):
    """Autoformer: shifts by what it finds in its data, which is another number in every step."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x.shape[1], int) and torch.isnan(x).any():
            return x
        return x * x.roll(-int(x.detach().mean(0).argmax()), 1)


def test_numbers_that_decide_no_shape_are_read_in_every_step() -> None:
    model = Rolling()
    x = torch.randn(3, 5, requires_grad=True)
    graph = faithful(model, (x,), meta=False)
    assert targets(graph).count("shardwright.assumed.default") == 1  # that no number is missing
    other = x.detach().roll(2, 1)
    torch.testing.assert_close(replay(graph, model, (other,)), model(other))


class Padding(nn.Module):
    """ViLT: takes the rows that a mask leaves, so many of each example, in a random order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        places = mask.nonzero()
        most = torch.unique(places[:, 0], return_counts=True)[1].max()
        rows = [places[places[:, 0] == row] for row in torch.unique(places[:, 0])]
        chosen = [row[torch.multinomial(torch.ones(len(row)), most)][:most] for row in rows]
        return self.linear(torch.stack([x[c[:, 0], c[:, 1]] for c in chosen]))


def test_how_many_are_selected_is_assumed_where_nothing_else_helps() -> None:
    model, x, mask = Padding(), torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 1, 1]])
    graph = faithful(model, (x, mask), meta=False)
    (result,) = (graph.tensors[name] for op in graph.ops[-1:] for name in op.outputs if name)
    assert result.shape == (2, 2, 4)
    replay(graph, model, (x, mask.flip(1)))
    with pytest.raises(AssumptionBroken, match="captured for"):
        replay(graph, model, (x, torch.ones_like(mask)))


class Hit(nn.Module):
    """LongCat-Flash: goes through the experts that somebody chose, each by a tensor of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for expert in torch.bincount(chosen, minlength=3).nonzero():
            number = int(expert.item())
            if number < 3:
                (rows,) = torch.where(chosen == number)
                found = found.index_add(0, rows, x[rows] @ self.weights[number])
        return found


def test_a_tensor_of_one_number_is_that_number() -> None:
    torch.manual_seed(0)
    model, x = Hit(), torch.randn(6, 4)
    graph = faithful(model, (x, torch.tensor([0, 2, 2, 0, 2, 0])), meta=False)
    with pytest.raises(AssumptionBroken, match="captured for"):
        replay(graph, model, (x, torch.tensor([0, 1, 1, 0, 1, 0])))


class Contrasting(nn.Module):
    """FLAVA: gathers from other processes where there are any."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            others = [torch.zeros_like(x) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(others, x)
            x = torch.cat(others)
        return x @ x.T


def test_a_captured_model_is_that_of_one_process() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert targets(capture(Contrasting(), (torch.randn(3, 4),))) == ["aten.numpy_T.default", "aten.matmul.default"]
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
