"""What travels between stages: which rank sends which region of a tensor to which rank.

A value leaves a stage in the layout its result has there and arrives in the layout that the reading stage keeps it in.
Between meshes of the same sizes and equal layouts, rank ``i`` sends what it has to rank ``i``; otherwise every rank gets
each part that it needs once, from one of those that hold it. A gradient goes back the same way. Where the two layouts are
the same along every axis, its unreduced shares travel as they are (a gradient's layout is the dual of its tensor's, on both
sides); otherwise it is summed in the stage that reads, and shared out between the replicas of the one that made the value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor

from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import Cut, Layout, output_layouts
from shardwright.operators.strategy import Strategy
from shardwright.program.binding import Place, completed, regions, replicas

Region = tuple[tuple[int, int], ...]
"""``[start, stop)`` of every dim."""


@dataclass(frozen=True)
class Holding:
    """How a tensor lies on the ranks of a mesh."""

    layout: Layout
    sizes: tuple[int, ...]
    cuts: tuple[Cut, ...]

    def regions(self, shape: Sequence[int]) -> tuple[Region, ...]:
        """The part of every rank, in the order of the mesh."""
        axes = tuple(("", size) for size in self.sizes)
        places = (Place(axes, coordinate, self.cuts) for coordinate in itertools.product(*map(range, self.sizes)))
        return tuple(tuple(regions(shape, self.layout, place)) for place in places)


class Parcel(NamedTuple):
    """A part of a tensor on its way: from the ``source``-th rank of a mesh to the ``target``-th of another; where it lies in
    the source's part and where in the target's; how large it is."""

    source: int
    target: int
    take: Region
    put: Region
    shape: tuple[int, ...]


def parcels(shape: Sequence[int], have: Holding, want: Holding) -> tuple[Parcel, ...]:
    """Who sends what to whom, so that everybody has what it wants.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> [(p.source, p.target, p.take) for p in parcels((4,), Holding((Shard(0),), (2,), (2,)), Holding((), (), ()))]
    [(0, 0, ((0, 2),)), (1, 0, ((0, 2),))]
    """
    mine, theirs = have.regions(shape), want.regions(shape)
    if have == want:
        shapes = [tuple(stop - start for start, stop in region) for region in mine]
        whole = [tuple((0, extent) for extent in shape) for shape in shapes]
        return tuple(Parcel(n, n, own, own, shapes[n]) for n, own in enumerate(whole))
    return _parcels(dict(enumerate(mine)), dict(enumerate(theirs)), lambda target, ranks: ranks[target % len(ranks)])


def parcels_between(have: Mapping[int, Region], want: Mapping[int, Region]) -> tuple[Parcel, ...]:
    """Who sends what to whom between two layouts on the same ranks; what a rank has, it has from itself.

    >>> [(p.source, p.target, p.take) for p in parcels_between({0: ((0, 2),), 1: ((2, 4),)}, {0: ((0, 3),), 1: ((3, 4),)})]
    [(0, 0, ((0, 2),)), (1, 0, ((0, 1),)), (1, 1, ((1, 2),))]
    """
    return _parcels(have, want, lambda target, ranks: target if target in ranks else ranks[target % len(ranks)])


def _parcels(
    have: Mapping[int, Region], want: Mapping[int, Region], chosen: Callable[[int, list[int]], int]
) -> tuple[Parcel, ...]:
    """``chosen`` says who of those that hold the same part sends it."""
    holders: dict[Region, list[int]] = {}
    for rank, region in have.items():
        holders.setdefault(region, []).append(rank)
    found = []
    for target, wanted in want.items():
        for held, ranks in holders.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True))
            if any(start >= stop for start, stop in common):
                continue
            take, put = (
                tuple((start - base, stop - base) for (start, stop), (base, _) in zip(common, region, strict=True))
                for region in (held, wanted)
            )
            size = tuple(stop - start for start, stop in common)
            found.append(Parcel(chosen(target, ranks), target, take, put, size))
    return tuple(found)


def region_of(tensor: Tensor, region: Region) -> Tensor:
    """A view of a part of a tensor."""
    for dim, (start, stop) in enumerate(region):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


@dataclass(frozen=True, eq=False)
class BoundaryTensor:
    """A tensor that one stage makes and another reads. ``as_is``: whether unreduced gradients travel as they are, rank by
    rank; ``shares``: between how many replicas of the stage that made the value a summed gradient is shared out."""

    tensor: str
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str
    grad: bool
    as_is: bool
    shares: int
    leaves: Holding
    arrives: Holding

    @cache  # noqa: B019 - one lives as long as its pipeline
    def parcels(self, back: bool) -> tuple[Parcel, ...]:
        """Those of the value, or, from the stage that reads to the one that made it, ``back``, of its gradient."""
        return parcels(self.shape, *((self.arrives, self.leaves) if back else (self.leaves, self.arrives)))


def unreduced_layout(tensor: str, graph: Graph, making: Strategy) -> Layout:
    """How a tensor lies in the stage that makes it."""
    op = graph.producer[tensor]
    layouts = output_layouts(analyse(op, graph.tensors), making.splits[op.name], len(op.outputs))
    return making.kept.get(tensor, layouts[op.outputs.index(tensor)])


def boundary_tensor(
    tensor: str, source: int, target: int, graph: Graph, making: Strategy, reading: Strategy
) -> BoundaryTensor:
    """How a tensor of ``graph`` (that of the stage that makes it) crosses to a stage that reads it."""
    meta, unreduced = graph.tensors[tensor], unreduced_layout(tensor, graph, making)
    leaves = Holding(completed(unreduced), making.sizes, making.cuts)
    arrives = Holding(tuple(reading.resting[tensor]), reading.sizes, reading.cuts)
    as_is = leaves == arrives and tuple(unreduced) == leaves.layout
    shares = 1 if as_is else replicas(unreduced, making.sizes)
    return BoundaryTensor(
        tensor, source, target, meta.shape, meta.dtype, meta.grad, as_is, shares, leaves=leaves, arrives=arrives
    )
