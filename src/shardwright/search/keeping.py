"""Gathered parameters that stay until backward, as many as memory allows: between ZeRO-3 and ZeRO-2 (Rajbhandari, 2020).

The search gathers every sharded parameter twice, which costs least memory. Where memory is left, the gathered copies of the
parameters used last in the forward pass stay for the backward pass, which asks for them first, so their second gathering
is saved; PyTorch's FSDP does so for its last layer only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.rules import OpRules, Shard, Window, input_layouts, largest_shard
from shardwright.operators.strategy import Strategy


def keep_gathered(graph: Graph, rules: Mapping[str, OpRules], strategy: Strategy, room: float) -> Strategy | None:
    """The strategy with the gathered copies kept that take at most ``room`` bytes; nothing where none does.

    >>> keep_gathered(graph, rules, strategy, room=float("inf")).regathered
    frozenset()
    """
    kept: set[str] = set()
    for tensor, copy in gathered_copies(graph, rules, strategy).items():
        if copy <= room:
            room -= copy
            kept.add(tensor)
    return replace(strategy, regathered=strategy.regathered - kept) if kept else None


def gathered_copies(graph: Graph, rules: Mapping[str, OpRules], strategy: Strategy) -> dict[str, int]:
    """Bytes of the gathered copy of every parameter that is freed and gathered again, those used last first."""
    copies: dict[str, int] = {}
    for op in reversed(graph.ops):
        needs = input_layouts(rules[op.name], strategy.splits[op.name], len(op.inputs))
        for tensor, need in zip(op.inputs, needs, strict=True):
            if tensor in strategy.regathered and tensor not in copies:
                meta = graph.tensors[tensor]
                layout = tuple(Shard(p.dim) if isinstance(p, Window) else p for p in need)
                copies[tensor] = int(largest_shard(meta.shape, layout, strategy.sizes) * DTYPE_BYTES[meta.dtype])
    return copies
