"""Recomputation: blocks whose activations are not kept but computed again in the backward pass (Chen et al., 2016).

A block is named by its module path (``blocks.3``); everything between its first and its last operator runs under
``torch.utils.checkpoint``. Gathers and other collectives inside a block run again with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from shardwright.errors import LoweringError


class Recomputed(torch.nn.Module):
    """A part of a program that keeps only its inputs for backward."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.part(*inputs)
        return checkpoint(self.part, *inputs, use_reentrant=False)


def with_recomputation(module: fx.GraphModule, blocks: Sequence[str]) -> fx.GraphModule:
    """The same program with these blocks recomputed. Nodes carry the path they came from in ``meta["path"]``."""
    if not blocks:
        return module
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    spans: list[tuple[int, int, str]] = []
    for block in blocks:
        inside = [i for i, node in enumerate(nodes) if _within(node.meta.get("path", ""), block)]
        if not inside:
            raise LoweringError(
                f"there is no block {block!r} to recompute.", "Name modules as in model.named_modules()."
            )
        spans.append((inside[0], inside[-1], block))
    spans.sort()
    part: dict[str, int] = {}
    recomputed: set[int] = set()
    number, span = 0, 0
    for i, node in enumerate(nodes):
        while span < len(spans) and i > spans[span][1]:
            span, number = span + 1, number + 1
        if span < len(spans) and spans[span][0] <= i <= spans[span][1]:
            if i == spans[span][0]:
                number += 1
            recomputed.add(number)
        part[node.name] = number
    whole = split_module(module, module, lambda node: part[node.name], keep_original_order=True)
    for number in recomputed:
        name = f"submod_{number}"
        setattr(whole, name, Recomputed(whole.get_submodule(name)))
    return whole


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")
