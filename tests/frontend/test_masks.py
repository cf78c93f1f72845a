"""Attention masks that hide nothing are left out; those that hide something, or depend on what is given, stay."""

from __future__ import annotations

import pytest
import torch

from shardwright.frontend import capture
from shardwright.frontend.replay import replay


class Attending(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, torch.nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.ones(5, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[2])
        mask = {
            "everything": (positions >= 0).expand(5, 5),
            "zeros": torch.zeros(5, 5),
            "all but the first": (positions >= 1).expand(5, 5),
            "a buffer": self.seen.expand(5, 5),
            "random": torch.rand(5, 5) > -1,
        }[self.kind]
        return torch.nn.functional.scaled_dot_product_attention(x * self.scale, x, x, attn_mask=mask)


@pytest.mark.parametrize(
    ("kind", "stays"),
    [("everything", False), ("zeros", False), ("all but the first", True), ("a buffer", True), ("random", True)],
)
def test_masks_that_hide_nothing_are_left_out(kind, stays):
    model, x = Attending(kind), torch.randn(1, 2, 5, 4)
    graph = capture(model, (x,))
    attention = next(op for op in graph.ops if "attention" in op.target)
    assert (len(attention.inputs) == 4) == stays
    assert stays or not any(op.target.startswith(("aten.arange", "aten.zeros")) for op in graph.ops)
    torch.testing.assert_close(replay(graph, model, (x,)), model(x))
