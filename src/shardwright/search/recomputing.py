"""What recomputation costs twice: which operators of a block run again in backward, and whose inputs are brought again.

The rule is that of :mod:`shardwright.program.blocks`, here for whole operators, before any strategy is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.graph import Graph, Op
from shardwright.graph.repeats import remembered, span_of
from shardwright.operators.rules import OpRules
from shardwright.program.blocks import cheap_operators, leading_to, whole_footprint


@dataclass(frozen=True)
class Recomputation:
    """What is computed again. ``block``: operators of recomputed blocks → these; ``runs``: operators that run twice;
    ``reads``: operators and the inputs of theirs that are brought to them twice; ``lightly``: all of it is light."""

    block: Mapping[str, str]
    runs: frozenset[str]
    reads: frozenset[tuple[str, str]]
    lightly: bool = False

    @property
    def key(self) -> str:
        """Recomputations of one graph with the same key are the same."""
        return f"{self.lightly}{tuple(dict.fromkeys(self.block.values()))}"


def recomputation(
    graph: Graph, paths: Sequence[str], device: str, rules: Mapping[str, OpRules], lightly: bool = False
) -> Recomputation:
    """What recomputing the blocks at these module paths means on a device of this kind.

    >>> recomputation(graph, ("blocks.0",), "cuda", rules).runs  # doctest: +SKIP
    """
    key = f"_recomputation_{device}_{lightly}_{tuple(paths)}"
    return remembered(graph, key, lambda: _found(graph, paths, device, rules, lightly))


def _found(
    graph: Graph, paths: Sequence[str], device: str, rules: Mapping[str, OpRules], lightly: bool
) -> Recomputation:
    block: dict[str, str] = {}
    runs: set[str] = set()
    reads: set[tuple[str, str]] = set()
    for path in paths:
        ops = {graph.ops[index].name: graph.ops[index] for index in span_of(graph, path)}
        block.update(dict.fromkeys(ops, path))
        makers = {name: op.name for op in ops.values() for name in op.outputs if name}
        saved = {op.name: _saved(graph, op, device) for op in ops.values()}
        may = cheap_operators(graph, list(ops.values()), rules, device) if lightly else ops.keys()
        asked = [tensor for op in ops.values() for tensor in saved[op.name]]
        again = leading_to(asked, makers, may, lambda name, ops=ops: ops[name].inputs)  # type: ignore[misc]
        runs |= again
        for op in ops.values():
            brought = op.inputs if op.name in again else [t for t in saved[op.name] if t in op.inputs]
            # A light block leaves gathered parameters to the backward pass, and what is there is not brought again.
            reads.update((op.name, t) for t in brought if not lightly or (t in makers and makers[t] in again))
    return Recomputation(block, frozenset(runs), frozenset(reads), lightly)


def _saved(graph: Graph, op: Op, device: str) -> list[str]:
    """The inputs that an operator saves, and its outputs where it saves something of its own."""
    kept = whole_footprint(graph, op, device)
    own = [name for name in op.outputs if name] if kept.saved_fresh else []
    return [*(op.inputs[position] for position in kept.saved_inputs), *own]
