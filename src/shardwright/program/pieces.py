"""One rank's piece of every operator, worked out once for all operators that repeat it.

The layers of a deep model hold the same operators with the same splits, so what a split needs and gives, which call runs in
the operator's place and what that call does to memory are found for the first of them (:mod:`shardwright.graph.repeats`) and
looked up for the others: depth costs only the look-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright._torch_compat import takes_device
from shardwright.errors import LoweringError
from shardwright.graph import Atom, Graph, Op, Value
from shardwright.graph.repeats import representatives
from shardwright.operators import analyse, piece
from shardwright.operators.rules import (
    Cut,
    Layout,
    Need,
    OpRules,
    Split,
    chunk,
    divides_exactly,
    doubly_windowed,
    input_layouts,
    nested_chunk,
    output_layouts,
    own_order_broken,
)
from shardwright.program.binding import Place
from shardwright.program.footprints import ForwardFootprint, OperatorCall, Strided, forward

Kernel = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class CutOperator:
    """An operator cut by a split: what it needs and gives, and the local operator (or kernel) that runs in its place.

    ``lines`` tells, for each cut loop, the mesh axes that cut it.
    """

    rules: OpRules
    needs: tuple[tuple[Need, ...], ...]
    extents: tuple[int, ...]
    layouts: tuple[Layout, ...]
    op: Op
    kernel: Kernel | None
    lines: Mapping[str, tuple[int, ...]]
    told_apart: tuple[Any, ...]
    _calls: dict[tuple[int, ...], OperatorCall] = field(default_factory=dict)
    _footprints: dict[object, ForwardFootprint] = field(default_factory=dict)

    def call(self, slots: tuple[int, ...]) -> OperatorCall:
        """The local call; ``slots`` numbers the distinct tensors among its inputs."""
        if slots not in self._calls:
            self._calls[slots] = OperatorCall.of(self.op, slots, self.told_apart)
        return self._calls[slots]

    def footprint(
        self, slots: tuple[int, ...], given: tuple[Strided, ...], device: str, expected: tuple[Strided | None, ...]
    ) -> ForwardFootprint:
        """What the local call does to memory when its inputs lie like this."""
        key = (slots, given, expected)
        if key not in self._footprints:
            self._footprints[key] = forward(self.call(slots), given, device, self.kernel, expected)
        return self._footprints[key]


class Pieces:
    """The pieces of a graph's operators at one place of a mesh, creating tensors on this kind of device."""

    def __init__(self, graph: Graph, place: Place, device: str) -> None:
        self.graph, self.place, self.device, self._alike = graph, place, Atom("device", device), representatives(graph)
        self._known: dict[tuple[str, Split], CutOperator] = {}

    def of(self, op: Op, split: Split | None) -> CutOperator:
        """The piece of one operator.

        Raises
        ------
        LoweringError
            When the split is missing, belongs to another mesh, names a loop the operator does not have, or cannot be run.
        """
        if split is None or len(split) != len(self.place.axes):
            raise _refused(op, "the strategy has no split for it", "Make the plan again for this model.")
        key = (self._alike[op.name], split)
        if key not in self._known:
            self._known[key] = self._cut(op, split)
        return self._known[key]

    def _cut(self, op: Op, split: Split) -> CutOperator:
        tensors, rules = self.graph.tensors, analyse(op, self.graph.tensors)
        lines = _lines(op, rules, split)
        ranges = self._ranges(op, rules, lines)
        placed = self._placed(op)
        made = piece(placed, tensors, ranges)
        told_apart: tuple[Any, ...] = ()
        if made.kernel is not None:
            shapes = tuple(tensors[name].shape for name in (*op.inputs, *filter(None, op.outputs)))
            told_apart = (shapes, tuple(sorted(ranges.items())))
        return CutOperator(
            rules,
            tuple(input_layouts(rules, split, len(op.inputs))),
            tuple(0 if loop is None else rules.by_name[loop].extent for loop in split),
            tuple(output_layouts(rules, split, len(op.outputs))),
            made.op or placed,
            made.kernel,
            lines,
            told_apart,
        )

    def _placed(self, op: Op) -> Op:
        """The operator with this rank's device wherever it names one or could: the model was captured on another."""

        def here(value: Value) -> Value:
            if isinstance(value, Atom) and value.kind == "device":
                return self.device
            return tuple(here(item) for item in value) if isinstance(value, tuple) else value

        kwargs = {key: here(value) for key, value in op.kwargs}
        if takes_device(op.target):
            kwargs["device"] = self.device
        return replace(op, args=tuple(here(value) for value in op.args), kwargs=tuple(kwargs.items()))

    def _ranges(self, op: Op, rules: OpRules, lines: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
        """This rank's part of every loop that is cut, in the units of its extent."""
        ranges = {}
        for loop, axes in lines.items():
            rule = rules.by_name[loop]
            if not rule.divides:
                continue
            cuts = [self.place.cuts[axis] for axis in axes]
            if not cuttable(rule.extent, rule.even, cuts):
                pieces = math.prod(len(cut) if isinstance(cut, tuple) else cut for cut in cuts)
                raise _refused(
                    op,
                    f"loop {loop!r} of extent {rule.extent} cannot be cut into {pieces} pieces",
                    "Choose another split, or sizes that divide.",
                )
            ranges[loop] = nested_chunk(
                rule.extent, list(zip(cuts, (self.place.coordinate[a] for a in axes), strict=True))
            )
        return ranges


def describe(op: Op) -> str:
    """``linear_3 (aten.linear.default) at blocks.0.attention, model.py:42`` as far as it is known."""
    where = ", ".join(part for part in (op.module, op.source) if part)
    return f"operator {op.name} ({op.target})" + (f" at {where}" if where else "")


def _refused(op: Op, why: str, remedy: str) -> LoweringError:
    return LoweringError(f"{describe(op)}: {why}.", remedy)


def _lines(op: Op, rules: OpRules, split: Split) -> dict[str, tuple[int, ...]]:
    lines: dict[str, tuple[int, ...]] = {}
    for axis, loop in enumerate(split):
        if loop is None:
            continue
        if loop not in rules.by_name:
            known = ", ".join(rules.by_name) or "none"
            raise _refused(op, f"it has no loop {loop!r} (it has {known})", "Make the plan again.")
        lines[loop] = (*lines.get(loop, ()), axis)
    if own_order_broken(rules, split):
        raise _refused(
            op, "an axis cuts rows by position that another leaves in orders of their own", "Split otherwise."
        )
    if (double := doubly_windowed(rules, split)) is not None:
        raise _refused(
            op, f"loop {double!r} reads windows of a dim that another mesh axis cuts too", "Split that dim once."
        )
    return lines


def cuttable(extent: int, even: bool, cuts: Sequence[Cut]) -> bool:
    """Whether no piece is empty and, where pieces must be equal, every cut falls between whole units."""
    spans = [extent]
    for cut in cuts:
        count = len(cut) if isinstance(cut, tuple) else cut
        if even and not all(divides_exactly(span, cut) for span in spans):
            return False
        spans = [stop - start for span in set(spans) for start, stop in (chunk(span, cut, i) for i in range(count))]
    return min(spans) > 0
