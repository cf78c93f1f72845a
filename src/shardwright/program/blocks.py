"""Recomputed blocks among the nodes of a forward pass: what is kept of each, and what is computed again.

Under ``torch.utils.checkpoint`` a block keeps its inputs only (Chen et al., 2016). The first backward node that asks for a
saved tensor has the forward pass of the block run again, up to the last tensor that was saved: an operator that saves
nothing but its inputs is not itself run again if nothing after it saves. The inputs are let go of when the backward of the
first node that saves is through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.program.dataflow import Change, Dataflow, made, read, saves


@dataclass(frozen=True)
class Block:
    """A recomputed block: its ``nodes``, those that run ``again``, the first and the last one that save, its inputs."""

    nodes: range
    again: range
    first: int
    last: int
    inputs: tuple[int, ...]


def blocks(flow: Dataflow) -> Mapping[int, Block]:
    """Every node of a recomputed block → its block. Blocks that save nothing have nothing to compute again."""
    table: dict[int, Block] = {}
    for span in flow.recomputed:
        saving = [number for number in span if saves(flow.nodes[number])]
        if not saving:
            continue
        block = Block(span, _again(flow, span, saving[-1]), saving[0], saving[-1], _inputs(flow, span))
        table.update(dict.fromkeys(span, block))
    return table


def _again(flow: Dataflow, span: range, last: int) -> range:
    node = flow.nodes[last]
    runs = not isinstance(node, Change) and bool(node.footprint.saved_fresh)
    return range(span.start, last + runs)


def _inputs(flow: Dataflow, span: range) -> tuple[int, ...]:
    """Values from outside; those that rest are there anyway."""
    inside = {value for number in span for value in made(flow.nodes[number])}
    inside.update(flow.rest.values())
    return tuple(dict.fromkeys(v for number in span for v in read(flow.nodes[number]) if v not in inside))
