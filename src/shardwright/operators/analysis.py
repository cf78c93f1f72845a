"""From a description to its rules: for every loop, what a piece needs of each input and how the pieces combine.

Regions say what a piece reads of every input, :mod:`~shardwright.operators.following` what becomes of its results. Loops
that run over the same dim of the same tensor are cut together, as the two sums and the output of a softmax are. Linearity
also yields the loops ``"+"`` along which unreduced sums pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.operators.following import OWN, SAME, Cut, NotSplittable, follow, reduce_now
from shardwright.operators.indices import Loop
from shardwright.operators.language import Access, Expression, Nest, Reduction, TensorArgument, accesses, parts
from shardwright.operators.regions import Coarser, Region, period, region
from shardwright.operators.rules import LoopRule, Need, Placement, Window


@dataclass(frozen=True)
class Candidate:
    """A rule together with what running it takes beyond calling the operator on its local inputs."""

    rule: LoopRule
    positional: bool = False
    """A piece must know where it lies (``triu``, ``arange``)."""
    sliced: bool = False
    """A piece would have to take its share out of an input it gets whole."""
    free: bool = False
    """No input depends on the loop (``expand``, ``zeros``): a piece must be told its size."""

    @property
    def plain(self) -> bool:
        """Whether a piece is the operator itself, called on its local inputs."""
        return not (self.positional or self.sliced or self.free or self.rule.windowed or self.rule.exchanges)


def candidates(nest: Nest, inputs: tuple[TensorArgument, ...], dtype: str) -> list[Candidate]:
    """Every loop of a described operator that can be cut, each with its rule."""
    found: list[Candidate] = []
    seen: set[frozenset[str]] = set()
    for loop in _all_loops(nest):
        if loop.extent < 2:
            continue
        try:
            together = _close(nest, frozenset({loop.name}))
            if together in seen:
                continue
            found.append(_candidate(nest, inputs, loop, together, dtype))
            seen.add(together)
        except NotSplittable:
            continue
    return found


def _all_loops(nest: Nest) -> Iterable[Loop]:
    loops: dict[str, Loop] = {}
    for output in nest.outputs:
        if output is not None:
            for loop in output.loops:
                loops.setdefault(loop.name, loop)
    for loop in nest.reductions:
        loops.setdefault(loop.name, loop)
    return loops.values()


def every_loop(nest: Nest) -> Iterable[Loop]:
    """All loops of a nest, those that are never cut too."""

    def inside(expression: Expression) -> Iterable[Loop]:
        if isinstance(expression, Reduction):
            yield from expression.loops
        for part in parts(expression):
            yield from inside(part)

    for output in nest.outputs:
        if output is not None:
            yield from output.loops
            yield from inside(output.body)


def _every_access(nest: Nest) -> Iterable[Access]:
    for output in nest.outputs:
        if output is not None:
            yield from accesses(output.body)


def _close(nest: Nest, cut: frozenset[str]) -> frozenset[str]:
    """The loops that must be cut along: those that alone index a dim which is already cut."""
    extents = {loop.extent for loop in _all_loops(nest) if loop.name in cut}
    while True:
        cut_dims = {
            (access.tensor.position, dim)
            for access in _every_access(nest)
            for dim, index in enumerate(access.index)
            if index is not None and (bare := index.bare) is not None and bare.name in cut
        }
        more = {
            bare.name
            for access in _every_access(nest)
            for dim, index in enumerate(access.index)
            if (access.tensor.position, dim) in cut_dims and index is not None and (bare := index.bare) is not None
            if bare.extent in extents
        }
        for output in nest.outputs:
            if output is not None and sum(loop.name in (cut | more) for loop in output.loops) > 1:
                more = set()  # the output cannot be cut along two of its dims at once
        if more <= cut:
            return cut
        cut = cut | more


def _candidate(
    nest: Nest, inputs: tuple[TensorArgument, ...], first: Loop, cut: frozenset[str], dtype: str
) -> Candidate:
    extents = {loop.extent for output in nest.outputs if output for loop in output.loops if loop.name in cut}
    extents |= {loop.extent for loop in nest.reductions if loop.name in cut}
    if len(extents) > 1:
        raise NotSplittable  # outputs of different sizes along the loop (the parts of a split)
    unit = 1
    while True:
        if first.extent % unit:
            raise NotSplittable
        try:
            needs, sliced = _needs(nest, inputs, cut, unit, first.extent // unit)
            break
        except Coarser as request:
            unit = request.unit
            if unit >= first.extent:
                raise NotSplittable from None
    repeats = _period(nest, cut) if sliced.any else None
    if repeats is not None and repeats < first.extent and first.extent % repeats == 0:
        # Every piece reads all of every input, as often as any other of its size (``repeat``).
        unit, needs, sliced = repeats, [Replicate() for _ in inputs], _Sliced(False, [set() for _ in inputs])
    state = Cut(cut, dtype=dtype)
    placements: list[Placement] = []
    free = True
    for output in nest.outputs:
        if output is None:
            placements.append(Replicate())
            continue
        outcome = follow(output.body, state)
        dims = [d for d, loop in enumerate(output.loops) if loop.name in cut]
        if dims:
            if outcome not in (SAME, OWN):
                reduce_now(output.body, state, outcome)
            free = free and outcome == SAME and not state.exchanges
            placements.append(Shard(dims[0]))
        elif outcome == OWN:
            raise NotSplittable
        else:
            free = free and outcome == SAME
            placements.append(Replicate() if outcome == SAME else Partial(outcome))
    if all(isinstance(p, Replicate) for p in (*placements, *needs)):
        raise NotSplittable  # nothing is gained: every piece does all the work
    for position in state.partial:
        if not isinstance(needs[position], Replicate) or any(p == Partial("max") for p in placements):
            raise NotSplittable
        needs[position] = Partial("sum")
    tiled = unit > 1 or any(
        isinstance(n, Shard) and n.dim in tiles for n, tiles in zip(needs, sliced.tiles, strict=True)
    )
    return Candidate(
        LoopRule(
            first.name,
            first.extent // unit,
            tuple(needs),
            tuple(placements),
            even=tiled,
            exchanges=tuple(state.exchanges.values()),
        ),
        positional=state.positional,
        sliced=sliced.any,
        free=free and all(isinstance(n, Replicate) for n in needs),
    )


def _period(nest: Nest, cut: frozenset[str]) -> int | None:
    """After how many points of the loop all that is read repeats itself; ``None``: it does not."""
    periods = [period(index, cut) for access in _every_access(nest) for index in access.index]
    return None if None in periods else math.lcm(*(p for p in periods if p is not None))


@dataclass
class _Sliced:
    """Side findings of :func:`_needs`: inputs taken whole and sliced by the piece, dims whose shards must be equal."""

    any: bool
    tiles: list[set[int]]


def _needs(
    nest: Nest, inputs: tuple[TensorArgument, ...], cut: frozenset[str], unit: int, points: int
) -> tuple[list[Need], _Sliced]:
    needs: list[Need] = [Replicate() for _ in inputs]
    sliced = _Sliced(False, [set() for _ in inputs])
    regions: dict[int, list[dict[int, Region]]] = {}
    wholes: set[int] = set()
    for access in _every_access(nest):
        found = {
            dim: r
            for dim, (index, extent) in enumerate(zip(access.index, access.tensor.shape, strict=True))
            if (r := region(index, cut, unit, points, extent)) is not None
        }
        if found:
            regions.setdefault(access.tensor.position, []).append(found)
        else:
            wholes.add(access.tensor.position)
    for position, all_found in regions.items():
        need = _joint(all_found)
        if need is None or position in wholes:
            sliced.any = True
            continue
        dim, merged = need
        if merged.kind == "shard":
            needs[position] = Shard(dim)
            if merged.tiled:
                sliced.tiles[position].add(dim)
        else:
            needs[position] = Window(dim, merged.scale, merged.low, merged.high)
    return needs, sliced


def _joint(found: list[dict[int, Region]]) -> tuple[int, Region] | None:
    """One need that serves every access of a tensor: the same dim, windows merged; ``None``: all of it."""
    dims = {dim for regions in found for dim, r in regions.items() if r.kind != "whole"}
    if len(dims) != 1:
        return None
    (dim,) = dims  # other dims that the loop also indexes (the low digits of a merged dim) are there whole
    if any(dim not in regions for regions in found):
        return None
    all_regions = [regions[dim] for regions in found]
    if any(r.kind == "whole" for r in all_regions) or len({r.scale for r in all_regions}) != 1:
        return None
    if all(r.kind == "shard" for r in all_regions):
        return dim, all_regions[0]
    scale = all_regions[0].scale
    lows = [r.low if r.kind == "window" else 0 for r in all_regions]
    highs = [r.high if r.kind == "window" else scale - 1 for r in all_regions]
    return dim, Region("window", scale, min(lows), max(highs))


def linear_rules(nest: Nest, inputs: tuple[TensorArgument, ...]) -> list[LoopRule]:
    """The loops ``"+"``: which inputs may be unreduced sums so that every output is one."""
    found: dict[frozenset[int], LoopRule] = {}
    for start in inputs:
        if not start.floating or any(start.position in key for key in found):
            continue  # beginning with another member of a sum leads to the same sum
        state = Cut(frozenset(), {start.position}, may_exchange=False)
        try:
            outcomes = [follow(output.body, state) for output in nest.outputs if output is not None]
            # Inputs found partial on the way may occur in outputs already followed: follow them all again.
            outcomes = [follow(output.body, state) for output in nest.outputs if output is not None]
        except NotSplittable:
            continue
        key = frozenset(state.partial)
        if not outcomes or any(outcome != "sum" for outcome in outcomes) or key in found:
            continue
        name = "+" if not found else f"+{start.name}"
        needs = tuple(Partial("sum") if i in key else Replicate() for i in range(len(inputs)))
        outputs: tuple[Placement, ...] = tuple(Partial("sum") for _ in nest.outputs)
        found[key] = LoopRule(name, 1, needs, outputs, divides=False)
    return list(found.values())


def points(nest: Nest) -> int:
    """Points of the whole loop nest of the first output: the multiplications of a matrix product or convolution."""
    output = nest.outputs[0]
    if output is None:
        return 0
    return math.prod(loop.extent for loop in (*output.loops, *nest.reductions))
