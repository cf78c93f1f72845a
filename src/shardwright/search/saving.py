"""What the search assumes autograd keeps for the backward pass, before any strategy is known.

Which tensors an operator keeps is asked of autograd itself (:mod:`~shardwright.program.footprints`), on the shapes of the
whole model. A kept input is kept in the layout its reader needs, which may be a gathered copy, so the reader pays for it;
readers that keep the same tensor share its bytes, which is exact where they want the same layout. The exact account of a
known strategy is ``costs.memory``; the planner compares the two and corrects the search's limit where they differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Shard

from shardwright.graph import Graph, Op
from shardwright.graph.core import DTYPE_BYTES
from shardwright.graph.repeats import remembered, representatives
from shardwright.operators import piece
from shardwright.operators.rules import (
    OpRules,
    Split,
    Window,
    input_layouts,
    largest_shard,
    nested_chunk,
    output_layouts,
)
from shardwright.program.footprints import ForwardFootprint, OperatorCall, Strided, forward
from shardwright.search.recomputing import Recomputation

NOTHING_AGAIN = Recomputation({}, frozenset(), frozenset())


def needed_in_backward(graph: Graph, op: Op, tensor: str, device: str) -> bool:
    """Whether a parameter's value is used again in the backward pass of a reader."""
    if not graph.training or not any(graph.tensors[other].grad for other in op.inputs if other != tensor):
        return False
    metas = [graph.tensors[name] for name in op.inputs]
    given = tuple(Strided.contiguous(t.shape, t.dtype, t.grad and op.grad) for t in metas)
    return op.inputs.index(tensor) in forward(OperatorCall.of(op), given, device).saved_inputs


@dataclass(frozen=True)
class Kept:
    """What an operator keeps: a ``share`` of its input or output at ``position``, or ``inner`` bytes of its own. A view
    keeps all of the memory it lies in (``share`` may be above one), but ``surely`` no more than it is itself."""

    place: str
    position: int
    share: float
    surely: float


def saving(graph: Graph, device: str, again: Recomputation = NOTHING_AGAIN) -> Mapping[str, tuple[Kept, ...]]:
    """What every operator keeps on a device of this kind, by the name of the operator that stands for it.

    Of a recomputed block only what leaves it is kept, by its maker; of one that is recomputed lightly, what nobody computes
    again.

    >>> saving(graph, "cuda")["linear"]
    (Kept(place='input', position=0, share=1.0, surely=1.0),)
    """
    if not graph.training:
        return {}
    return remembered(graph, f"_saving_{device}_{again.key}", lambda: _Saving(graph, device, again).find())


class _Saving:
    def __init__(self, graph: Graph, device: str, again: Recomputation) -> None:
        self.graph, self.device, self.again = graph, device, again
        self.standing = representatives(graph)
        self.lies: dict[str, Strided] = {}
        self.roots: dict[str, str] = {}
        self.prints: dict[str, ForwardFootprint] = {}
        self.keepers: Counter[str] = Counter()

    def find(self) -> Mapping[str, tuple[Kept, ...]]:
        found = []
        for op in self.graph.ops:
            footprint = self._footprint(op)
            if op.name not in self.again.block:
                entries = self._entries(op, footprint)
            else:
                entries = self._lightly(op, footprint) if self.again.lightly else self._leaving(op)
            self.keepers.update(root for root, _, _ in entries if root)
            if self.standing[op.name] == op.name:
                found.append((op, footprint, entries))
        return {op.name: self._kept(op, footprint, entries) for op, footprint, entries in found if entries}

    def _footprint(self, op: Op) -> ForwardFootprint:
        """How the operator, or the one that stands for it, treats memory; notes whose memory its results are."""
        first = self.standing[op.name]
        if first not in self.prints:
            given = tuple(self._lies(name, op) for name in op.inputs)
            made = tuple(None if name is None else self._lies(name, op) for name in op.outputs)
            self.prints[first] = forward(OperatorCall.of(op), given, self.device, expected=made)
        footprint = self.prints[first]
        for name, result in zip(op.outputs, footprint.results, strict=False):
            if name is not None and result is not None:
                viewed = op.inputs[-1 - result.owner] if result.owner < 0 else name
                self.roots[name] = self.roots.get(viewed, viewed)
                self.lies[name] = result.tensor
        return footprint

    def _lies(self, name: str, op: Op) -> Strided:
        tensor = self.graph.tensors[name]
        grad = tensor.grad and op.grad
        known = self.lies.get(name)
        if known is None or known.shape != tensor.shape:
            return Strided.contiguous(tensor.shape, tensor.dtype, grad)
        return Strided(known.shape, known.strides, known.dtype, grad)

    def _entries(self, op: Op, footprint: ForwardFootprint) -> list[tuple[str, str, int]]:
        """(root, place, position) of what is kept; what rests anyway (parameters, buffers, inputs) is not counted."""
        entries = []
        for position in footprint.saved_inputs:
            root = self.roots.get(op.inputs[position], op.inputs[position])
            if root in self.graph.producer:
                entries.append((root, "input", position))
        for number in footprint.saved_fresh:
            owned = [
                i for i, r in enumerate(footprint.results[: len(op.outputs)]) if r is not None and r.owner == number
            ]
            name = next((op.outputs[i] for i in owned if op.outputs[i] is not None), None)
            if name is not None:
                entries.append((name, "output", op.outputs.index(name)))
            else:
                entries.append(("", "inner", number))
        return entries

    def _leaving(self, op: Op) -> list[tuple[str, str, int]]:
        block = self.again.block
        inside = block[op.name]
        return [
            (self.roots.get(out, out), "output", position)
            for position, out in enumerate(op.outputs)
            if out is not None and any(block.get(r.name) != inside for r in self.graph.consumers[out])
        ]

    def _lightly(self, op: Op, footprint: ForwardFootprint) -> list[tuple[str, str, int]]:
        """Of an operator that runs again its inputs, of others what they save: each as far as nobody computes it again."""
        runs, made_by = self.again.runs, self.graph.producer
        if op.name not in runs:
            found = self._entries(op, footprint)
        else:
            inputs = ((self.roots.get(name, name), "input", position) for position, name in enumerate(op.inputs))
            found = [entry for entry in dict.fromkeys(inputs) if entry[0] in made_by]
        return [entry for entry in found if not entry[0] or made_by[entry[0]].name not in runs]

    def _kept(self, op: Op, footprint: ForwardFootprint, entries: list[tuple[str, str, int]]) -> tuple[Kept, ...]:
        found = []
        for root, place, position in entries:
            if not root:
                own = float(footprint.fresh[position])
                found.append(Kept(place, position, own, own))
                continue
            name = (op.inputs if place == "input" else op.outputs)[position]
            whole = self.graph.tensors[root].bytes / max(self.graph.tensors[name or root].bytes, 1)
            share = whole / self.keepers[root]
            found.append(Kept(place, position, share, share if whole <= 1.0 else 1.0 / self.keepers[root]))
        return tuple(found)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per split that an operator keeps until its backward: as far as can be foreseen, and surely."""

    expected: np.ndarray
    sure: np.ndarray


def saved_bytes(
    graph: Graph, op: Op, rules: OpRules, splits: Sequence[Split], kept: Sequence[Kept], sizes: Sequence[int]
) -> SavedBytes:
    """Bytes per split that an operator keeps until its backward.

    What it keeps of its own is taken to be cut as the work is; not surely so where a kernel of ours takes its place.
    """
    total, unsure = np.zeros(len(splits)), np.zeros(len(splits))
    for row, split in enumerate(splits if kept else ()):
        needs = input_layouts(rules, split, len(op.inputs))
        made = output_layouts(rules, split, len(op.outputs))
        for entry in kept:
            if entry.place == "inner":
                cut = [size for size, loop in zip(sizes, split, strict=True) if loop and rules.by_name[loop].divides]
                total[row] += entry.share / math.prod(cut)
                if cut and is_replaced(graph, op, rules, split, sizes):
                    unsure[row] += entry.share / math.prod(cut)
                continue
            names, layouts = (op.inputs, needs) if entry.place == "input" else (op.outputs, made)
            tensor = graph.tensors[names[entry.position] or ""]
            plain = [Shard(p.dim) if isinstance(p, Window) else p for p in layouts[entry.position]]
            size = largest_shard(tensor.shape, plain, sizes) * DTYPE_BYTES[tensor.dtype]
            total[row] += entry.share * size
            unsure[row] += (entry.share - entry.surely) * size
    return SavedBytes(total, total - unsure)


def is_replaced(graph: Graph, op: Op, rules: OpRules, split: Split, sizes: Sequence[int]) -> bool:
    """Whether a piece of the operator is computed by a kernel of its own."""
    cuts: dict[str, list[tuple[int, int]]] = {}
    for size, loop in zip(sizes, split, strict=True):
        if loop is not None and rules.by_name[loop].divides:
            cuts.setdefault(loop, []).append((size, 0))
    ranges = {loop: nested_chunk(rules.by_name[loop].extent, pieces) for loop, pieces in cuts.items()}
    return piece(op, graph.tensors, ranges).kernel is not None
