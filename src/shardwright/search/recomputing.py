"""What recomputation costs twice: which operators of a block run again in backward, and whose inputs are brought again.

``torch.utils.checkpoint`` stops the second forward pass at the last tensor that was saved in the first: what follows is
not computed, reduced or gathered again, nor is an operator that comes last and saved nothing but its inputs (usually the
block's last product). The same rule for the nodes of one rank is :mod:`shardwright.program.blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.graph import Graph, Op
from shardwright.graph.repeats import span_of
from shardwright.program.footprints import Call, Forward, Strided, forward


@dataclass(frozen=True)
class Recomputation:
    """Operators (by name) → their block, those that run twice, and those whose inputs are changed and read twice."""

    block: Mapping[str, str]
    runs: frozenset[str]
    reads: frozenset[str]


def recomputation(graph: Graph, paths: Sequence[str], device: str) -> Recomputation:
    """What recomputing the blocks at these module paths means on a device of this kind.

    >>> recomputation(graph, ("blocks.0",), "cuda").runs
    """
    block: dict[str, str] = {}
    runs: set[str] = set()
    reads: set[str] = set()
    for path in paths:
        names = [graph.ops[index].name for index in span_of(graph, path)]
        block.update(dict.fromkeys(names, path))
        for index in reversed(span_of(graph, path)):
            kept = _footprint(graph, graph.ops[index], device)
            if kept.saved_inputs or kept.saved_fresh:
                place = names.index(graph.ops[index].name)
                runs.update(names[: place + bool(kept.saved_fresh)])
                reads.update(names[: place + 1])
                break
    return Recomputation(block, frozenset(runs), frozenset(reads))


def _footprint(graph: Graph, op: Op, device: str) -> Forward:
    tensors = [graph.tensors[name] for name in op.inputs]
    given = tuple(Strided.contiguous(t.shape, t.dtype, t.grad and op.grad and graph.training) for t in tensors)
    return forward(Call.of(op), given, device)
