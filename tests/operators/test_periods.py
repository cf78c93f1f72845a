"""A dim that repeats itself is cut between its repeats: every piece takes the whole input, and fewer times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from shardwright.frontend import capture
from shardwright.operators import analyse
from shardwright.operators.rules import LoopRule


class Repeats(nn.Module):
    """Relative positions as DeBERTa has them: one table of scores, said again for every row of a batch."""

    def __init__(self, times: tuple[int, ...]) -> None:
        super().__init__()
        self.table, self.times = nn.Parameter(torch.randn(4, 6, 8)), times

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.repeat(*self.times).sum()


def loops(*times: int) -> dict[str, LoopRule]:
    graph = capture(Repeats(times), (torch.randn(3),))
    op = next(op for op in graph.ops if op.target == "aten.repeat.default")
    return dict(analyse(op, graph.tensors).by_name)


@pytest.mark.parametrize(("times", "loop", "dim", "extent"), [((10, 1, 1), "i0", 0, 10), ((1, 1, 3), "i2", 2, 3)])
def test_a_repeated_dim_is_cut_into_whole_repeats(times: tuple[int, ...], loop: str, dim: int, extent: int) -> None:
    rule = loops(*times)[loop]
    assert (rule.inputs, rule.outputs) == ((Replicate(),), (Shard(dim),))
    assert (rule.extent, rule.even) == (extent, True)  # five pieces of ten repeats, never four


def test_a_dim_that_is_not_repeated_is_cut_with_its_input() -> None:
    assert loops(10, 1, 1)["i1"].inputs == (Shard(1),)


def test_both_ways_stand_where_a_new_dim_is_repeated() -> None:
    rules = loops(5, 1, 1, 1)
    assert rules["i0"].inputs == (Replicate(),)
    assert rules["i1"].inputs == (Shard(0),)
