"""Inputs and outputs of every shape, parameters of every kind, constants, modes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from tests.frontend.faithful import faithful, targets
from torch import Tensor, nn

from shardwright.frontend import capture
from shardwright.frontend.replay import replay
from shardwright.graph import fingerprint


@dataclasses.dataclass
class Pair:
    left: Tensor
    right: Tensor | None = None


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, first: dict[str, Any], *, pair: list[Tensor], scale: float = 1.0, flag: bool = True) -> Any:
        hidden = self.linear(first["deep"][0]) * scale
        hidden = hidden + pair[0] if flag else hidden - pair[0]
        return {"out": (hidden, [pair[1] * 2]), "loss": hidden.sum(), "none": None, "number": 3}


def test_nested_inputs_and_outputs() -> None:
    pair = [torch.randn(2, 3), torch.randn(5)]
    graph = faithful(Nested(), ({"deep": (torch.randn(2, 4), 7)},), {"pair": pair, "scale": 0.5, "flag": False})
    assert [i.value for i in graph.inputs if i.tensor is None] == [7, 0.5, False]
    assert any("pair" in i.path for i in graph.inputs)


class Dataclasses(Nested):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        return Pair(self.linear(pair.left), right=None)


class NamedTuples(Nested):
    def forward(self, point: Point) -> Point:  # type: ignore[override]
        return Point(self.linear(point.x), point.y + 1)


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (Dataclasses(), Pair(torch.randn(2, 4), torch.randn(3))),
        (NamedTuples(), Point(torch.randn(2, 4), torch.randn(3))),
    ],
)
def test_dataclasses_and_named_tuples(model: nn.Module, value: Any) -> None:
    graph = faithful(model, (value,))
    assert type(replay(graph, model, (value,))) is type(value)


class SeveralUses(nn.Module):
    """One tensor given twice, one parameter under two names, one parameter frozen, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.also_shared = self.shared

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.also_shared(self.frozen(self.shared(self.embed(ids))))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def test_tied_frozen_and_unused_parameters() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (2, 3))
    graph = faithful(SeveralUses(), (ids, ids))
    parameters = {path: p for p in graph.parameters for path in p.paths}
    assert parameters["embed.weight"] is parameters["head.weight"]
    assert parameters["shared.weight"] is parameters["also_shared.weight"]
    assert not parameters["frozen.weight"].trainable
    assert not graph.tensors[parameters["frozen.weight"].tensor].grad
    assert graph.tensors[parameters["shared.weight"].tensor].grad
    assert not graph.tensors[parameters["unused.weight"].tensor].grad
    assert len([i for i in graph.inputs if i.tensor]) == 2


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attribute = torch.linspace(0, 1, 4)
        self.register_buffer("hidden_buffer", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.tensor([3, 1, 0, 2])
        return self.linear(x)[:, order] * self.attribute + self.hidden_buffer + torch.arange(4)


def test_constants_travel_with_the_graph() -> None:
    graph = faithful(Constants(), (torch.randn(2, 4),), meta=False)
    assert len(graph.constants) == 2
    assert [b.persistent for b in graph.buffers] == [False]


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with torch.no_grad():
            scale = hidden.abs().mean() + 1
            with torch.enable_grad():
                bonus = (self.linear.weight**2).sum()
        with torch.autocast("cpu", enabled=False):
            hidden = hidden / scale
        return hidden + bonus + hidden.detach() * 3


def test_gradients_stop_where_they_stop_in_the_model() -> None:
    graph = faithful(Regions(), (torch.randn(2, 4),))
    by_target = {op.target: op for op in graph.ops}
    assert not by_target["aten.abs.default"].grad
    assert not graph.tensors[by_target["aten.mean.default"].outputs[0]].grad
    assert by_target["aten.div.Tensor"].grad


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_by_rate_and_mode(rate: float, training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate), nn.Linear(4, 4)).train(training)
    graph = faithful(model, (torch.randn(64, 4),))
    assert ("aten.dropout.default" in targets(graph)) == (training and rate > 0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)))
        turn = torch.polar(torch.ones(4), torch.arange(4).float())
        return torch.view_as_real(pairs * turn).flatten(-2)


def test_views_as_complex() -> None:
    assert "aten.view_as_complex.default" in targets(faithful(Complex(), (torch.randn(3, 8),)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class ShapedLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return self.scale.expand_as(h) * x.flatten().view_as(h)


def test_only_the_shape_is_read_where_only_the_shape_counts() -> None:
    """A piece of ``expand_as`` is told its shape; what it was like is not handed to it."""
    graph = faithful(ShapedLike(), (torch.randn(3, 8),))
    assert {op.target: len(op.inputs) for op in graph.ops if op.target.split(".")[1] in ("expand", "view")} == {
        "aten.expand.default": 1,
        "aten.view.default": 1,
    }


def test_recurrent_layers_stay_whole() -> None:
    assert {"aten.lstm.input", "aten.gru.input"} <= set(targets(faithful(Recurrent(), (torch.randn(2, 7, 4),))))


def test_every_operator_knows_its_module_and_line() -> None:
    graph = capture(SeveralUses(), (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)))
    assert {op.module for op in graph.ops} >= {"embed", "frozen", "head"}
    assert all("test_structures.py:" in op.source for op in graph.ops)


def test_capture_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("meta")
    before = copy.deepcopy(model.state_dict())
    first = capture(model, (torch.randn(3, 4, device="meta"),))
    assert all(p.is_meta for p in model.parameters())
    assert list(before) == list(model.state_dict())
    assert fingerprint(first) == fingerprint(capture(model, (torch.randn(3, 4, device="meta"),)))


def test_the_fingerprint_sees_what_matters() -> None:
    def of(width: int, batch: int, bias: bool = True) -> str:
        return fingerprint(capture(nn.Linear(4, width, bias=bias), (torch.zeros(batch, 4),)))

    assert of(3, 2) == of(3, 2)
    assert len({of(3, 2), of(5, 2), of(3, 4), of(3, 2, bias=False)}) == 4


class Repeating(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.repeat_interleave(x, 2, dim=1, output_size=8)


def test_a_size_that_only_repeats_what_follows_is_left_out() -> None:
    """A piece of the operator has a size of its own: Mamba-2's would not run where its heads are cut."""
    (op,) = faithful(Repeating(), (torch.randn(3, 4),)).ops
    assert op.kwarg("output_size") is None
