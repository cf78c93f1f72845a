"""Other batches are made of the example's own rows, and are legal wherever it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.verification.batches import rows, told, varied


class Sorted(nn.Module):
    """Sequences of many lengths, the longest first, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, tokens: Tensor, lengths: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        return (self.table(tokens) * keep[..., None]).sum() + (self.table(positions).sum() * lengths).sum()


def batches(count: int = 6, steps: int = 3, training: bool = True):
    lengths = torch.arange(count, 0, -1)
    keep = torch.arange(5) < lengths[:, None]
    args = (torch.randint(2, 6, (count, 5)), lengths, keep, torch.arange(5))
    model = Sorted()
    return varied(model, capture(model, args), args, {}, steps, training)


def test_every_pass_has_another_batch_and_one_step_has_two():
    steps = batches()
    assert [len(step) for step in steps] == [1, 2, 1] and [len(step) for step in batches(training=False)] == [1, 1, 1]
    tokens = [batch.args[0] for step in steps for batch in step]
    assert not any(torch.equal(one, other) for n, one in enumerate(tokens) for other in tokens[:n])
    assert told(steps) == "4 passes on 4 different batches, step 2 adds up two"


def test_rows_stay_whole_in_order_and_in_range():
    first, *others = [batch.args for step in batches() for batch in step]
    for tokens, lengths, keep, positions in others:
        assert (lengths.diff() <= 0).all() and torch.equal(keep, torch.arange(5) < lengths[:, None])
        assert torch.equal(positions, torch.arange(5))
        assert all(any(torch.equal(row, known) for known in first[0]) for row in tokens)


@pytest.mark.parametrize("count", [3, 4, 7, 16])
def test_no_batch_is_the_example(count):
    found = [rows(count, number) for number in range(1, 5)]
    assert all((new.diff() >= 0).all() and not torch.equal(new, torch.arange(count)) for new in found)
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(found))


def test_one_or_two_rows_are_rolled():
    first, *others = [batch.args for step in batches(count=2) for batch in step]
    for tokens, lengths, keep, _ in others:
        assert torch.equal(tokens.sort().values, first[0].sort().values) and not torch.equal(tokens, first[0])
        assert torch.equal(keep.sum(1), first[2].sum(1)) and torch.equal(lengths, first[1])


class Looking(nn.Module):
    """Takes another way where a row repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * (2 if bool((x[:-1] == x[1:]).any()) else 1)


def test_what_the_example_decided_stays_decided():
    torch.manual_seed(0)
    model, args = Looking(), (torch.randn(4, 3),)
    graph: Graph = capture(model, args)
    steps = varied(model, graph, args, {}, 3)
    assert all(torch.equal(batch.args[0], args[0]) for step in steps for batch in step)
    assert told(steps) == "4 passes on one batch, step 2 adds up two"


class Solving(nn.Module):
    """Qwen4: looks at its data, and fails on what no processor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.linear(torch.linalg.cholesky(x)).sum() if keep.any() else x.sum()


def test_batches_that_the_model_fails_on_are_not_given():
    model, args = Solving(), (torch.eye(3).expand(2, 3, 3).clone(), torch.ones(2, dtype=torch.bool))
    steps = varied(model, capture(model, args), args, {}, 3)
    assert told(steps) == "4 passes on one batch, step 2 adds up two"
