"""In-place operators become functional ones with the same results and gradients."""

from __future__ import annotations

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import CaptureError
from shardwright.frontend import capture


class Layered(nn.Module):
    """A linear layer, then whatever the test does in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)


class ReluInPlace(Layered):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x), inplace=True) * 2


class Chain(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden += 1
        hidden *= 2
        hidden.sub_(0.5).clamp_(min=0.0)
        return hidden.sum() + hidden.mean()


class ReadsAfterWrite(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        row = hidden[0]
        hidden.mul_(3.0)
        return row + hidden[1]


class WritesSlice(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).clone()
        hidden[:, 1:3] = hidden[:, 3:5] * 2
        hidden[0] = 1.0
        return hidden.sum(0)


class WritesThroughTwoViews(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).clone()
        turned = hidden.t().reshape(3, 2, 4)
        other = hidden.view(2, 2, 6)
        other[:, 0].add_(5.0)
        other.transpose(0, 1)[1, :, ::2].mul_(2.0)
        return turned.sum() + hidden.sum(1) + other[0, 1, 2]


class WritesPermuted(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).view(2, 2, 6).clone()
        hidden.permute(2, 0, 1).unsqueeze(1)[0].fill_(2.0)
        hidden.diagonal(dim1=0, dim2=1).zero_()
        return hidden.exp()


class WritesPieces(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        positions = torch.arange(12).view(3, 4)
        left, right = positions.split([1, 3], dim=1)
        right.add_(1)
        left.copy_(right[:, :1])
        first, _, last = positions.unbind(0)
        last.copy_(first)
        return hidden[positions % 4]


class WritesMasked(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).clone()
        hidden[hidden > 0] = 0.25
        hidden.masked_fill_(hidden < -0.5, -0.5)
        hidden.index_add_(0, torch.tensor([0, 1]), hidden[:2] * 2)
        return hidden


class ShiftsTokens(Layered):
    """What the encoder-decoders of Hugging Face do with labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        shifted = labels.new_zeros(labels.shape)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted[:, 0] = 3
        shifted.masked_fill_(shifted == -100, 1)
        return F.embedding(shifted, self.linear.weight).sum() + self.linear(x).sum()


class CastsOnWrite(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(4, 6, dtype=torch.float64)
        hidden[1:] = self.linear(x)[1:]
        hidden[0].copy_(self.linear(x)[0, :1])
        return hidden


class Divides(Layered):
    """DAB-DETR: its operator in place and its functional one have differently named overloads."""

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.arange(6, dtype=torch.float32)
        powers //= 2
        powers.copy_(3.0**powers)
        return self.linear(x).mul_(powers)


class HasNoInverse(Layered):
    """Writes through a view that functionalisation of our own cannot take back: PyTorch's leaves copies, which have no
    derivative."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(4, 6, dtype=torch.float64)
        hidden.unfold(1, 3, 3)[:, 0].copy_(self.linear(x)[:, :3])
        hidden[0].copy_(self.linear(x)[0, :1])
        return hidden


MODELS = [
    ReluInPlace, Chain, ReadsAfterWrite, WritesSlice, WritesThroughTwoViews, WritesPermuted, WritesPieces, WritesMasked,
    CastsOnWrite, Divides, HasNoInverse,
]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_in_place_operators(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    graph = faithful(kind(), (torch.randn(4, 6),))
    assert not [target for target in targets(graph) if target.split(".")[1].endswith("_")]


def test_shifted_tokens_keep_composite_operators_and_provenance() -> None:
    torch.manual_seed(0)
    graph = faithful(ShiftsTokens(), (torch.randn(4, 6), torch.tensor([[1, 2, -100], [3, 4, 5]])))
    assert "aten.linear.default" in targets(graph)
    assert all("test_inplace.py" in op.source for op in graph.ops)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("history", torch.zeros(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.linear(x)
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = hidden.detach().mean(0)
        return hidden.sum() * self.calls


def test_buffers_that_change_are_listed_with_their_new_values() -> None:
    torch.manual_seed(0)
    graph = faithful(Counts(), (torch.randn(4, 6),))
    changed = {held for held, _ in graph.mutations}
    assert changed == {b.tensor for b in graph.buffers if b.path in ("calls", "history")}


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_statistics(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.BatchNorm2d(4, affine=False))
    graph = faithful(model.train(training), (torch.randn(2, 3, 5, 5),))
    assert len(graph.mutations) == (6 if training else 0)
    assert graph.training is training


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.norm(x) * 2 + 1)
        return hidden * self.norm.running_mean


def test_a_batch_norm_called_twice_updates_its_statistics_twice() -> None:
    torch.manual_seed(0)
    graph = faithful(SharedNorm(), (torch.randn(4, 6),))
    assert len(graph.mutations) == 3


class NormForItsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(hidden := self.linear(x))
        return hidden


def test_statistics_of_a_batch_norm_whose_result_nobody_reads() -> None:
    torch.manual_seed(0)
    graph = faithful(NormForItsStatistics(), (torch.randn(4, 6),))
    assert len(graph.mutations) == 3


def test_instance_norm_with_statistics_is_refused() -> None:
    with pytest.raises(CaptureError, match="instance norm"):
        capture(nn.InstanceNorm1d(3, track_running_stats=True), (torch.randn(2, 3, 4),))


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class ChangesParameter(Layered):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


@pytest.mark.parametrize(("kind", "word"), [(ChangesInput, "input"), (ChangesParameter, "parameter 'linear.weight'")])
def test_changing_inputs_or_parameters_is_refused(kind: type[nn.Module], word: str) -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(kind(), (torch.randn(4, 6),))
    assert word in refusal.value.message
    assert refusal.value.remedy


class MovingAverage(Layered):
    """A codebook updated under no_grad, as vector-quantising models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return hidden / self.average


def test_buffers_updated_without_gradient() -> None:
    torch.manual_seed(0)
    assert len(faithful(MovingAverage(), (torch.randn(4, 6),)).mutations) == 1


class HiddenWrite(Layered):
    """Autograd does not see this write: gradients pass as if nothing had happened, which no functional form does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 1
        with torch.no_grad():
            hidden.clamp_(min=0.0)
        return hidden * 2


def test_writing_behind_the_back_of_autograd_is_refused() -> None:
    with pytest.raises(CaptureError, match="no_grad") as refusal:
        capture(HiddenWrite(), (torch.randn(4, 6),))
    assert "test_inplace.py" in refusal.value.message


class AddedToConstants(Layered):
    """Position embeddings made without gradients, and learned ones added to them in place (KOSMOS-2.5 does so)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(6.0).sin().expand(4, 6).contiguous()
        positions += self.linear.weight[0]
        return self.linear(x) + positions


def test_gradients_of_what_is_added_to_constants_in_place() -> None:
    torch.manual_seed(0)
    faithful(AddedToConstants(), (torch.randn(4, 6),))


class WriteThroughDetach(Layered):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 1
        other = hidden.detach()
        other += self.linear(x)
        return hidden * other


def test_writing_through_detach_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes into a detached tensor") as refusal:
        capture(WriteThroughDetach(), (torch.randn(4, 6),))
    assert "test_inplace.py" in refusal.value.message


class MaskOfScores(Layered):
    """OneFormer: a mask made of scores, and then of none where it would hide everything."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        mask = (hidden.sigmoid() < 0.5).detach()
        mask[torch.where(mask.sum(-1) == mask.shape[-1])] = False
        return hidden.masked_fill(mask, 0.0)


def test_a_mask_has_no_gradient_that_a_write_could_hide() -> None:
    torch.manual_seed(0)
    faithful(MaskOfScores(), (torch.randn(4, 6),))


class OtherShape(Layered):
    """BigBird: a mask gets one more dimension in place. What was taken of it before stays what it was."""

    def __init__(self, also_write: bool = False) -> None:
        super().__init__()
        self.also_write = also_write

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.einsum("bq,bk->bqk", x, x) * 1
        first = mask[:, :, 0]
        mask.unsqueeze_(1)
        if self.also_write:
            mask += 1
        return mask * self.linear(x)[:, None, None] + first[:, None, None]


def test_a_shape_changed_in_place_is_the_shape_from_there_on() -> None:
    torch.manual_seed(0)
    graph = faithful(OtherShape(), (torch.randn(4, 6),))
    (made,) = (
        op
        for op in graph.ops
        if op.target == "aten.unsqueeze.default" and graph.tensors[op.inputs[0]].shape[1:] == (6, 6)
    )
    assert graph.tensors[str(made.outputs[0])].shape == (4, 1, 6, 6)


class Turned(Layered):
    """A row taken of a square before it is transposed in place is still a row."""

    def forward(self, x: Tensor) -> Tensor:
        square = self.linear(x).T @ x
        row = square[0]
        square.transpose_(0, 1)
        return square * 2 + row


def test_a_view_of_what_is_transposed_in_place() -> None:
    torch.manual_seed(0)
    faithful(Turned(), (torch.randn(4, 6),))


def test_writing_after_a_shape_changed_in_place_is_refused_where_a_view_shares_the_memory() -> None:
    with pytest.raises(CaptureError, match="changes the shape of a tensor in place") as refusal:
        capture(OtherShape(also_write=True), (torch.randn(4, 6),))
    assert "test_inplace.py" in refusal.value.message


class ClampsItsWeight(Layered):
    """FLAVA's temperature, Gemma-3n's coefficients."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-1, 1)
        return self.linear(x)


def test_a_parameter_bounded_in_the_forward_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(CaptureError, match=r"test_inplace.py:\d+") as refusal:
        capture(ClampsItsWeight(), (torch.randn(4, 6),))
    assert "after the optimizer's step" in refusal.value.remedy


class Placed(nn.Module):
    """Positions are made without gradients, brought to where they are, and a learned number is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.segment, self.linear = nn.Embedding(1, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(12.0).view(1, 3, 4).detach()
        positions = positions.to(x.device, x.dtype)
        positions += self.segment(torch.zeros(1, 1, dtype=torch.long))
        return self.linear(x + positions)


def test_a_gradient_is_not_lost_behind_a_cast_that_changes_nothing() -> None:
    torch.manual_seed(0)
    faithful(Placed(), (torch.randn(2, 3, 4),))
