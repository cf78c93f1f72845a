"""Operators that real models use rarely: each plans, runs on two processes and gives the numbers of one.

Every case is a small model with a trained layer on both sides of the operator, so that its gradients are compared too.
Planned are the best strategy and, for every way two devices can split the operator, the best one that does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowering.strategies import mesh_with
from runtime.workers import device_mesh
from shardwright.frontend import capture
from shardwright.graph import Graph, Op
from shardwright.lowering.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from shardwright.operators.rules import OpRules, Split
from shardwright.operators.strategy import Strategy
from shardwright.planner import describe_graph
from shardwright.program.steps import Line
from shardwright.search.options import EVERYTHING, Restriction, splits_of
from shardwright.search.strategies import find_strategy
from shardwright.verification.verify import check

ROWS = (4, 6, 5)
"""Batch, positions, features; the layer before makes 8 features of them."""

IMAGE = (4, 3, 9, 8)
"""Batch, channels, and a height that two devices cut unevenly; the layer before makes 8 channels."""


class Sandwich(nn.Module):
    """A trained layer, the operator, a trained layer, a scalar in which every place counts differently.

    Without the weights a roll or a sort could put its results anywhere, and loss and gradients would be the same.
    """

    weights: Tensor

    def __init__(self, before: nn.Module, middle: Callable[[Tensor], Tensor], after: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.before, self.middle, self.after = before, middle, after
        self.double()
        self.register_buffer("weights", torch.randn_like(self._result(x)).detach())

    def _result(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))

    def forward(self, x: Tensor) -> Tensor:
        return (self._result(x).pow(2) * self.weights).mean()


class Grouped(nn.Module):
    """A mixture of experts' product: rows grouped by expert, one group empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 6) * 0.3)
        self.register_buffer("ends", torch.tensor([7, 7, 15, 24], dtype=torch.int32))

    def forward(self, h: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(h.reshape(24, 8), self.weight, offs=self.ends)


class Sampled(nn.Module):
    """``grid_sample`` at trained places."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Parameter(torch.rand(4, 5, 6, 2) * 1.8 - 0.9)

    def forward(self, h: Tensor) -> Tensor:
        return F.grid_sample(h, self.grid, align_corners=False)


class Recurrent(nn.Module):
    """The outputs of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 6, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.cell(h)[0]


def _masked_scatter(h: Tensor) -> Tensor:
    chosen = (h.detach().sum(-1, keepdim=True) > 0).expand_as(h)
    return h.masked_scatter(chosen, h.flip(1) * 2)


def _topk(h: Tensor) -> Tensor:
    values, places = h.topk(3, dim=-1)
    return values * (places + 1)


def _sort(h: Tensor) -> Tensor:
    values, places = h.sort(dim=1, stable=True)
    return values * (places + 1) + h.gather(1, places)


def _index_put(h: Tensor) -> Tensor:
    rows, columns = torch.tensor([0, 3, 0]), torch.tensor([5, 1, 5])
    return torch.index_put(h, (rows, columns), h[:3, 0] * 2, accumulate=True)


def _masked_fill_in_place(h: Tensor) -> Tensor:
    h = h.clone()
    h[(h.detach().sum(-1) > 0)] = 0.25
    return h


def _scatter_add(h: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 2, 1, 0, 4])[None, :, None].expand(4, 6, 8)
    return h.new_zeros(4, 5, 8).scatter_add(1, places, h)


def _scatter_reduce(h: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 2, 1, 0, 4])[None, :, None].expand(4, 6, 8)
    return h.new_zeros(4, 5, 8).scatter_reduce(1, places, h, "amax", include_self=False)


def _spectrogram(h: Tensor) -> Tensor:
    window = torch.hann_window(16, dtype=h.dtype)
    return torch.view_as_real(torch.stft(h.flatten(1), 16, 8, window=window, return_complex=True)).flatten(2)


def _fourier(h: Tensor) -> Tensor:
    transformed = torch.fft.fftn(h, dim=(1, 2))
    return transformed.real + 0.5 * transformed.imag


def _rotary(h: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(6, dtype=h.dtype), torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=h.dtype))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (4, 2))) * turns).flatten(-2)


Case = tuple[str, tuple[int, ...], Callable[[], Any], int]
"""The operator's name in the graph, the input's shape, what makes the middle, features or channels after it."""

CASES: dict[str, Case] = {
    "histc": ("histc", ROWS, lambda: lambda h: h * torch.histc(h.detach(), 8, -1.0, 1.0), 8),
    "histc_of_data_range": ("histc", ROWS, lambda: lambda h: h * torch.histc(h.detach(), 8), 8),
    "im2col": ("im2col", IMAGE, lambda: lambda h: F.unfold(h, 3, padding=1, stride=2)[..., None], 72),
    "col2im": ("col2im", IMAGE, lambda: lambda h: F.fold(F.unfold(h, 3, padding=1), (9, 8), 3, padding=1), 8),
    "fft_fftn": ("fft_fftn", ROWS, lambda: _fourier, 8),
    "roll": ("roll", IMAGE, lambda: lambda h: torch.roll(h, (2, -3), (2, 3)), 8),
    "masked_scatter": ("masked_scatter", ROWS, lambda: _masked_scatter, 8),
    "bilinear": (
        "upsample_bilinear2d",
        IMAGE,
        lambda: lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
        8,
    ),
    "bilinear_corners": (
        "upsample_bilinear2d",
        IMAGE,
        lambda: lambda h: F.interpolate(h, size=(5, 11), mode="bilinear", align_corners=True),
        8,
    ),
    "bicubic": ("upsample_bicubic2d", IMAGE, lambda: lambda h: F.interpolate(h, size=(5, 11), mode="bicubic"), 8),
    "nearest": ("upsample_nearest2d", IMAGE, lambda: lambda h: F.interpolate(h, scale_factor=2), 8),
    "unfold": ("unfold", ROWS, lambda: lambda h: h.unfold(1, 3, 2).flatten(2), 24),
    "conv_transpose2d": (
        "conv_transpose2d",
        IMAGE,
        lambda: nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1),
        6,
    ),
    "conv_transpose2d_groups": ("conv_transpose2d", IMAGE, lambda: nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2), 6),
    "topk": ("topk", ROWS, lambda: _topk, 3),
    "sort": ("sort", ROWS, lambda: _sort, 8),
    "index_put": ("index_put", ROWS, lambda: _index_put, 8),
    "index_put_mask": ("index_put", ROWS, lambda: _masked_fill_in_place, 8),
    "grouped_mm_fallback": ("grouped_mm_fallback", ROWS, Grouped, 6),
    "cumsum": ("cumsum", ROWS, lambda: lambda h: h.cumsum(1), 8),
    "scatter_add": ("scatter_add", ROWS, lambda: _scatter_add, 8),
    "index_select": ("index_select", ROWS, lambda: lambda h: h.index_select(1, torch.tensor([5, 0, 0, 3])), 8),
    "einsum": ("einsum", ROWS, lambda: lambda h: torch.einsum("bsh,bth->bst", h, h), 6),
    "group_norm": ("group_norm", IMAGE, lambda: nn.GroupNorm(4, 8), 8),
    "pixel_shuffle": ("pixel_shuffle", IMAGE, lambda: lambda h: F.pixel_shuffle(h, 2), 2),
    "repeat_interleave": ("repeat_interleave", ROWS, lambda: lambda h: h.repeat_interleave(2, dim=1), 8),
    "grid_sample": ("grid_sampler", IMAGE, Sampled, 8),
    "adaptive_avg_pool": ("adaptive_avg_pool2d", IMAGE, lambda: lambda h: F.adaptive_avg_pool2d(h, (4, 3)), 8),
    "bucketize": (
        "bucketize",
        ROWS,
        lambda: lambda h: h * torch.bucketize(h.detach(), torch.tensor([-0.3, 0.0, 0.4], dtype=h.dtype)),
        8,
    ),
    "one_hot": ("one_hot", ROWS, lambda: lambda h: h * F.one_hot(h.detach().argmax(-1), 8), 8),
    "addcmul": ("addcmul", ROWS, lambda: lambda h: torch.addcmul(h, h, h.flip(0), value=0.5), 8),
    "logsumexp": ("logsumexp", ROWS, lambda: lambda h: h.logsumexp(1), 8),
    "view_as_complex": ("view_as_complex", ROWS, lambda: _rotary, 8),
    "scatter_reduce": ("scatter_reduce", ROWS, lambda: _scatter_reduce, 8),
    "index_add": ("index_add", ROWS, lambda: lambda h: h.index_add(1, torch.tensor([0, 3, 3]), h[:, :3]), 8),
    "cdist": ("cdist", ROWS, lambda: lambda h: torch.cdist(h, h.flip(1) * 1.5), 6),
    "fft_rfft": (
        "fft_rfft",
        ROWS,
        lambda: lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=1) * (1 + 2j), n=6, dim=1),
        8,
    ),
    "stft": ("stft", ROWS, lambda: _spectrogram, 14),
    "reflection": ("pad", IMAGE, lambda: lambda h: F.pad(h, (2, 1, 3, 1), mode="reflect"), 8),
    "instance_norm": ("instance_norm", IMAGE, lambda: nn.InstanceNorm2d(8, affine=True), 8),
    "prelu": ("prelu", IMAGE, lambda: nn.PReLU(8), 8),
    "adaptive_max_pool": ("adaptive_max_pool2d", IMAGE, lambda: lambda h: F.adaptive_max_pool2d(h, (4, 3)), 8),
    "gru": ("gru", ROWS, Recurrent, 6),
    "cumprod": ("cumprod", ROWS, lambda: lambda h: h.cumprod(1), 8),
    "median": ("median", ROWS, lambda: lambda h: h.median(1)[0], 8),
    "linalg_inv": (
        "linalg_inv",
        ROWS,
        lambda: lambda h: torch.linalg.inv(h @ h.mT + torch.eye(6, dtype=h.dtype)),
        6,
    ),
    "diag_embed": ("diag_embed", ROWS, lambda: lambda h: h.diag_embed(), 8),
    "rot90": ("rot90", IMAGE, lambda: lambda h: h.rot90(1, (2, 3)), 8),
    "hstack": ("hstack", ROWS, lambda: lambda h: torch.hstack([h, h * 2]), 8),
    "kron": ("kron", ROWS, lambda: lambda h: torch.kron(h[0], h[1]), 64),
}


def model_of(name: str) -> tuple[Sandwich, Tensor]:
    """The model of a case and its input, the same in every process."""
    if name == "grouped_mm_fallback":
        import transformers.integrations.moe  # noqa: F401 # registers the operator
    _, shape, middle, width = CASES[name]
    torch.manual_seed(0)
    layers: tuple[nn.Module, nn.Module] = (
        (nn.Linear(5, 8), nn.Linear(width, 3))
        if shape == ROWS
        else (nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(width, 2, 1))
    )
    x = torch.randn(shape, dtype=torch.float64)
    return Sandwich(layers[0], middle(), layers[1], x), x


def strategies_of(name: str) -> tuple[Graph, dict[str, Strategy]]:
    """The captured case, the best strategy, and the best for every split of the operator in question."""
    model, x = model_of(name)
    graph = capture(model, (x,))
    rare = [op for op in graph.ops if op.target.split(".")[1] == CASES[name][0]]
    assert rare, f"{name}: no such operator among {sorted({op.target for op in graph.ops})}"
    described, mesh = describe_graph(graph), mesh_with((2,))
    found = {"auto": find_strategy(described, mesh).strategy}
    for op in rare:
        for split in splits_of(op, described.rules[op.name], (2,), {}, EVERYTHING):
            if split != (None,):
                pinned = Restriction("pinned", split=functools.partial(_pins, op.name, split))
                found[f"{op.name} by {split[0]}"] = find_strategy(described, mesh, within=pinned).strategy
    return graph, found


def _pins(name: str, chosen: Split, op: Op, rules: OpRules, split: Split) -> bool:
    return op.name != name or split == chosen


def agree_with_eager(rank: int, cases: dict[str, tuple[Graph, dict[str, Strategy]]]) -> list[str]:
    """What differs, a line for each strategy that gives other numbers or none at all."""
    wrong: list[str] = []
    for name, (graph, strategies) in cases.items():
        model, x = model_of(name)
        for label, strategy in strategies.items():
            try:
                answer = check(model, (x,), {}, strategy, steps=1, graph=graph)
            except Exception as error:  # the other cases are still worth running: all ranks fail alike
                wrong.append(f"{name}, {label}: {error!r}")
                continue
            if answer is not None and not answer.agrees:
                wrong.append(f"{name}, {label}: {answer.as_dict()['disagreeing']}")
    return wrong


GROUPS = [list(CASES)[start : start + 10] for start in range(0, len(CASES), 10)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}…{names[-1]}")
def test_same_numbers(pair, names):
    if "grouped_mm_fallback" in names:
        pytest.importorskip("transformers")
    wrong = pair.run(agree_with_eager, {name: strategies_of(name) for name in names}, seconds=100)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def test_complex_numbers_change_layout(pair):
    pair.run(moves_complex_numbers, seconds=60)


def moves_complex_numbers(rank: int) -> None:
    """Shards of one dim become shards of another, and sums are taken, also of values that are conjugated lazily."""
    line = Line(device_mesh((2,)).get_group("a").group_name, 2, rank)
    whole = torch.randn(6, 5, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)).conj()
    shard = whole.chunk(2, 0)[rank]
    assert torch.equal(all_to_all(shard, 0, 6, 1, 5, line), whole.chunk(2, 1)[rank])
    assert torch.equal(all_gather(shard, 0, 6, line), whole)
    assert torch.equal(all_reduce(whole, "sum", line), 2 * whole)
    assert torch.equal(reduce_scatter(whole, 1, 5, "sum", line), 2 * whole.chunk(2, 1)[rank])


def test_another_program_is_noticed(pair):
    graph, strategies = strategies_of("roll")
    shifted = [replace(op, args=(op.args[0], (1, -3), op.args[2])) if op.name == "roll" else op for op in graph.ops]
    wrong = pair.run(agree_with_eager, {"roll": (replace(graph, ops=tuple(shifted)), strategies)}, seconds=100)
    assert len(wrong[0]) == len(strategies)
