"""Strategies that are forced to cut, so that a small model exercises what the plan of a large one will use.

On a small model the fastest plan often cuts nothing, and then nothing is verified. Here every operator is cut wherever its
rules allow, one kind of loop after the other: the batch (parameters whole, then sharded and gathered while every other
block is recomputed), features, the sequence, reductions (sums and exchanged statistics), halos, and at last, in a few mixed
rounds, whatever loop of an operator has not been run yet. No price is asked: that is the point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import Axis, Mesh
from shardwright.costs.redistribute import conversion
from shardwright.graph import Graph, Op
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators import analyse
from shardwright.operators.own_orders import cut_otherwise
from shardwright.operators.rules import OWN, Layout, LoopRule, OpRules, Split, input_layouts, output_layouts
from shardwright.operators.strategy import Strategy
from shardwright.search.labels import Labels, label_loops
from shardwright.search.options import EVERYTHING, layouts_of, splits_of

_SEVERAL = 2
"""Operators of a module: of a single one there is nothing to keep but what it reads."""
MIXED = 4
"""At most so many rounds for loops that no other strategy cuts."""


@dataclass(frozen=True)
class Cut:
    """How much a strategy cuts: operators (of how many), the share of the floating-point work, and which kinds of loops."""

    operators: int
    of: int
    work: float
    loops: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.operators} of {self.of} operators, {100 * self.work:.0f} % of the work"


def cut_by(graph: Graph, strategy: Strategy) -> Cut:
    """How much of a graph a strategy cuts.

    >>> from shardwright.cluster import mesh_of, parse_cluster
    >>> from shardwright.frontend import capture
    >>> import torch
    >>> graph = capture(torch.nn.Linear(8, 4), (torch.zeros(2, 8),))
    >>> forced = forced_strategies(graph, mesh_of(parse_cluster("local:2")))
    >>> {name: str(cut_by(graph, strategy)) for name, strategy in forced}["features"]
    '1 of 1 operators, 100 % of the work'
    """
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    labels = label_loops(graph, rules)
    count, work, total = 0, 0.0, 0.0
    kinds: dict[str, int] = {}
    for op in graph.ops:
        loops = [rules[op.name].by_name[name] for name in strategy.splits[op.name] if name is not None]
        found = {kind_of(loop, labels[op.name].get(loop.name, "")) for loop in loops if loop.divides}
        total += rules[op.name].flops
        if found:
            count, work = count + 1, work + rules[op.name].flops
        for kind in sorted(found):
            kinds[kind] = kinds.get(kind, 0) + 1
    return Cut(count, len(graph.ops), work / total if total else float(bool(count)), kinds)


def kind_of(loop: LoopRule, label: str) -> str:
    """``batch``, ``sequence``, ``halos``, ``reductions`` or ``features``: what cutting a loop is about."""
    if loop.windowed:
        return "halos"
    if loop.exchanges or not any(isinstance(out, Shard) for out in loop.outputs):
        return "reductions"
    return label if label in ("batch", "sequence") else "features"


def frugal(mesh: Mesh) -> Mesh:
    """The same mesh at prices where only bytes count: small tensors then take the routes that large ones take."""
    axes = tuple(Axis(axis.name, axis.size, 1e-9, 1.0) for axis in mesh.axes)
    return replace(mesh, axes=axes)


def forced_strategies(graph: Graph, mesh: Mesh) -> Iterator[tuple[str, Strategy]]:
    """Strategies by name that cut every operator they can; those that would cut nothing of their kind are left out.

    The last mesh axis cuts what the name says, where an operator has such a loop, and the batch elsewhere, as other axes do.
    """
    forcing = _Forcing(graph, mesh)
    last = len(mesh.sizes) - 1
    for kind in ("batch", "features", "sequence", "reductions", "halos"):
        for sharded in (False, True) if kind == "batch" else (False,):

            def wanted(axis: int, found: str, kind: str = kind) -> bool:
                return found == (kind if axis == last else "batch")

            if forcing.has(kind):
                again = blocks_of(graph)[::2] if sharded else ()
                strategy = replace(forcing.strategy(wanted, sharded), recomputed=again)
                yield kind + ", parameters sharded" * sharded, strategy
    for number in range(MIXED):
        if number and not forcing.unused():
            return
        yield f"mixed {number + 1}", forcing.mixed(number)


def blocks_of(graph: Graph) -> tuple[str, ...]:
    """What can be recomputed: the repeated blocks of a graph, or else its outermost modules of several operators."""
    if not graph.training:
        return ()
    outermost = dict.fromkeys(op.module.split(".")[0] for op in graph.ops if op.module)
    return block_paths(graph) or tuple(path for path in outermost if len(span_of(graph, path)) >= _SEVERAL)


class _Forcing:
    """A walk over the graph that picks splits, and remembers which loops of which operators have been cut already."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
        self.labels: Labels = label_loops(graph, self.rules)
        self.options = {op.name: splits_of(op, self.rules[op.name], mesh.sizes, {}, EVERYTHING) for op in graph.ops}
        if not all(OWN in self.rules[op.name].by_name for op in graph.ops if _sorts(graph, op)):
            # What a sort in pieces leaves, somebody could not read.
            self.options = {name: [split for split in all_ if OWN not in split] for name, all_ in self.options.items()}
        self.used: set[tuple[str, str]] = set()
        self.tried: set[tuple[str, str]] = set()

    def has(self, kind: str) -> bool:
        last = len(self.mesh.sizes) - 1
        return any(self._kind(op, split[last]) == kind for op in self.graph.ops for split in self.options[op.name])

    def unused(self) -> bool:
        """Whether there is a loop that could be cut and has not been, nor been tried in a mixed round."""
        return any(self._fresh(op, split) for op in self.graph.ops for split in self.options[op.name])

    def strategy(self, wanted: Callable[[int, str], bool], sharded: bool) -> Strategy:
        def rank(op: Op, split: Split, at: Mapping[str, Layout]) -> tuple[float, ...]:
            kinds = [self._kind(op, name) for name in split]
            fits = sum(wanted(axis, kind) for axis, kind in enumerate(kinds) if kind)
            return fits, self._follows(op, split, at), self._fresh(op, split), kinds.count("batch")

        return self._walk(rank, _sharded if sharded else None, random.Random(0), keep=False)

    def mixed(self, seed: int) -> Strategy:
        dice = random.Random(seed)

        def rank(op: Op, split: Split, at: Mapping[str, Layout]) -> tuple[float, ...]:
            fresh = self._fresh(op, split)
            self.tried.update((self._alike(op), name) for name in split if name is not None and fresh)
            return fresh, sum(self._kind(op, name) is not None for name in split), dice.random()

        return self._walk(rank, lambda name, options: dice.choice(options), dice, keep=True)

    def _kind(self, op: Op, loop: str | None) -> str | None:
        rule = self.rules[op.name].by_name[loop] if loop is not None else None
        if rule is None or not rule.divides:
            return None
        return kind_of(rule, self.labels[op.name].get(rule.name, ""))

    def _alike(self, op: Op) -> str:
        """Operators that compute the same on the same shapes are one."""
        shapes = [self.graph.tensors[name].shape for name in op.inputs]
        return f"{op.target} {shapes} {[value for value in op.args if isinstance(value, int | float | bool)]}"

    def _follows(self, op: Op, split: Split, at: Mapping[str, Layout]) -> int:
        """How many mesh axes find an activation cut along the dim that they need cut; a halo is only sent between such."""
        needs = input_layouts(self.rules[op.name], split, len(op.inputs))
        pairs = [(at[name], need) for name, need in zip(op.inputs, needs, strict=True) if name in at]
        return sum(
            isinstance(here, Shard) and getattr(there, "dim", None) == here.dim
            for layout, need in pairs
            for here, there in zip(layout, need, strict=True)
        )

    def _fresh(self, op: Op, split: Split) -> int:
        """How many loops of a split nobody has cut yet."""
        mine = {(self._alike(op), name) for name in split if name is not None and self._kind(op, name)}
        return len(mine - self.used - self.tried)

    def _walk(
        self,
        rank: Callable[[Op, Split, Mapping[str, Layout]], tuple[float, ...]],
        rests: Callable[[str, Sequence[Layout]], Layout] | None,
        dice: random.Random,
        keep: bool,
    ) -> Strategy:
        """Split operator by operator; sources rest as ``rests`` says, or else as their first reader wants them."""
        graph, sizes = self.graph, self.mesh.sizes
        parameters = graph.parameter_of
        at: dict[str, Layout] = {}
        if rests is not None:
            at = {p: rests(p, layouts_of(graph.tensors[p], sizes)) for p in parameters}
        splits: dict[str, Split] = {}
        kept: dict[str, Layout] = {}
        for op in graph.ops:
            rules = self.rules[op.name]
            ranked = sorted(self.options[op.name], key=lambda split: rank(op, split, at), reverse=True)
            split = next(
                split
                for split in ranked
                if self._reachable(op, rules, split, at) and cut_otherwise(op, split, graph, splits) is None
            )
            splits[op.name] = split
            self.used.update((self._alike(op), name) for name in split if name is not None)
            for name, need in zip(op.inputs, input_layouts(rules, split, len(op.inputs)), strict=True):
                if name not in at:  # a source at its first reader
                    at[name] = tuple(
                        p if isinstance(p, Shard) and p in _shards(graph, name) else Replicate() for p in need
                    )
                    if at[name] not in layouts_of(graph.tensors[name], sizes):
                        at[name] = (Replicate(),) * len(sizes)
            for result, layout in zip(op.outputs, output_layouts(rules, split, len(op.outputs)), strict=True):
                if result is None:
                    continue
                at[result] = layout
                own = graph.tensors[result].order is not None  # it goes from operator to operator as it is
                if keep and not own and len(graph.consumers[result]) > 1 and dice.random() < 0.5:
                    at[result] = kept[result] = self._home(result, layout, dice)
        resting = {name: at.get(name, (Replicate(),) * len(sizes)) for name in graph.sources}
        strategy = Strategy(self.mesh.names, splits, resting, kept)
        if rests is None:
            return strategy
        again = frozenset(name for name in parameters if keep is False or dice.random() < 0.5)
        return replace(strategy, regathered=again)

    def _reachable(self, op: Op, rules: OpRules, split: Split, at: Mapping[str, Layout]) -> bool:
        whole: Layout = (Replicate(),) * len(split)
        needs = input_layouts(rules, split, len(op.inputs))
        return all(self._converts(name, at.get(name, whole), need) for name, need in zip(op.inputs, needs, strict=True))

    def _converts(self, name: str, layout: Layout, need: tuple[object, ...]) -> bool:
        meta = self.graph.tensors[name]
        return layout == need or conversion(meta.shape, meta.dtype, layout, need, self.mesh, meta.grad).possible

    def _home(self, name: str, layout: Layout, dice: random.Random) -> Layout:
        homes = layouts_of(self.graph.tensors[name], self.mesh.sizes)
        return dice.choice([layout, *(other for other in homes if self._converts(name, layout, other))])


def _sharded(name: str, options: Sequence[Layout]) -> Layout:
    """As much of a parameter in shards as its dims allow, the first dim first."""
    return max(options, key=lambda layout: sum(isinstance(p, Shard) for p in layout))


def _sorts(graph: Graph, op: Op) -> bool:
    """Whether an operator handles rows that are sorted and brought back."""
    names = (*op.inputs, *(name for name in op.outputs if name is not None))
    return any(graph.tensors[name].order is not None for name in names)


def _shards(graph: Graph, name: str) -> list[Shard]:
    return [Shard(dim) for dim, extent in enumerate(graph.tensors[name].shape) if extent > 1]
