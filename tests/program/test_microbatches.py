"""Micro-batches: what is exact in time, what is prepared for the whole batch, what is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Shard
from torch.nn import functional

from shardwright.errors import LoweringError
from shardwright.frontend import capture
from shardwright.frontend.replay import values_of
from shardwright.graph import Graph, Ref
from shardwright.program.microbatches import Microbatches, microbatches, sizes_of


class Losses(torch.nn.Module):
    """Means over uneven labels, with class weights, over rows, over all elements; a token that is the same for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.token = torch.nn.Parameter(torch.randn(1, 1, 6))
        self.register_buffer("weight", torch.rand(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        logits = self.first(rows)
        flat, labels = logits[:, 1:].reshape(-1, 5), y.reshape(-1)
        plain = functional.cross_entropy(flat, labels)
        weighed = functional.cross_entropy(flat, labels, self.weight, label_smoothing=0.1)
        square = functional.mse_loss(rows, torch.ones_like(rows))
        return plain + weighed + 2 * square + logits.pow(2).mean(), logits


def _example() -> tuple[Losses, tuple[torch.Tensor, ...], Graph]:
    torch.manual_seed(0)
    model, x, y = Losses().double(), torch.randn(7, 4, 6, dtype=torch.float64), torch.randint(5, (7, 4))
    y[0], y[3, 1:] = -100, -100
    return model, (x, y), capture(model, (x, y))


def _run(micro: Microbatches, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    held = {p.tensor: parameters[p.paths[0]] for p in micro.whole.parameters}
    held |= {b.tensor: buffers[b.path] for b in micro.whole.buffers}
    cpu = torch.device("cpu")
    ready = values_of(micro.prepared, held | inputs, cpu) if micro.prepared else {}
    outputs = []
    for number, size in enumerate(micro.sizes):
        given = {}
        for name, (source, dim) in micro.given.items():
            tensor = inputs[source] if source in inputs else ready[source]
            if dim is not None:
                start, stop = micro.region(tensor.shape[dim], number)
                tensor = tensor.narrow(dim, start, stop - start)
            given[name] = tensor
        graph = micro.graphs[size]
        found = values_of(graph, held | given, cpu)
        for name, tensor in graph.tensors.items():
            assert name not in found or tuple(found[name].shape) == tensor.shape
        outputs.append([found[out.name] for out in graph.outputs if isinstance(out, Ref)])
    joined = []
    for parts, join in zip(zip(*outputs, strict=True), micro.joins, strict=True):
        joined.append(torch.cat(parts, join.dim) if isinstance(join, Shard) else sum(parts))
    if micro.tail is None:
        return joined
    gave = {out.name: x for out, x in zip(micro.body.outputs, joined, strict=True) if isinstance(out, Ref)}
    every = values_of(micro.tail, held | inputs | ready | gave, cpu)
    return [every[out.name] for out in micro.whole.outputs if isinstance(out, Ref)]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_unequal_micro_batches_give_the_batch(count: int) -> None:
    model, (x, y), graph = _example()
    micro = microbatches(graph, count)
    assert [type(join) for join in micro.joins] == [Partial, Shard]
    loss, logits = _run(micro, model, {graph.inputs[0].tensor or "": x, graph.inputs[1].tensor or "": y})
    expected, expected_logits = model(x, y)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-13, atol=1e-13)
    mine = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_counts_of_labels_are_prepared_for_the_whole_batch() -> None:
    _, _, graph = _example()
    micro = microbatches(graph, 2)
    assert micro.prepared is not None
    assert any(op.name.endswith("~count") for op in micro.prepared.ops)
    assert not any(op.name.endswith("~count") for op in micro.graphs[4].ops)


def test_one_micro_batch_is_the_graph_itself() -> None:
    _, _, graph = _example()
    assert microbatches(graph, 1).graphs[1] is graph


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum()


class Contrast(torch.nn.Module):
    """Every row is compared with every other row, by a scale that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.scale * self.left(x) @ self.right(x).t()
        return functional.cross_entropy(logits, torch.arange(x.shape[0]))


class Balanced(torch.nn.Module):
    """A product of two means over the batch, as the losses that balance experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        first = functional.one_hot(shares.argmax(-1), 4).to(x.dtype)
        return (first.mean(0) * shares.mean(0)).sum() + shares.pow(2).mean()


class Routed(torch.nn.Module):
    """Rows sorted by expert, two experts for each, and brought back; the rows' own ways of picking are tried too."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.gate, self.weight = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.randn(3, 6, 6))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        experts, order = torch.sort(chosen.reshape(-1))
        rows = torch.einsum("sk,skj->sj", x[order // 2], self.weight[experts]).tanh() * shares.reshape(-1)[order, None]
        if self.again:
            back = torch.argsort(order)
        else:
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
        mixed = rows[back].view(x.shape[0], 2, 6).sum(1)
        return mixed[torch.arange(x.shape[0]), chosen[:, 0]].pow(2).sum()


class Inside(torch.nn.Module):
    """The rows of the batch lie inside another dim for a while, as in ``torch.nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.stack([x, x.tanh(), x.exp()])
        return self.attention(seen, seen, seen, need_weights=False)[0].pow(3).sum()


@pytest.mark.parametrize("model", [Contrast(), Balanced(), Routed(), Routed(again=True), Inside()])
def test_rows_may_meet_where_each_still_gets_its_own(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    model, x = model.double(), torch.randn(7, 6, dtype=torch.float64)
    graph = capture(model, (x,))
    micro = microbatches(graph, 3)
    assert (micro.tail is not None) == isinstance(model, Contrast | Balanced)
    found = _run(micro, model, {graph.inputs[0].tensor or "": x})[0]
    expected = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    mine, theirs = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


class ThenMore(torch.nn.Module):
    """Something with weights comes after rows have met."""

    def __init__(self, sort: bool) -> None:
        super().__init__()
        self.first, self.last, self.sort = torch.nn.Linear(6, 6), torch.nn.Linear(6, 4), sort

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x.sort(0).values if self.sort else x @ x.t() @ x).sum()


@pytest.mark.parametrize(
    ("model", "named"),
    [(Normed(), "batch_norm.*norm"), (ThenMore(False), "matmul.*linear"), (ThenMore(True), "sort.*linear")],
)
def test_what_needs_the_whole_batch_is_refused_by_name(model: torch.nn.Module, named: str) -> None:
    graph = capture(model, (torch.randn(8, 6),))
    with pytest.raises(LoweringError, match=named):
        microbatches(graph, 2)


def test_batch_norm_may_take_the_statistics_of_every_piece() -> None:
    torch.manual_seed(0)
    model, x = Normed().double(), torch.randn(7, 6, dtype=torch.float64)
    graph = capture(model, (x,))
    micro = microbatches(graph, 2, "per-piece")
    assert all(graph.mutations == one.mutations for one in micro.graphs.values())
    pieces = x.split(micro.sizes)
    found = _run(micro, model, {graph.inputs[0].tensor or "": x})[0]
    torch.testing.assert_close(found, sum(model(piece) for piece in pieces), rtol=1e-12, atol=1e-13)


def test_rows_are_shared_out_as_equally_as_can_be() -> None:
    assert sizes_of(9, 4) == (3, 2, 2, 2)
    with pytest.raises(LoweringError, match="batch of 2 cannot be cut into 3"):
        sizes_of(2, 3)
