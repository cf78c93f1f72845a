"""Labels of loops: what a model makes for its batch is of the batch."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwright.frontend import capture
from shardwright.operators import analyse
from shardwright.search.labels import label_loops


class Masked(torch.nn.Module):
    """A mask for every row and a bias for all of them, both made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1, 2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 1, 4, 4, dtype=torch.bool)
        bias = torch.where(mask, self.bias, torch.tensor(-1e9))
        return scaled_dot_product_attention(x, x, x, bias).square().mean()


def test_a_mask_made_inside_the_model_is_of_the_batch():
    graph = capture(Masked(), (torch.randn(6, 2, 4, 4),), {})
    labels = label_loops(graph, {op.name: analyse(op, graph.tensors) for op in graph.ops})
    assert labels["ones"] == labels["where"] == {"i0": "batch"}
