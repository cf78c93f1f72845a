"""What cannot be captured ends in one clear error; what only looks impossible does not."""

from __future__ import annotations

import math
import random
import sys

import numpy
import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.frontend import capture
from shardwright.frontend.provenance import source_of
from shardwright.verification import prepare
from shardwright.verification.prepare import all_double


class Base(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.rate = rate


class TorchLayerDrop(Base):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            x = layer(x)
        return x


class PythonLayerDrop(Base):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.uniform(0, 1) >= self.rate and not random.random() < self.rate:
                x = layer(x)
        return x


class StochasticDepth(Base):
    """A random number that is data, not a decision."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(()) > 0.5
        return self.layers[0](x) * keep + torch.rand([]) * 0


@pytest.mark.parametrize("kind", [TorchLayerDrop, PythonLayerDrop])
def test_layer_drop_at_rate_zero_is_inert(kind: type[nn.Module]) -> None:
    graph = faithful(kind(0.0), (torch.randn(2, 4),))
    assert targets(graph) == ["aten.linear.default"] * 3


@pytest.mark.parametrize("kind", [TorchLayerDrop, PythonLayerDrop])
def test_layer_drop_at_another_rate_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"rate of 0\.3") as refusal:
        capture(kind(0.3), (torch.randn(2, 4),))
    assert "layerdrop" in refusal.value.remedy


def test_random_numbers_that_are_data_stay() -> None:
    assert "aten.rand.default" in targets(capture(StochasticDepth(), (torch.randn(2, 4),)))


def test_patches_are_taken_back() -> None:
    before = torch.rand, random.uniform, random.random, torch.autograd.Function.__dict__["apply"]
    with pytest.raises(CaptureError):
        capture(TorchLayerDrop(0.3), (torch.randn(2, 4),))
    assert (torch.rand, random.uniform, random.random, torch.autograd.Function.__dict__["apply"]) == before


class NumpyMask(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * torch.from_numpy(numpy.random.rand(4)).float()


class DataBranch(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.layers[0](x)


class ReadsNumber(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](x) * math.exp(x.max())


class DataShape(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](x[x[:, 0] > 0])


class DataLoop(Base):
    def forward(self, x: Tensor) -> Tensor:
        for length in (x[:, 0] > 0).sum(0, keepdim=True).tolist():
            x = self.layers[0](x[:length])
        return x


class Autocast(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers[0](x)


class NeedsValue(Base):
    """A plain tensor attribute that was built on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute = torch.ones(4, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * self.attribute


class Penalised(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.layers[0](x).sum(), x, create_graph=True)
        return slope.norm()


class Nested(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:, :4], x[:1, :4]], layout=torch.jagged)
        return torch.nested.to_padded_tensor(self.layers[0](rows), 0.0)


class Packed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], [4, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize(
    ("model", "fragments"),
    [
        (NumpyMask(), ["numpy.random"]),
        (DataBranch().to("meta"), ["test_refusals.py", "control flow depends"]),
        (DataShape().to("meta"), ["returns a tensor whose shape depends on data", "test_refusals.py"]),
        (ReadsNumber(), ["reads the number", "test_refusals.py"]),
        (DataLoop().to("meta"), ["test_refusals.py"]),
        (Autocast(), ["autocast"]),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), ["'1' (BatchNorm1d)", "batchnorm.py"]),
        (NeedsValue().to("meta"), ["attribute", "meta"]),
        (Penalised(), ["test_refusals.py", "torch.autograd.grad"]),
        (Nested(), ["test_refusals.py", "nested tensor"]),
        (Packed(), ["test_refusals.py", "pack_padded_sequence", "lengths"]),
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), ["0.weight has no shape yet", "lazy"]),
    ],
)
def test_refusals_name_the_place_and_a_way_out(model: nn.Module, fragments: list[str]) -> None:
    device = list(model.parameters())[-1].device
    with pytest.raises(CaptureError) as refusal:
        capture(model, (torch.randn(2, 4, device=device),))
    for fragment in fragments:
        assert fragment in refusal.value.message
    assert refusal.value.remedy
    assert "\n" not in refusal.value.message


def test_wrong_inputs_are_told_apart_from_wrong_models() -> None:
    with pytest.raises(CaptureError, match="example inputs do not fit"):
        capture(nn.Linear(4, 4), ())


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    capture(DataBranch(), (torch.randn(2, 4),))
    with pytest.raises(CaptureError):
        capture(ReadsNumber(), (torch.randn(2, 4),))
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
    assert sys.stderr is not None


class Checked(Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        assert labels.max().item() < 100, "labels"
        if labels is not None and labels.min() < 0:
            raise ValueError("negative labels")
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        if not self.layers or ((x.isnan().any() or not (x.abs() < 1e6).all()) and self.training):
            raise ValueError("strange")
        torch._check(x.shape[0] == labels.shape[0])
        return self.layers[0](x) + labels.unsqueeze(1)


def test_checks_that_only_raise_are_dropped() -> None:
    graph = faithful(Checked(), (torch.randn(2, 4), torch.tensor([1, 2])))
    assert targets(graph) == ["aten.linear.default", "aten.unsqueeze.default", "aten.add.Tensor"]


class HiddenBranch(Base):
    """Raises in one branch but computes in the other: not a mere check."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            raise ValueError("large")
        else:
            x = x * 2
        return x


def test_a_branch_that_computes_is_no_check() -> None:
    with pytest.raises(CaptureError, match="control flow depends"):
        capture(HiddenBranch(), (torch.randn(2, 4, device="meta"),))
    assert "shardwright.assumed.default" in targets(capture(HiddenBranch(), (torch.randn(2, 4),)))


def test_a_capture_under_autocast_is_refused() -> None:
    """The exported graph would have its dtypes and none of its casts."""
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match=r"autocast.*bfloat16") as refusal,
    ):
        capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert "compute_dtype" in str(refusal.value.remedy)


class MaskOutsideOfExport(nn.Module):
    """Hugging Face's LongT5 and Switch make a missing mask in eager mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[0])
        return self.linear(x) * mask[:, None]


def test_what_is_missing_in_export_alone_is_to_be_given() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError) as refusal:
        capture(MaskOutsideOfExport(), (x,))
    assert "optional arguments" in refusal.value.remedy
    assert capture(MaskOutsideOfExport(), (x, torch.ones(3))).ops


def test_the_line_is_the_models_also_while_everything_is_computed_in_double() -> None:
    """Verification's own functions stand between the model and PyTorch then."""
    with all_double(), pytest.raises(CaptureError, match=r"test_refusals\.py:\d+") as refusal:
        capture(Branching(), (torch.zeros(2, 3, device="meta"),))
    assert "prepare.py" not in str(refusal.value)
    with all_double():
        graph = capture(Branching(threshold=False), (torch.zeros(2, 3),))
    assert all("test_refusals.py" in op.source for op in graph.ops)


class Branching(nn.Module):
    def __init__(self, threshold: bool = True) -> None:
        super().__init__()
        self.linear, self.threshold = nn.Linear(3, 3), threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.float() * 2 if self.threshold and x.sum() > 0 else x.half().float()


class AsksForAnExtent(nn.Module):
    """Asks its data in a way that even the example's answers do not help."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x[0].long().bincount().shape[0] > 1 else x


def test_advice_is_only_what_helps() -> None:
    x = torch.rand(3, 4)
    with pytest.raises(
        CaptureError, match=r"test_refusals.py:\d+, its control flow depends on tensor values"
    ) as refusal:
        capture(AsksForAnExtent(), (x,))
    assert "CPU" not in refusal.value.remedy, "it is there already"
    with pytest.raises(CaptureError, match="control flow depends") as refusal:
        capture(AsksForAnExtent(), (x.to("meta"),))
    assert "on the CPU" in refusal.value.remedy


def test_no_line_of_ours_is_blamed() -> None:
    """In double precision a mode of ours is called last, also where the model's code is all PyTorch's."""
    node = torch.fx.Graph().placeholder("x")
    watching = prepare.__file__
    node.meta["stack_trace"] = (
        f'  File "{nn.__file__}", line 7, in forward\n  File "{watching}", line 37, in __torch_function__\n'
    )
    assert source_of(node) == "torch/nn/__init__.py:7"
