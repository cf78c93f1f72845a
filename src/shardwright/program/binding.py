"""From the steps of a route to the steps one rank runs, checked on the way.

A step says what happens along which mesh axis; here it gets this rank's numbers (its place on
the axis, the extents that its shards are cut from) and is applied to the layout it starts from. A step that does not fit
its layout is an error, so a bound sequence is a proof that it leads where :func:`bind` says it leads. Where two axes cut
one dim the shards nest in mesh order (outer first), hence only the innermost cut may be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import LoweringError
from shardwright.operators.rules import Cut, Layout, Need, Window, nested_chunk
from shardwright.program.steps import BoundStep, Line, Region, Step


@dataclass(frozen=True)
class Place:
    """One rank's place in the mesh: axis names and sizes, its coordinate, and how each axis cuts."""

    axes: tuple[tuple[str, int], ...]
    coordinate: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def even(self) -> Place:
        """The same place where every axis cuts into equal parts."""
        return replace(self, cuts=self.sizes)

    def line(self, axis: int) -> Line:
        """The ranks along an axis through this one; the axis' name stands for the process group until the program runs."""
        name, size = self.axes[axis]
        return Line(name, size, self.coordinate[axis], self.cuts[axis])


def regions(shape: Sequence[int], layout: Layout, place: Place) -> list[tuple[int, int]]:
    """``[start, stop)`` per dim of the part that one rank holds."""
    cuts: dict[int, list[tuple[Cut, int]]] = {}
    for placement, size, index in zip(layout, place.cuts, place.coordinate, strict=True):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append((size, index))
    return [nested_chunk(extent, cuts.get(dim, ())) for dim, extent in enumerate(shape)]


def completed(layout: Layout) -> Layout:
    """The layout once sums are completed: how a tensor is handed out."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in layout)


def replicas(layout: Layout, sizes: Sequence[int]) -> int:
    """How many ranks of a mesh have the same part of a tensor."""
    return prod(size for size, placement in zip(sizes, layout, strict=True) if isinstance(placement, Replicate))


def dual(needs: Iterable[Need]) -> tuple[Need, ...]:
    """The layout of the gradient of a tensor in this layout."""
    return tuple(
        Partial() if isinstance(need, Replicate) else Replicate() if isinstance(need, Partial) else need
        for need in needs
    )


def bind(
    steps: Sequence[Step],
    source: Sequence[Need],
    shape: Sequence[int],
    place: Place,
    loop_extents: Mapping[int, int] | None = None,
) -> tuple[tuple[BoundStep, ...], tuple[Need, ...]]:
    """This rank's numbers for every step, and the layout that the steps lead to from ``source``.

    ``loop_extents`` gives, per mesh axis, the extent of the loop it cuts: windows are counted in points of that loop.
    """
    layout = list(source)
    bound = []
    for step in steps:
        bound.append(_bind_one(step, layout, shape, place, loop_extents or {}))
    return tuple(bound), tuple(layout)


def _bind_one(
    step: Step, layout: list[Need], shape: Sequence[int], place: Place, loop_extents: Mapping[int, int]
) -> BoundStep:
    axis, dim, kind = step.axis, step.dim or 0, step.kind
    line, here = place.line(axis), layout[axis]

    def extent_of(d: int) -> int:
        """Length of ``d`` before this axis cuts it; later axes must not cut it at all."""
        if d >= len(shape) or any(isinstance(n, (Shard, Window)) and n.dim == d for n in layout[axis + 1 :]):
            raise _misfit(step, layout)
        cuts = [
            (place.cuts[a], place.coordinate[a])
            for a in range(axis)
            if isinstance(placement := layout[a], Shard) and placement.dim == d
        ]
        start, stop = nested_chunk(shape[d], cuts)
        return stop - start

    def demand(fits: bool, result: Need) -> None:
        if not fits:
            raise _misfit(step, layout)
        layout[axis] = result

    if step.window is not None:
        before, after = _WINDOWED[kind]
        demand(here == before(step.window), after(step.window))
        return _windowed(step, step.window, shape, line, loop_extents[axis])
    if kind == "all_gather":
        demand(here == Shard(dim), Replicate())
        return BoundStep(kind, line, dim, extent_of(dim))
    if kind == "all_reduce":
        demand(isinstance(here, Partial), Replicate())
        return BoundStep(kind, line, reduce=reduction(here))
    if kind == "reduce_scatter":
        demand(isinstance(here, Partial), Shard(dim))
        return BoundStep(kind, line, dim, extent_of(dim), reduce=reduction(here))
    if kind == "all_to_all":
        to_dim = step.to_dim or 0
        demand(here == Shard(dim), Shard(to_dim))
        return BoundStep(kind, line, dim, extent_of(dim), to_dim, extent_of(to_dim))
    if kind == "slice":
        demand(isinstance(here, Replicate), Shard(dim))
        return BoundStep(kind, line, dim, extent_of(dim))
    if kind == "zero_pad":
        demand(here == Shard(dim), Partial())
        return BoundStep(kind, line, dim, extent_of(dim))
    if kind == "mask":
        demand(isinstance(here, Replicate), Partial())
        return BoundStep(kind, line)
    raise _misfit(step, layout)


# Per kind of window step, the placement it starts from and the one it leads to.
_WINDOWED: dict[str, tuple[Callable[[Window], Need], Callable[[Window], Need]]] = {
    "halo": (lambda window: Shard(window.dim), lambda window: window),
    "halo_reduce": (lambda window: window, lambda window: Shard(window.dim)),
    "slice": (lambda _: Replicate(), lambda window: window),
    "zero_pad": (lambda window: window, lambda _: Partial()),
}


def _windowed(step: Step, window: Window, shape: Sequence[int], line: Line, loop_extent: int) -> BoundStep:
    extent = shape[window.dim]
    pieces = [line.piece(loop_extent, i) for i in range(line.size)]
    regions = [window.region(start, stop, extent) for start, stop in pieces]
    wants = tuple(Region(first, max(first, end)) for first, end, *_ in regions)
    holds = tuple(line.piece(extent, i) for i in range(line.size))
    return BoundStep(step.kind, line, window.dim, extent, wants=wants, holds=holds)


def reduction(placement: Need) -> str:
    """How the ranks' partial values combine, in the words of the functional collectives."""
    name = placement.reduce_op if isinstance(placement, Partial) else "sum"
    return "product" if name == "prod" else name


def _misfit(step: Step, layout: Sequence[Need]) -> LoweringError:
    return LoweringError(
        f"step {step.kind} along mesh axis {step.axis} (dim {step.dim}) does not apply to the layout {tuple(layout)}.",
        "The plan's steps and its layouts disagree; make the plan again with this version.",
    )
