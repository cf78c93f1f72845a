"""What one rank does in a forward pass, as a list: operators on local tensors and the changes of layout between them.

This is the order in which the lowered program runs (:mod:`shardwright.lowering`): a tensor is brought from the layout its
maker leaves it in to its ``kept`` layout when it is first read, and from there to what each reader needs; equal needs
share one change. Nothing has a price here yet; :mod:`~shardwright.costs.walk` gives every node its events, and
:mod:`~shardwright.costs.memory_lifetimes` its storages. The rank is the one at coordinate zero, which ``torch.chunk``
gives the largest pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwright.cluster import Mesh
from shardwright.costs.memory_probe import Call, Forward, Strided
from shardwright.costs.redistribute import Conversion, conversion, first_gather
from shardwright.costs.walk_pieces import Piece, Pieces
from shardwright.errors import PlanError
from shardwright.graph import Graph, Op, Tensor
from shardwright.graph.core import refs
from shardwright.graph.repeats import span_of
from shardwright.operators.rules import (
    Layout,
    Need,
    OpRules,
    Partial,
    Replicate,
    Split,
    Window,
    local_shape,
    nested_chunk,
)
from shardwright.operators.strategy import Strategy


@dataclass(frozen=True)
class Value:
    """One tensor on one rank in one layout, and how it lies in memory there."""

    tensor: str
    needs: tuple[Need, ...]
    local: Strided


@dataclass(frozen=True)
class Compute:
    """An operator on local values (numbers into ``Nodes.values``), and what its forward call does to memory.

    ``op`` is the operator of the whole graph, ``call`` the local one; ``kernel`` runs in its place where there is one.
    """

    op: Op
    rules: OpRules
    split: Split
    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    footprint: Forward
    kernel: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Change:
    """A change of layout.

    ``reads``: its source is a parameter at rest, so its gradient goes home by itself. ``ahead``: which of its steps is a
    gather that is started ahead. ``again``: the gathered copy is freed after its forward use and gathered again.
    ``operator``: the index of the operator of the graph that it is made for.
    """

    steps: Conversion
    source: int
    result: int
    module: str
    reads: bool = False
    ahead: int | None = None
    again: bool = False
    operator: int = 0

    @property
    def is_view(self) -> bool:
        return is_view(self.steps)


Node = Compute | Change
Extents = tuple[tuple[int, int], ...]
"""For every mesh axis along which a window is read, the extent of the loop that reads it."""


@dataclass(frozen=True)
class Nodes:
    """The forward pass of one rank. ``rest`` maps source tensors to their values, ``results`` are those handed out."""

    graph: Graph
    strategy: Strategy
    mesh: Mesh
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    rest: Mapping[str, int]
    results: tuple[int, ...]
    roots: tuple[int, ...]
    """The results that the backward pass starts from."""
    training: bool
    recomputed: tuple[range, ...] = ()
    """The nodes of every recomputed block, in order."""

    @cached_property
    def roots_of(self) -> Mapping[int, int]:
        """Every value → the value whose memory it shares (itself unless it is a view)."""
        table = {number: number for number in range(len(self.values))}
        for node in self.nodes:
            if isinstance(node, Change):
                if node.is_view:
                    table[node.result] = table[node.source]
                continue
            for value, result in zip(node.outputs, node.footprint.results, strict=False):
                if value is not None and result is not None and result.owner < 0:
                    table[value] = table[node.inputs[-1 - result.owner]]
        return table


def forward_nodes(graph: Graph, strategy: Strategy, mesh: Mesh, training: bool = True) -> Nodes:
    """List what the rank at coordinate zero does in a forward pass.

    Raises
    ------
    PlanError
        When the strategy belongs to another mesh or lacks an operator or a source of the graph.
    """
    if strategy.axes != mesh.names:
        raise PlanError(
            f"the strategy is for a mesh {dict(strategy.axes)}, not for {dict(mesh.names)}.",
            "Make a plan for this cluster.",
        )
    return _Builder(graph, strategy, mesh, training).build()


class _Builder:
    def __init__(self, graph: Graph, strategy: Strategy, mesh: Mesh, training: bool) -> None:
        self.graph, self.strategy, self.mesh, self.training = graph, strategy, mesh, training
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.rest: dict[str, int] = {}
        self.home: dict[str, int] = {}
        self.changed: dict[tuple[str, tuple[Need, ...], Extents], int] = {}
        self.zero = (0,) * len(mesh.axes)
        self.pieces = Pieces(graph, mesh)
        self.locals: dict[object, Strided] = {}
        self.begins: list[int] = []
        """Per operator, its first node; changes of layout belong to the operator that they serve."""

    def build(self) -> Nodes:
        for name in self.graph.sources:
            if name not in self.strategy.resting:
                raise PlanError(f"the strategy has no resting layout for {name!r}.", "Make the plan again.")
            self.rest[name] = self.home[name] = self._value(name, self.strategy.resting[name])
        for op in self.graph.ops:
            self.begins.append(len(self.nodes))
            self._operator(op)
        self.begins.append(len(self.nodes))
        outputs = [r.name for r in refs(self.graph.outputs)]
        results = tuple(self._result(name) for name in outputs)
        for held, new in self.graph.mutations:
            self._read(new, self.strategy.resting[held], "")
        return Nodes(
            self.graph,
            self.strategy,
            self.mesh,
            tuple(self.values),
            tuple(self.nodes),
            self.rest,
            results,
            self._roots(results),
            self.training,
            self._recomputed(),
        )

    def _recomputed(self) -> tuple[range, ...]:
        """From the first to the last operator of every block; where blocks overlap, the earlier one has the nodes."""
        spans = []
        for path in self.strategy.recomputed if self.training else ():
            ops = span_of(self.graph, path)
            if not ops:
                raise PlanError(f"the model has no block {path!r} to recompute.", "Make the plan again.")
            spans.append((self.begins[ops.start], self.begins[ops.stop]))
        found: list[range] = []
        for start, stop in sorted(spans):
            start = max(start, found[-1].stop if found else 0)
            if start < stop:
                found.append(range(start, stop))
        return tuple(found)

    def _roots(self, results: tuple[int, ...]) -> tuple[int, ...]:
        """The loss: the first scalar result with a gradient; every result with a gradient where there is no scalar."""
        if not self.training:
            return ()
        with_gradient = [r for r in results if self.values[r].local.grad]
        scalars = [r for r in with_gradient if not self.graph.tensors[self.values[r].tensor].shape]
        return tuple(scalars[:1] or dict.fromkeys(with_gradient))

    def _value(self, tensor: str, needs: tuple[Need, ...], extents: Extents = ()) -> int:
        meta = self.graph.tensors[tensor]
        key = (meta.shape, meta.dtype, meta.grad, needs, extents)
        if key not in self.locals:  # the layers of a deep model have the same few
            self.locals[key] = self._local(meta, needs, extents)
        self.values.append(Value(tensor, needs, self.locals[key]))
        return len(self.values) - 1

    def _local(self, meta: Tensor, needs: tuple[Need, ...], extents: Extents) -> Strided:
        plain: Layout = tuple(Replicate() if isinstance(n, Window) else n for n in needs)
        shape = list(local_shape(meta.shape, plain, self.mesh.sizes, self.zero))
        for axis, extent in extents:
            need = needs[axis]
            if isinstance(need, Window):
                start, stop = nested_chunk(extent, [(self.mesh.sizes[axis], 0)])
                first, end, _, _ = need.region(start, stop, meta.shape[need.dim])
                shape[need.dim] = end - first
        return Strided.contiguous(tuple(shape), meta.dtype, meta.grad and self.training)

    def _operator(self, op: Op) -> None:
        split = self.strategy.splits.get(op.name)
        piece = self.pieces.of(op, split)
        assert split is not None  # there would be no piece
        inputs = tuple(
            self._read(name, need, op.module, piece.extents) for name, need in zip(op.inputs, piece.needs, strict=True)
        )
        outputs = tuple(
            None if name is None else self._value(name, layout)
            for name, layout in zip(op.outputs, piece.layouts, strict=True)
        )
        for name, number in zip(op.outputs, outputs, strict=True):
            if name is not None and number is not None:
                self.home[name] = number
        slots = tuple(inputs.index(number) for number in inputs)
        footprint = self._footprint(op, piece, slots, inputs, outputs)
        call = piece.call(slots)
        self.nodes.append(Compute(op, piece.rules, split, call, inputs, outputs, footprint, piece.kernel))

    def _footprint(
        self, op: Op, piece: Piece, slots: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int | None, ...]
    ) -> Forward:
        """Ask how the operator treats memory, and note how its results lie there."""
        follows = self.training and op.grad
        given = tuple(self.values[i].local if follows else self.values[i].local.without_gradient for i in inputs)
        expected = tuple(None if o is None else self.values[o].local for o in outputs)
        footprint = piece.footprint(slots, given, self.mesh.device.kind, expected)
        for number, result in zip(outputs, footprint.results, strict=False):
            if number is None or result is None or result.tensor.shape != self.values[number].local.shape:
                continue
            if result.tensor.strides != self.values[number].local.strides:
                local = replace(self.values[number].local, strides=result.tensor.strides)
                self.values[number] = replace(self.values[number], local=local)
        return footprint

    def _read(self, tensor: str, needs: tuple[Need, ...], module: str, extents: Sequence[int] = ()) -> int:
        """The value of a tensor in the layout a reader needs, changed on first use."""
        home = self.home[tensor]
        kept = self.strategy.kept.get(tensor)
        if kept is not None and self.values[home].needs != kept:
            home = self.home[tensor] = self._change(tensor, home, kept, (), module)
        if self.values[home].needs == needs:
            return home
        windows = tuple((a, e) for a, e in enumerate(extents) if isinstance(needs[a], Window))
        key = (tensor, needs, windows)
        if key not in self.changed:
            self.changed[key] = self._change(tensor, home, needs, windows, module)
        return self.changed[key]

    def _change(self, tensor: str, source: int, needs: tuple[Need, ...], extents: Extents, module: str) -> int:
        meta, layout = self.graph.tensors[tensor], self.values[source].needs
        steps = conversion(meta.shape, meta.dtype, layout, needs, self.mesh, meta.grad)
        if not steps.possible:
            raise PlanError(
                f"tensor {tensor!r} of shape {meta.shape} cannot be brought from {layout} to {needs}.",
                "Make the plan again.",
            )
        result = self._value(tensor, needs, extents)
        if is_view(steps):
            local = replace(self.values[result].local, strides=self.values[source].local.strides)
            self.values[result] = replace(self.values[result], local=local)
        parameter = self.graph.parameter_of.get(tensor)
        reads = parameter is not None and source == self.rest[tensor]
        ahead = first_gather(step.kind for step in steps.forward) if reads else None
        again = ahead is not None and self.training and tensor in self.strategy.regathered
        where = parameter.paths[0] if parameter is not None else module
        self.nodes.append(Change(steps, source, result, where, reads, ahead, again, len(self.begins) - 1))
        return result

    def _result(self, tensor: str) -> int:
        """Outputs that are unreduced sums are completed; their gradient needs nothing."""
        home = self._read_home(tensor)
        layout = self.values[home].needs
        whole = tuple(Replicate() if isinstance(p, Partial) else p for p in layout)
        if whole == layout:
            return home
        meta = self.graph.tensors[tensor]
        steps = conversion(meta.shape, meta.dtype, layout, whole, self.mesh)
        completed = Conversion(steps.forward, (), steps.seconds, 0.0)
        result = self._value(tensor, whole)
        producer = self.graph.producer.get(tensor)
        self.nodes.append(Change(completed, home, result, producer.module if producer else ""))
        return result

    def _read_home(self, tensor: str) -> int:
        kept = self.strategy.kept.get(tensor)
        home = self.home[tensor]
        if kept is not None and self.values[home].needs != kept:
            home = self.home[tensor] = self._change(tensor, home, kept, (), "")
        return home


def is_view(steps: Conversion) -> bool:
    """Whether a change only looks at a part of its source (rank zero's mask is the source itself)."""
    return all(step.kind in ("slice", "mask") for step in steps.forward)
