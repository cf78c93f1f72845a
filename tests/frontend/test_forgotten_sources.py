"""What PyTorch writes while a model is captured is let go of: a process may capture for days."""

from __future__ import annotations

from torch.fx import graph_module

from shardwright.frontend import capture
from shardwright.zoo.reference import resolve


def test_no_text_of_a_traced_module_is_left_behind() -> None:
    built = resolve("gpt:small", device="meta")
    before = set(graph_module._loader.eval_cache)
    capture(built.model, built.args, built.kwargs)
    assert set(graph_module._loader.eval_cache) <= before
