"""A strategy carried over to another call of the same model: another batch or length, other arguments, the other mode.

A strategy speaks of operators and loops, not of extents. Operators of the other call are recognised by where they come from
(module, operator, line, order) and keep their splits as far as their loops can still be cut; parameters and buffers rest
where they rest. Whatever is new, or too small to be cut as before, takes the split that moves the fewest bytes beside what
its inputs are like by then, in the order of execution: Tofu's and PaSE's prices (bytes between layouts) chosen greedily.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.graph import Graph, Op, Tensor
from shardwright.graph.repeats import span_of
from shardwright.operators import analyse
from shardwright.operators.rules import (
    Cut,
    Layout,
    Need,
    OpRules,
    Split,
    Window,
    doubly_windowed,
    input_layouts,
    largest_shard,
    output_layouts,
)
from shardwright.operators.strategy import Strategy
from shardwright.program.pieces import cuttable

TOUCHED = 0.1
"""A byte that a rank reads or writes itself, in bytes that travel; memory is about ten times as fast as a link."""
FLOPS_PER_BYTE = 200.0
"""Operations that a rank performs while one byte travels; both figures only break ties between ways to cut something new."""


def carried(
    graph: Graph, strategy: Strategy, other: Graph, names: Mapping[str, str] = MappingProxyType({})
) -> Strategy:
    """The strategy of ``graph`` for ``other``, another call of the same model; ``names`` leads from tensors of the other
    call to the same ones of the planned call, where both are parts of models and read what other parts make.

    Examples
    --------
    >>> shorter = capture(model, (tokens[:, :64],))                                             # doctest: +SKIP
    >>> carried(graph, stage.strategy, shorter).splits["linear"]                                # doctest: +SKIP
    ('n0',)
    """
    return _Transfer(graph, strategy, other, names).strategy()


def replicated(
    graph: Graph, strategy: Strategy, other: Graph, names: Mapping[str, str] = MappingProxyType({})
) -> Strategy:
    """Everything computed on every rank, parameters where they rest: always possible."""
    found = _Transfer(graph, strategy, other, names).strategy()
    nothing: Split = (None,) * len(strategy.axes)
    return replace(found, splits={op.name: nothing for op in other.ops}, kept={}, recomputed=(), lightly=frozenset())


def matched_operators(graph: Graph, other: Graph) -> dict[str, Op]:
    """Operators of ``other`` by name → the same ones in ``graph``, as far as there are any.

    First those that come from the same line of the same module in the same order, then those of the same module in order.
    """
    found: dict[str, Op] = {}
    taken: set[str] = set()
    for key in (lambda op: (op.module, op.target, op.source), lambda op: (op.module, op.target)):
        mine = _grouped((op for op in graph.ops if op.name not in taken), key)
        for place, ops in _grouped((op for op in other.ops if op.name not in found), key).items():
            for op, known in zip(ops, mine.get(place, ()), strict=False):
                if len(op.outputs) == len(known.outputs):
                    found[op.name] = known
                    taken.add(known.name)
    return found


def _grouped(ops: Iterable[Op], key: Callable[[Op], Hashable]) -> Mapping[Hashable, list[Op]]:
    groups: dict[Hashable, list[Op]] = defaultdict(list)
    for op in ops:
        groups[key(op)].append(op)
    return groups


class _Transfer:
    """The state of one carrying over: what every tensor of the other call is like when its readers come."""

    def __init__(self, graph: Graph, strategy: Strategy, other: Graph, names: Mapping[str, str]) -> None:
        self.graph, self.known, self.other = graph, strategy, other
        self.sizes, self.cuts = strategy.sizes, strategy.cuts
        self.same = matched_operators(graph, other)
        known, sources = {*graph.sources}, {*other.sources}
        received = {name: mine for name, mine in names.items() if name in sources and mine in known}
        self.names = {**self._sources(), **received}
        """Tensors of the other call → the same ones of the planned call."""
        self.layouts: dict[str, Layout] = {}
        self.kept: dict[str, Layout] = {}

    def strategy(self) -> Strategy:
        resting = {name: self._resting(name) for name in self.other.sources}
        for name, layout in resting.items():
            self.layouts[name] = self._kept(name) or layout
        splits = {op.name: self._split(op) for op in self.other.ops}
        parameters = {self.names.get(p.tensor): p.tensor for p in self.other.parameters}
        again = tuple(path for path in self.known.recomputed if span_of(self.other, path))
        return replace(
            self.known,
            splits=splits,
            resting=resting,
            kept=self.kept,
            regathered=frozenset(parameters[name] for name in self.known.regathered if name in parameters),
            whole_gradients=frozenset(parameters[name] for name in self.known.whole_gradients if name in parameters),
            recomputed=again,
            lightly=self.known.lightly & {*again},
        )

    def _sources(self) -> dict[str, str]:
        """Parameters and buffers go by their paths, inputs by their names (those of arguments), constants by their bytes."""
        mine: dict[Hashable, str] = {path: p.tensor for p in self.graph.parameters for path in p.paths}
        mine |= {b.path: b.tensor for b in self.graph.buffers}
        mine |= {c.data: c.tensor for c in self.graph.constants}
        mine |= {(i.tensor,): i.tensor for i in self.graph.inputs if i.tensor is not None}
        theirs: list[tuple[str, Hashable]] = [(p.tensor, p.paths[0]) for p in self.other.parameters]
        theirs += [(b.tensor, b.path) for b in self.other.buffers]
        theirs += [(c.tensor, c.data) for c in self.other.constants]
        theirs += [(i.tensor, (i.tensor,)) for i in self.other.inputs if i.tensor is not None]
        names = {name: mine[key] for name, key in theirs if key in mine}
        for op in self.other.ops:
            known = self.same.get(op.name)
            for name, as_known in zip(op.outputs, known.outputs if known else (), strict=False):
                if name is not None and as_known is not None:
                    names[name] = as_known
        return names

    def _resting(self, name: str) -> Layout:
        known = self.names.get(name)
        whole: Layout = (Replicate(),) * len(self.sizes)
        return whole if known is None else self._cuttable(name, self.known.resting[known])

    def _kept(self, name: str) -> Layout | None:
        wanted = self.known.kept.get(self.names.get(name, ""))
        if wanted is None or self._cuttable(name, wanted) != wanted:
            return None
        self.kept[name] = wanted
        return wanted

    def _cuttable(self, name: str, layout: Layout) -> Layout:
        """A layout of this tensor, whole along axes that would leave a rank with nothing."""
        shape, found = self.other.tensors[name].shape, list(layout)
        pieces: dict[int, list[Cut]] = defaultdict(list)
        for axis, placement in enumerate(layout):
            if not isinstance(placement, Shard):
                continue
            cuts = pieces[placement.dim]
            if placement.dim < len(shape) and cuttable(shape[placement.dim], False, [*cuts, self.cuts[axis]]):
                cuts.append(self.cuts[axis])
            else:
                found[axis] = Replicate()
        return tuple(found)

    def _split(self, op: Op) -> Split:
        rules, known = analyse(op, self.other.tensors), self.same.get(op.name)
        split: list[str | None] = [None] * len(self.sizes)
        undecided = list(range(len(split)))
        if known is not None:
            split = list(self.known.splits[known.name])
            undecided = [axis for axis in undecided if not self._possible(op, rules, split, axis, split[axis])]
        if undecided:
            for axis in undecided:
                split[axis] = None
            split = self._cheapest(op, rules, split, undecided)
        found = tuple(split)
        for name, layout in zip(op.outputs, output_layouts(rules, found, len(op.outputs)), strict=True):
            if name is not None:
                self.layouts[name] = self._kept(name) or layout
        return found

    def _possible(self, op: Op, rules: OpRules, split: list[str | None], axis: int, loop: str | None) -> bool:
        """Whether an axis can cut this loop, as the axes before it cut theirs."""
        if loop is None:
            return True
        rule = rules.by_name.get(loop)
        if rule is None or doubly_windowed(rules, tuple(split[: axis + 1])) is not None:
            return False
        cuts = [self.cuts[a] for a in range(axis + 1) if split[a] == loop]
        if rule.divides and not cuttable(rule.extent, rule.even, cuts):
            return False
        # A sum that is not finished may pass through a linear operator; there is none to pass where its input is finished.
        return all(
            not isinstance(need, Partial) or self.layouts[name][axis] == need
            for name, need in zip(op.inputs, rule.inputs, strict=True)
        )

    def _cheapest(self, op: Op, rules: OpRules, split: list[str | None], undecided: list[int]) -> list[str | None]:
        best, least = split, math.inf
        choices = [(None, *rules.by_name) for _ in undecided]
        for chosen in itertools.product(*choices):
            trial = list(split)
            for axis, loop in zip(undecided, chosen, strict=True):
                trial[axis] = loop
            if all(self._possible(op, rules, trial, axis, trial[axis]) for axis in range(len(trial))):
                price = self._price(op, rules, tuple(trial))
                if price < least:
                    best, least = trial, price
        return best

    def _price(self, op: Op, rules: OpRules, split: Split) -> float:
        """Bytes between ranks, and what a rank does itself in the same unit."""
        total = rules.flops / FLOPS_PER_BYTE
        for loop, size in zip(split, self.sizes, strict=True):
            if loop is not None and rules.by_name[loop].divides:
                total /= size
        for name, needs in zip(op.inputs, input_layouts(rules, split, len(op.inputs)), strict=True):
            total += self._moved(self.other.tensors[name], self.layouts[name], needs)
        for made, layout in zip(op.outputs, output_layouts(rules, split, len(op.outputs)), strict=True):
            if made is not None:
                tensor = self.other.tensors[made]
                total += self._touched(tensor, layout)
                total += sum(2 * tensor.bytes for placement in layout if isinstance(placement, Partial))
        return total

    def _touched(self, tensor: Tensor, needs: Iterable[Need]) -> float:
        layout = tuple(Shard(need.dim) if isinstance(need, Window) else need for need in needs)
        return TOUCHED * largest_shard(tensor.shape, layout, self.cuts) * tensor.bytes / max(tensor.elements, 1)

    def _moved(self, tensor: Tensor, layout: Layout, needs: tuple[Need, ...]) -> float:
        total = self._touched(tensor, needs)
        for have, need, size in zip(layout, needs, self.sizes, strict=True):
            if have == need or isinstance(have, Replicate):
                continue
            if isinstance(have, Partial):
                total += tensor.bytes * (1 if isinstance(need, Shard) else 2)
            elif isinstance(need, Window) and isinstance(have, Shard) and need.dim == have.dim:
                total += TOUCHED * tensor.bytes / size
            else:
                total += tensor.bytes / size if isinstance(need, Shard) else tensor.bytes
        return total
