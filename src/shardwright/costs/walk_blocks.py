"""Recomputed blocks among the nodes of a forward pass: what is kept of each, and what is computed again.

Under ``torch.utils.checkpoint`` a block keeps its inputs only (Chen et al., 2016). The first backward node that asks for a
saved tensor has the forward pass of the block run again, up to the last tensor that was saved: an operator that saves
nothing but its inputs is not itself run again if nothing after it saves. The inputs are let go of when the backward of the
first node that saves is through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.costs.walk_nodes import Change, Node, Nodes


@dataclass(frozen=True)
class Block:
    """A recomputed block: its ``nodes``, those that run ``again``, the first and the last one that save, its inputs."""

    nodes: range
    again: range
    first: int
    last: int
    inputs: tuple[int, ...]


def blocks(nodes: Nodes) -> Mapping[int, Block]:
    """Every node of a recomputed block → its block. Blocks that save nothing have nothing to compute again."""
    table: dict[int, Block] = {}
    for span in nodes.recomputed:
        saving = [number for number in span if saves(nodes.nodes[number])]
        if not saving:
            continue
        block = Block(span, _again(nodes, span, saving[-1]), saving[0], saving[-1], _inputs(nodes, span))
        table.update(dict.fromkeys(span, block))
    return table


def saves(node: Node) -> bool:
    """Whether autograd saves tensors for the backward of a node; changes of layout save none."""
    return not isinstance(node, Change) and bool(node.footprint.saved_inputs or node.footprint.saved_fresh)


def read(node: Node) -> tuple[int, ...]:
    """The values a node reads."""
    return (node.source,) if isinstance(node, Change) else node.inputs


def made(node: Node) -> tuple[int, ...]:
    """The values a node makes."""
    return (node.result,) if isinstance(node, Change) else tuple(o for o in node.outputs if o is not None)


def _again(nodes: Nodes, span: range, last: int) -> range:
    node = nodes.nodes[last]
    runs = not isinstance(node, Change) and bool(node.footprint.saved_fresh)
    return range(span.start, last + runs)


def _inputs(nodes: Nodes, span: range) -> tuple[int, ...]:
    """Values from outside; those that rest are there anyway."""
    inside = {value for number in span for value in made(nodes.nodes[number])}
    inside.update(nodes.rest.values())
    return tuple(dict.fromkeys(v for number in span for v in read(nodes.nodes[number]) if v not in inside))
