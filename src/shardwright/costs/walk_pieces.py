"""One rank's piece of every operator, worked out once for all operators that repeat it.

The layers of a deep model hold the same operators with the same splits, so what a split needs and gives, which call runs in
the operator's place and what that call does to memory are found for the first of them (:mod:`shardwright.graph.repeats`) and
looked up for the others: depth costs only the look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.cluster import Mesh
from shardwright.costs.memory_probe import Call, Forward, Strided, forward
from shardwright.errors import PlanError
from shardwright.graph import Graph, Op
from shardwright.graph.repeats import representatives
from shardwright.operators import analyse, piece
from shardwright.operators.rules import Layout, Need, OpRules, Split, input_layouts, nested_chunk, output_layouts

Kernel = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Piece:
    """An operator cut by a split: what it needs and gives, and the local operator (or kernel) that runs in its place."""

    rules: OpRules
    needs: tuple[tuple[Need, ...], ...]
    extents: tuple[int, ...]
    layouts: tuple[Layout, ...]
    op: Op
    kernel: Kernel | None
    told_apart: tuple[Any, ...]
    _calls: dict[tuple[int, ...], Call] = field(default_factory=dict)
    _footprints: dict[object, Forward] = field(default_factory=dict)

    def call(self, slots: tuple[int, ...]) -> Call:
        """The local call; ``slots`` numbers the distinct tensors among its inputs."""
        if slots not in self._calls:
            self._calls[slots] = Call.of(self.op, slots, self.told_apart)
        return self._calls[slots]

    def footprint(
        self, slots: tuple[int, ...], given: tuple[Strided, ...], device: str, expected: tuple[Strided | None, ...]
    ) -> Forward:
        """What the local call does to memory when its inputs lie like this."""
        key = (slots, given, expected)
        if key not in self._footprints:
            self._footprints[key] = forward(self.call(slots), given, device, self.kernel, expected)
        return self._footprints[key]


class Pieces:
    """The pieces of a graph's operators on a mesh."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh, self._alike = graph, mesh, representatives(graph)
        self._known: dict[tuple[str, Split], Piece] = {}

    def of(self, op: Op, split: Split | None) -> Piece:
        """The piece of one operator.

        Raises
        ------
        PlanError
            When the split is missing, belongs to another mesh, or names a loop the operator does not have.
        """
        if split is None or len(split) != len(self.mesh.axes):
            raise PlanError(f"the strategy has no split for operator {op.name} ({op.target}).", "Make the plan again.")
        key = (self._alike[op.name], split)
        if key not in self._known:
            self._known[key] = self._cut(op, split)
        return self._known[key]

    def _cut(self, op: Op, split: Split) -> Piece:
        tensors, rules = self.graph.tensors, analyse(op, self.graph.tensors)
        unknown = [loop for loop in split if loop is not None and loop not in rules.by_name]
        if unknown:
            raise PlanError(f"operator {op.name} ({op.target}) has no loop {unknown[0]!r}.", "Make the plan again.")
        ranges = self._ranges(rules, split)
        made = piece(op, tensors, ranges)
        told_apart: tuple[Any, ...] = ()
        if made.kernel is not None:
            shapes = tuple(tensors[name].shape for name in (*op.inputs, *filter(None, op.outputs)))
            told_apart = (shapes, tuple(sorted(ranges.items())))
        return Piece(
            rules,
            tuple(input_layouts(rules, split, len(op.inputs))),
            tuple(0 if loop is None else rules.by_name[loop].extent for loop in split),
            tuple(output_layouts(rules, split, len(op.outputs))),
            made.op or op,
            made.kernel,
            told_apart,
        )

    def _ranges(self, rules: OpRules, split: Split) -> dict[str, tuple[int, int]]:
        cuts: dict[str, list[tuple[int, int]]] = {}
        for size, loop in zip(self.mesh.sizes, split, strict=True):
            if loop is not None and rules.by_name[loop].divides:
                cuts.setdefault(loop, []).append((size, 0))
        return {loop: nested_chunk(rules.by_name[loop].extent, pieces) for loop, pieces in cuts.items()}
