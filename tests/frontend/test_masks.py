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


class Biased(torch.nn.Module):
    """A bias per head looked up for every distance, as T5 has it: its last dim is the table's first."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.table, self.copied = torch.nn.Embedding(9, 2), copied

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[2])
        bias = self.table(places - places[:, None] + 4).permute(2, 0, 1).unsqueeze(0)
        bias = torch.where(seen, bias, float("-inf"))
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, bias.contiguous() if self.copied else bias)


@pytest.mark.parametrize("copied", [False, True])
def test_a_mask_that_no_fused_kernel_takes_is_copied_first(copied):
    """On a GPU a mask without stride 1 along the keys means float32 products of all scores (T5 before transformers 5.22)."""
    model, x = Biased(copied).double(), torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    seen[2] = False  # a row that sees nothing gives zeros, and no gradient
    graph = capture(model, (x, seen))
    attention = next(op for op in graph.ops if "attention" in op.target)
    assert [op.target for op in graph.ops if attention.inputs[3] in op.outputs] == ["aten.contiguous.default"]
    assert sum(op.target == "aten.contiguous.default" for op in graph.ops) == 1
    assert graph.tensors[attention.inputs[3]].grad
    found = {}
    for name, out in (("ours", replay(graph, model, (x, seen))), ("theirs", model(x, seen))):
        found[name] = out, *torch.autograd.grad(out.square().sum(), (x, model.table.weight))
    assert found["ours"][0][:, :, 2].abs().max() == 0
    for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
        torch.testing.assert_close(ours, theirs)
