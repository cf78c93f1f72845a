"""The options of every node: an operator's splits, a parameter's resting layouts, a shared tensor's kept layouts.

Options are all maps from mesh axes to loops (or none); a restriction may forbid some, which is how baselines, user
constraints and cheaper searches are expressed over the same space.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.errors import Infeasible
from shardwright.graph import Op, Tensor
from shardwright.operators.rules import (
    Layout,
    LoopRule,
    Need,
    OpRules,
    Placement,
    Split,
    Window,
    chunk,
    doubly_windowed,
    own_order_broken,
)
from shardwright.operators.strategy import Strategy

LoopFilter = Callable[[Op, LoopRule, str, int], bool]
"""``(operator, loop, label or "", mesh axis index) -> allowed``."""

RestFilter = Callable[[Tensor, Layout], bool]
"""``(parameter, resting layout) -> allowed``."""


SplitFilter = Callable[[Op, OpRules, Split], bool]
"""``(operator, its rules, whole split) -> allowed``."""


def _any(*_: object) -> bool:
    return True


def _none(*_: object) -> bool:
    return False


def _both(one: Callable[..., bool], other: Callable[..., bool]) -> Callable[..., bool]:
    return one if other is _any else other if one is _any else lambda *a: one(*a) and other(*a)


def _either(one: Callable[..., bool], other: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *a: one(*a) or other(*a)


@dataclass(frozen=True)
class Restriction:
    """A named part of the space: which loops may be cut where, how parameters may rest and be gathered.

    ``gather(axis)`` says whether parameters may be gathered over a mesh axis for use; ``regather`` whether a gathered
    parameter is freed after its forward use and gathered again (ZeRO-3) or kept until backward (ZeRO-2). ``fold`` says
    whether repeated blocks may share their decisions, ``whole_gradients`` whether gradients of gathered parameters stay
    whole until the backward pass is over (ZeRO-1), ``arrives`` how inputs lie when they come (whole otherwise).
    ``together``: all parameters are gathered, so that they surely share collectives.
    ``cut(operator, axis)`` says whether an operator that can be cut over a mesh axis must be, even where that does not pay.
    ``kept``: layouts of shared tensors, where these are settled already.
    """

    name: str
    loop: LoopFilter = _any
    rest: RestFilter = _any
    split: SplitFilter = _any
    gather: Callable[[int], bool] = _any
    regather: bool = True
    fold: bool = True
    arrives: Mapping[str, Layout] = field(default_factory=dict)
    whole_gradients: bool = False
    cut: Callable[[Op, int], bool] = _none
    together: bool = False
    kept: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether all that it does is to strike out: what is left costs and holds what it does without it."""
        changed = self.arrives or self.whole_gradients or self.together or self.kept
        return self.regather and self.fold and not changed

    @property
    def everything(self) -> bool:
        """Whether nothing is struck out."""
        return self.plain and self.any_split and self.rest is _any and self.gather is _any

    @property
    def any_split(self) -> bool:
        """Whether every operator may be split in any way."""
        return self.loop is _any and self.split is _any and self.cut is _none

    def __and__(self, other: Restriction) -> Restriction:
        """What both allow, under the first one's name."""
        return Restriction(
            self.name,
            _both(self.loop, other.loop),
            _both(self.rest, other.rest),
            _both(self.split, other.split),
            _both(self.gather, other.gather),
            self.regather and other.regather,
            self.fold and other.fold,
            {**self.arrives, **other.arrives},
            self.whole_gradients or other.whole_gradients,
            self.cut if other.cut is _none else other.cut if self.cut is _none else _either(self.cut, other.cut),
            self.together or other.together,
            {**self.kept, **other.kept},
        )


EVERYTHING = Restriction("everything")


def among(strategies: Sequence[Strategy]) -> Restriction:
    """Nothing but these strategies (and mixtures of them), to price them in another problem of the same operators."""

    def loop(op: Op, rule: LoopRule, label: str, axis: int) -> bool:
        return any(one.splits[op.name][axis] == rule.name for one in strategies)

    return Restriction(
        "given strategies",
        loop=loop,
        rest=lambda tensor, layout: any(one.resting[tensor.name] == layout for one in strategies),
        split=lambda op, rules, split: any(one.splits[op.name] == split for one in strategies),
        kept={name: tuple(dict.fromkeys(one.kept[name] for one in strategies)) for name in strategies[0].kept},
    )


_PASSES_SUMS = {"view", "elementwise", "copy", "reduction"}


def splits_of(op: Op, rules: OpRules, sizes: Sequence[int], labels: dict[str, str], within: Restriction) -> list[Split]:
    """Every admissible split of one operator: per axis a loop or ``None``, no empty piece, windowed dims cut once."""
    names = [_names(op, rules, size, axis, labels, within) for axis, size in enumerate(sizes)]
    splits = [split for split in itertools.product(*names) if _admissible(split, rules, sizes)]
    return _allowed(op, rules, sizes, splits, within)


@dataclass(frozen=True, eq=False)
class SplitTable:
    """Every admissible split of an operator; ``loops[row, axis]`` says which of ``names`` a mesh axis cuts."""

    splits: tuple[Split, ...]
    names: tuple[str | None, ...]
    loops: np.ndarray

    @staticmethod
    def of(splits: Iterable[Split]) -> SplitTable:
        splits = tuple(splits)
        names = tuple(dict.fromkeys(name for split in splits for name in split))
        return SplitTable(splits, names, np.array([[names.index(name) for name in split] for split in splits]))


def rows_within(
    op: Op, rules: OpRules, sizes: Sequence[int], labels: dict[str, str], within: Restriction, every: SplitTable
) -> np.ndarray:
    """The rows of those splits that a restriction allows: the same as :func:`splits_of`, told from all of them.

    >>> rows_within(op, rules, (8,), {}, fsdp(1), SplitTable.of(every))  # doctest: +SKIP
    """
    allowed = np.ones(len(every.splits), dtype=bool)
    for axis, size in enumerate(sizes):
        names = set(_names(op, rules, size, axis, labels, within))
        allowed &= np.array([name in names for name in every.names])[every.loops[:, axis]]
    rows = np.flatnonzero(allowed)
    if within.split is not _any:
        rows = np.array([row for row in rows if within.split(op, rules, every.splits[row])], dtype=np.int64)
    if not len(rows):
        _allowed(op, rules, sizes, (), within)  # says why
    must = [axis for axis in range(len(sizes)) if within.cut(op, axis)]
    if must:
        divides = np.array([name is not None and rules.by_name[name].divides for name in every.names])
        cut = divides[every.loops[rows][:, must]].sum(axis=1)
        rows = rows[cut == cut.max()]
    return rows


def _names(
    op: Op, rules: OpRules, size: int, axis: int, labels: Mapping[str, str], within: Restriction
) -> list[str | None]:
    """What a mesh axis may do with an operator: nothing, or cut one of these loops."""
    names: list[str | None] = [None]
    for loop in rules.loops:
        if not loop.divides and rules.kind not in _PASSES_SUMS:
            continue  # passing a sum through a matrix product never beats reducing it first
        if loop.allows(size) and within.loop(op, loop, labels.get(loop.name, ""), axis):
            names.append(loop.name)
    return names


def _allowed(op: Op, rules: OpRules, sizes: Sequence[int], splits: Iterable[Split], within: Restriction) -> list[Split]:
    """What a restriction allows of whole splits: as it says, and cut where it says that an operator must be."""
    allowed = [split for split in splits if within.split(op, rules, split)]
    if not allowed:
        loops = ", ".join(f"{loop.name} (of {loop.extent})" for loop in rules.loops if loop.divides)
        raise Infeasible(
            f"what is asked of the operator {op.name} ({op.target} in {op.module or 'the model'}) is none of its splits "
            f"over {' × '.join(map(str, sizes))} devices.",
            f"Each axis may cut one of its loops {loops}, or none." if loops else "It cannot be cut: say none.",
        )
    must = [axis for axis in range(len(sizes)) if within.cut(op, axis)]
    if must:  # as many of these axes as its loops allow: a batch of 2 is cut over one of two axes of 2

        def axes_cut(split: Split) -> int:
            return sum((name := split[axis]) is not None and rules.by_name[name].divides for axis in must)

        most = max(map(axes_cut, allowed))
        allowed = [split for split in allowed if axes_cut(split) == most]
    return allowed


def _admissible(split: Split, rules: OpRules, sizes: Sequence[int]) -> bool:
    pieces: dict[str, int] = {}
    for name, size in zip(split, sizes, strict=True):
        if name is None:
            continue
        pieces[name] = pieces.get(name, 1) * size
    fits = all(rules.by_name[name].allows(count) for name, count in pieces.items())
    return fits and doubly_windowed(rules, split) is None and not own_order_broken(rules, split)


def layouts_of(tensor: Tensor, sizes: Sequence[int]) -> list[Layout]:
    """Every layout of ``Shard`` and ``Replicate`` that leaves no rank empty-handed."""
    choices: list[Placement] = [Replicate(), *(Shard(d) for d, extent in enumerate(tensor.shape) if extent > 1)]
    result = []
    for layout in itertools.product(choices, repeat=len(sizes)):
        pieces: dict[int, int] = {}
        for placement, size in zip(layout, sizes, strict=True):
            if isinstance(placement, Shard):
                pieces[placement.dim] = pieces.get(placement.dim, 1) * size
        if all(chunk(tensor.shape[d], n, n - 1)[0] < tensor.shape[d] for d, n in pieces.items()):
            result.append(layout)
    return result


def kept_layouts(made: Iterable[Layout], needs: Iterable[Sequence[tuple[Need, ...]]], axes: int) -> list[Layout]:
    """In which layouts a shared tensor may be kept: as it is made, or as one of its readers needs it."""
    offered = list(made)
    for of_reader in needs:
        once = {id(need): need for need in of_reader}.values()
        offered += [tuple(Shard(p.dim) if isinstance(p, Window) else p for p in need) for need in once]
    return settled(offered) or [(Replicate(),) * axes]


def settled(layouts: Iterable[Layout]) -> list[Layout]:
    """The distinct layouts without unreduced sums, in order of appearance."""
    once = {id(layout): layout for layout in layouts}.values()  # placements are slow to compare
    return [layout for layout in dict.fromkeys(once) if not any(type(p) is Partial for p in layout)]
