"""From a description to its rules: for every loop, what a piece needs of each input and how the pieces combine.

A cut follows an expression from its leaves to the output. A part either does not depend on the cut (*same* on every
piece), has other elements on every piece (*own*), or is an unreduced *partial* result. Sums of partial results stay
partial; where a partial result meets something that is not linear, the pieces must exchange it (the maximum and the sum of
a softmax); what is added to a partial sum must itself be partial, so that it counts once (a bias). Loops that run over
the same dim of the same tensor are cut together. Linearity also yields the loops ``"+"`` along which unreduced sums pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.operators.indices import Loop, loops_of
from shardwright.operators.language import (
    Access,
    Choice,
    Expression,
    Function,
    Nest,
    Number,
    Plus,
    Position,
    Reduction,
    TensorArgument,
    Times,
    accesses,
    parts,
)
from shardwright.operators.regions import Coarser, Region, region
from shardwright.operators.rules import Exchange, LoopRule, Need, Placement, Window

SAME, OWN = "same", "own"
"""The two states that need no reduction; any other state is the reduction that a partial result still needs."""


class NotSplittable(Exception):  # noqa: N818 - control flow: this cut has no rule
    """The loop cannot be cut."""


@dataclass
class Cut:
    """One candidate: loops cut together, and what was found out about them on the way."""

    loops: frozenset[str]
    partial: set[int] = field(default_factory=set)
    """Positions of the inputs that must come as unreduced sums."""
    exchanges: dict[Expression, Exchange] = field(default_factory=dict)
    positional: bool = False
    may_exchange: bool = True
    dtype: str = "float32"


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
                _reduce_now(output.body, state, outcome)
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


def follow(expression: Expression, cut: Cut) -> str:
    """The state of an expression under a cut; exchanges and partial inputs are noted in ``cut``."""
    if isinstance(expression, Number):
        return SAME
    if isinstance(expression, Position):
        if any(loop.name in cut.loops for loop in loops_of(expression.of)):
            cut.positional = True
            return OWN
        return SAME
    if isinstance(expression, Access):
        if expression.tensor.position in cut.partial:
            return "sum"
        used = (loop.name for index in expression.index if index is not None for loop in loops_of(index))
        return OWN if any(name in cut.loops for name in used) else SAME
    if isinstance(expression, Plus):
        return _follow_plus(expression, cut)
    if isinstance(expression, Times):
        left, right = follow(expression.left, cut), follow(expression.right, cut)
        if {left, right} == {"sum", SAME}:
            return "sum"
        return _settle(cut, (expression.left, left), (expression.right, right))
    if isinstance(expression, Choice):
        states = [follow(part, cut) for part in parts(expression)]
        if states[0] == SAME and (states[1] == states[2] == "sum"):
            return "sum"
        if states[0] == SAME and "sum" in states[1:]:
            other, state = (expression.no, states[2]) if states[1] == "sum" else (expression.yes, states[1])
            if state == SAME and _make_partial(other, cut):
                return "sum"
        return _settle(cut, *zip(parts(expression), states, strict=True))
    if isinstance(expression, Function):
        return _settle(cut, *((a, follow(a, cut)) for a in expression.arguments))
    if isinstance(expression, Reduction):
        if expression.kind == "each":
            return _settle(cut, (expression.body, follow(expression.body, cut)))
        state = follow(expression.body, cut)
        if state not in (SAME, OWN, expression.kind):
            _reduce_now(expression.body, cut, state)
            state = SAME
        if any(loop.name in cut.loops for loop in expression.loops):
            cut.positional = cut.positional or state == SAME  # a count: it depends on the size of the piece
            return expression.kind
        return state
    raise TypeError(f"not an expression: {expression!r}")


def _follow_plus(expression: Plus, cut: Cut) -> str:
    sides = [(side, follow(side, cut)) for side in (expression.left, expression.right)]
    states = {state for _, state in sides}
    if states == {"sum"}:
        return "sum"
    if states == {"sum", SAME}:
        same = next(side for side, state in sides if state == SAME)
        if _make_partial(same, cut):
            return "sum"
    return _settle(cut, *sides)


def _settle(cut: Cut, *operands: tuple[Expression, str]) -> str:
    """The state of a function that is not linear: partial operands are exchanged first."""
    for operand, state in operands:
        if state not in (SAME, OWN):
            _reduce_now(operand, cut, state)
    return OWN if any(state == OWN for _, state in operands) else SAME


def _reduce_now(expression: Expression, cut: Cut, kind: str) -> None:
    if not cut.may_exchange:
        raise NotSplittable
    while isinstance(expression, Times) and isinstance(expression.left, Number):
        expression = expression.right  # -mean is exchanged together with mean
    free = dict.fromkeys(name for name in _free_loops(expression, frozenset()) if name not in cut.loops)
    trained = kind == "sum" and any(access.tensor.grad for access in accesses(expression))
    cut.exchanges.setdefault(expression, Exchange(kind, tuple(free), cut.dtype, backward=int(trained)))


def _free_loops(expression: Expression, bound: frozenset[str]) -> Iterable[str]:
    if isinstance(expression, Access):
        for index in expression.index:
            if index is not None:
                yield from (loop.name for loop in loops_of(index) if loop.name not in bound)
    elif isinstance(expression, Position):
        yield from (loop.name for loop in loops_of(expression.of) if loop.name not in bound)
    if isinstance(expression, Reduction):
        bound = bound | {loop.name for loop in expression.loops}
    for part in parts(expression):
        yield from _free_loops(part, bound)


def _make_partial(expression: Expression, cut: Cut) -> bool:
    """Turn a term that is the same everywhere into an unreduced sum, if it is linear in some of its inputs."""
    for position in sorted({a.tensor.position for a in accesses(expression) if a.tensor.floating}):
        trial = Cut(cut.loops, cut.partial | {position}, may_exchange=False)
        try:
            if follow(expression, trial) == "sum":
                cut.partial |= trial.partial
                return True
        except NotSplittable:
            continue
    return False


def linear_rules(nest: Nest, inputs: tuple[TensorArgument, ...]) -> list[LoopRule]:
    """The loops ``"+"``: which inputs may be unreduced sums so that every output is one."""
    found: dict[frozenset[int], LoopRule] = {}
    for start in inputs:
        if not start.floating:
            continue
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
