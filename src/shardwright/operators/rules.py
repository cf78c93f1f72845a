"""What the analysis of an operator yields: its loops, and per loop what one piece needs of every input and gives.

These are the words every later room speaks. A *loop* may be cut by a mesh axis; cutting it asks each tensor input for a
placement (``Shard``, ``Replicate``, ``Partial`` of ``torch.distributed.tensor``, or a :class:`Window`, a shard with a
halo) and leaves each output in one. Placements are per mesh axis, so a split over several axes is put together axis by
axis. Pieces follow ``torch.chunk``, as DTensor's shards do: extents need not divide, but no piece may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import LoweringError

Placement = Union[Shard, Replicate, Partial]
Layout = tuple[Placement, ...]
"""One placement per mesh axis, axes ordered from the slowest link to the fastest."""

_WHOLE = Replicate()
_SAME: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""Equal layouts are one object: they are looked up by the hundred thousand, and placements are slow to compare."""


@dataclass(frozen=True)
class Window:
    """A shard of ``dim`` with a halo: piece ``[a, b)`` of the loop reads ``[a*scale + low, (b-1)*scale + high]``.

    Positions outside the tensor are clipped; the piece of the operator pads them itself, with whatever the operator
    pads with. A window is stated for a dim that no other axis cuts, so one mesh axis only may cut a dim that is read
    through a window (:func:`doubly_windowed`).
    """

    dim: int
    scale: int
    low: int
    high: int

    def region(self, start: int, stop: int, extent: int) -> tuple[int, int, int, int]:
        """``(first, last+1, missing before, missing after)`` of a dim of ``extent`` for loop piece [start, stop).

        A piece that lies in the padding altogether has an empty region, and all it needs is missing on one side.
        """
        first, end = start * self.scale + self.low, (stop - 1) * self.scale + self.high + 1
        length = end - first
        before, after = min(max(-first, 0), length), min(max(end - extent, 0), length)
        return min(max(first, 0), extent), min(max(end, 0), extent), before, after


Need = Union[Placement, Window]


@dataclass(frozen=True)
class Exchange:
    """A reduction between the pieces while the operator runs, such as the maximum and the sum of a softmax.

    The statistic has ``points`` elements per point of ``loops`` (those of them that are cut have fewer points on each
    rank); ``loops`` names rules of the same operator. ``backward`` counts how often a statistic of that size is reduced in
    the backward pass.
    """

    reduce: str
    loops: tuple[str, ...]
    dtype: str
    backward: int = 1
    points: int = 1


@dataclass(frozen=True)
class LoopRule:
    """One way to cut an operator.

    ``inputs`` follow ``Op.inputs`` (every tensor argument by position), ``outputs`` follow ``Op.outputs``.
    ``divides`` says that a piece does its share of the work; false for the loop named ``"+"``, which means: the operator
    is linear, so unreduced sums may pass through it. ``even`` demands equal pieces (a reshape that merges dims).
    """

    name: str
    extent: int
    inputs: tuple[Need, ...]
    outputs: tuple[Placement, ...]
    even: bool = False
    divides: bool = True
    exchanges: tuple[Exchange, ...] = ()

    @property
    def windowed(self) -> bool:
        return any(isinstance(need, Window) for need in self.inputs)

    def allows(self, pieces: int) -> bool:
        """Whether the loop can be cut into this many pieces, none of them empty."""
        if not self.divides:
            return True
        return self.extent % pieces == 0 if self.even else chunk(self.extent, pieces, pieces - 1)[0] < self.extent


Split = tuple[Union[str, None], ...]
"""For one operator: per mesh axis the name of the loop it cuts, or ``None`` (every rank along that axis does it all)."""


@dataclass(frozen=True)
class OpRules:
    """All loops of one operator. ``origin``: ``described``, ``elementwise``, ``probed`` or ``replicated``.

    ``kind`` groups operators whose kernels cost alike (``matmul``, ``convolution``, ``attention``, ``elementwise``,
    ``reduction``, ``normalisation``, ``gather``, ``view``, ``copy``, ``creation``, ``random``, ``recurrent``,
    ``other``); ``flops`` are those of the whole operator, forward. ``reason`` says why an operator has no loops.
    """

    loops: tuple[LoopRule, ...]
    origin: str
    kind: str
    flops: float = 0.0
    reason: str = ""
    by_name: Mapping[str, LoopRule] = field(init=False, repr=False, compare=False)
    _layouts: dict[object, list[tuple[Any, ...]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {loop.name: loop for loop in self.loops})
        object.__setattr__(self, "_layouts", {})

    def layouts(self, split: Split, side: str, count: int) -> list[tuple[Any, ...]]:
        """Per tensor of a side (``inputs`` or ``outputs``), one entry per mesh axis; made once for a split."""
        key = (split, side, count)
        if key not in self._layouts:
            if unknown := [loop for loop in split if loop is not None and loop not in self.by_name]:
                raise LoweringError(
                    f"A {self.kind} operator is to be cut along {unknown[0]!r}; its loops are {', '.join(self.by_name)}.",
                    "Plan again: the plan is damaged, or of another version.",
                )
            sides = [None if loop is None else getattr(self.by_name[loop], side) for loop in split]
            made = [tuple(_WHOLE if s is None else s[i] for s in sides) for i in range(count)]
            self._layouts[key] = [_SAME.setdefault(layout, layout) for layout in made]
        return self._layouts[key]


OWN = "own"
"""The loop over rows of which every piece has an order of its own (:mod:`shardwright.operators.own_orders`)."""


def own_axes(split: Split) -> tuple[bool, ...]:
    """Per mesh axis, whether its pieces have rows in orders of their own; all that handle such rows must agree on it."""
    return tuple(name == OWN for name in split)


def own_order_broken(rules: OpRules, split: Split) -> bool:
    """Whether another axis cuts rows by their positions, which say nothing where pieces have orders of their own."""
    if OWN not in split:
        return False
    own = rules.by_name[OWN]
    others = [rules.by_name[name] for name in split if name is not None and name != OWN]
    pairs = [
        pair
        for rule in others
        for pair in (*zip(own.inputs, rule.inputs, strict=True), *zip(own.outputs, rule.outputs, strict=True))
    ]
    return any(isinstance(a, Shard) and isinstance(b, (Shard, Window)) and a.dim == b.dim for a, b in pairs)


Cut = Union[int, tuple[float, ...]]
"""How an axis cuts: into so many equal pieces, or in proportion to the shares of its ranks (which add up to one)."""


def chunk(extent: int, cut: Cut, index: int) -> tuple[int, int]:
    """``[start, stop)`` of one piece: equal ones as ``torch.chunk`` and DTensor cut, shares rounded to whole points.

    >>> [chunk(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    >>> [chunk(10, (0.75, 0.25), i) for i in range(2)]
    [(0, 8), (8, 10)]
    """
    if isinstance(cut, tuple):
        return _border(extent, cut, index), _border(extent, cut, index + 1)
    step = -(-extent // cut)
    return min(index * step, extent), min((index + 1) * step, extent)


def _border(extent: int, shares: tuple[float, ...], index: int) -> int:
    return extent if index >= len(shares) else math.floor(extent * math.fsum(shares[:index]) + 0.5)


def divides_exactly(extent: int, cut: Cut) -> bool:
    """Whether every border falls on a whole point by itself, so that any multiple of the extent is cut alike."""
    if isinstance(cut, tuple):
        parts = [extent * math.fsum(cut[:index]) for index in range(1, len(cut))]
        return all(abs(part - round(part)) < 1e-6 for part in parts)
    return extent % cut == 0


def nested_chunk(extent: int, cuts: Sequence[tuple[Cut, int]]) -> tuple[int, int]:
    """``[start, stop)`` after cutting by several axes in mesh order; each cut is ``(pieces or shares, index)``.

    >>> nested_chunk(8, [(2, 1), (2, 0)])
    (4, 6)
    """
    start, stop = 0, extent
    for pieces, index in cuts:
        low, high = chunk(stop - start, pieces, index)
        start, stop = start + low, start + high
    return start, stop


def input_layouts(rules: OpRules, split: Split, count: int) -> list[tuple[Need, ...]]:
    """What every tensor input must look like for this split: per input, one need per mesh axis."""
    return rules.layouts(split, "inputs", count)


def output_layouts(rules: OpRules, split: Split, count: int) -> list[Layout]:
    """What every output looks like after this split."""
    return rules.layouts(split, "outputs", count)


def doubly_windowed(rules: OpRules, split: Split) -> str | None:
    """The loop that reads through a window a dim which another mesh axis cuts as well; such a split cannot be run.

    A convolution's output rows and kernel rows both read windows of the image's rows: each window is right only while the
    other loop is whole.
    """
    rows = [rules.by_name[loop] for loop in split if loop is not None]
    for i, rule in enumerate(rows):
        for position, need in enumerate(rule.inputs if rule.windowed else ()):
            others = [row.inputs[position] for j, row in enumerate(rows) if j != i]
            if isinstance(need, Window) and any(isinstance(n, (Shard, Window)) and n.dim == need.dim for n in others):
                return rule.name
    return None


def local_shape(shape: Sequence[int], layout: Sequence[Placement], sizes: Sequence[Cut], rank: Sequence[int]) -> tuple:
    """Shape of one rank's shard: ``sizes`` say how the mesh's axes cut, ``rank`` is this rank's coordinate on each axis."""
    cuts: dict[int, list[tuple[Cut, int]]] = {}
    for placement, size, index in zip(layout, sizes, rank, strict=True):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append((size, index))
    spans = [nested_chunk(extent, cuts.get(dim, ())) for dim, extent in enumerate(shape)]
    return tuple(stop - start for start, stop in spans)


def largest_place(sizes: Sequence[Cut]) -> list[int]:
    """The coordinate of the rank with the largest pieces: the first of equal ones, the one with the largest shares."""
    return [cut.index(max(cut)) if isinstance(cut, tuple) else 0 for cut in sizes]


def largest_shard(shape: Sequence[int], layout: Sequence[Placement], sizes: Sequence[Cut]) -> int:
    """Elements of the largest shard."""
    return math.prod(local_shape(shape, layout, sizes, largest_place(sizes)))
