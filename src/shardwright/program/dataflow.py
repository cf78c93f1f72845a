"""What one rank computes in a forward pass: operators on local values and the changes of layout between them.

A tensor is brought from the layout its maker leaves it in to its ``kept`` layout when it is first read, and from there to
what each reader needs; equal needs share one change. Every step is bound to this rank's numbers and checked to lead where
it should. How each operator treats memory (what autograd saves, which results are views) is asked of PyTorch itself. The
order of a whole step, backward pass and communication ahead of use included, is written by
:mod:`~shardwright.program.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwright.errors import LoweringError
from shardwright.graph import Graph, Op, Ref, Tensor
from shardwright.graph.repeats import span_of
from shardwright.operators.own_orders import cut_otherwise
from shardwright.operators.rules import (
    Layout,
    Need,
    OpRules,
    Replicate,
    Split,
    Window,
    local_shape,
    nested_chunk,
)
from shardwright.operators.strategy import Strategy
from shardwright.program.binding import Place, bind, completed, dual, replicas
from shardwright.program.decisions import Decisions
from shardwright.program.footprints import ForwardFootprint, OperatorCall, Strided
from shardwright.program.pieces import CutOperator, Pieces, describe
from shardwright.program.resting import in_equal_parts
from shardwright.program.steps import BoundStep, Route, first_gather


@dataclass(frozen=True)
class Value:
    """One tensor on one rank in one layout, and how it lies in memory there."""

    tensor: str
    needs: tuple[Need, ...]
    local: Strided


@dataclass(frozen=True)
class Compute:
    """An operator on local values (numbers into ``Dataflow.values``), and what its forward call does to memory.

    ``op`` is the operator of the whole graph, ``local`` the one this rank calls, ``call`` that one without names; ``kernel``
    runs in its place where there is one. ``lines`` tells, for each cut loop, the mesh axes that cut it.
    """

    op: Op
    local: Op
    rules: OpRules
    split: Split
    call: OperatorCall
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    footprint: ForwardFootprint
    lines: Mapping[str, tuple[int, ...]]
    kernel: Callable[..., Any] | None = None


@dataclass(frozen=True)
class LayoutChange:
    """A change of layout: the ``route`` taken, and the same ``forward`` and ``backward`` steps with this rank's numbers.

    ``reads``: its source is a parameter at rest, so its gradient goes home by itself. ``ahead``: which of its steps is a
    gather that is started ahead. ``again``: the gathered copy is freed after its forward use and gathered again.
    ``operator``: the index of the operator of the graph that it is made for.
    """

    route: Route
    forward: tuple[BoundStep, ...]
    backward: tuple[BoundStep, ...]
    source: int
    result: int
    module: str
    reads: bool = False
    ahead: int | None = None
    again: bool = False
    operator: int = 0

    @property
    def is_view(self) -> bool:
        return all(step.is_view for step in self.route.forward)


Node = Compute | LayoutChange
Extents = tuple[tuple[int, int], ...]
"""For every mesh axis along which a window is read, the extent of the loop that reads it."""


@dataclass(frozen=True)
class ResultValue:
    """One flattened output: a value to hand out. ``shares``: how many ranks hold it alike, each with a share of its
    gradient; that of an unreduced sum, completed for the user, is the same on every rank already."""

    value: int
    shares: int


@dataclass(frozen=True)
class Dataflow:
    """The forward pass of one rank. ``rest`` maps source tensors to their values; ``outputs`` follow ``Graph.outputs``
    (plain values as they are); ``mutations`` pair a buffer's tensor with the value to store."""

    graph: Graph
    strategy: Strategy
    place: Place
    device: str
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    rest: Mapping[str, int]
    outputs: tuple[ResultValue | Any, ...]
    mutations: tuple[tuple[str, int], ...]
    training: bool
    recomputed: tuple[tuple[range, bool], ...] = ()
    """The nodes of every recomputed block, in order, and whether it is recomputed lightly."""
    sent: frozenset[str] = frozenset()
    """Of a stage, the results that other stages read."""
    equal: frozenset[str] = frozenset()
    """Parameters that rest in equal parts although an axis cuts in shares (:mod:`~shardwright.program.resting`)."""

    @cached_property
    def results(self) -> tuple[int, ...]:
        """The values that are handed out."""
        return tuple(output.value for output in self.outputs if isinstance(output, ResultValue))

    @cached_property
    def result_of(self) -> Mapping[str, int]:
        """The values that are handed out, by their tensors."""
        return {self.values[value].tensor: value for value in self.results}

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The results that a gradient may come back from: the backward pass starts from them."""
        if not self.training:
            return ()
        return tuple(dict.fromkeys(r for r in self.results if self.values[r].local.grad))

    @cached_property
    def roots_of(self) -> Mapping[int, int]:
        """Every value → the value whose memory it shares (itself unless it is a view)."""
        table = {number: number for number in range(len(self.values))}
        for node in self.nodes:
            if isinstance(node, LayoutChange):
                if node.is_view:
                    table[node.result] = table[node.source]
                continue
            for value, result in zip(node.outputs, node.footprint.results, strict=False):
                if value is not None and result is not None and result.owner < 0:
                    table[value] = table[node.inputs[-1 - result.owner]]
        return table

    def local_shape(self, tensor: str, layout: Layout) -> tuple[int, ...]:
        """Shape of this rank's shard of a tensor."""
        return local_shape(self.graph.tensors[tensor].shape, layout, self.place_of(tensor).cuts, self.place.coordinate)

    def place_of(self, tensor: str) -> Place:
        """How the axes cut a tensor, at rest: as they cut everything, or in equal parts."""
        return self.place.even if tensor in self.equal else self.place


def dataflow(
    graph: Graph,
    strategy: Strategy,
    coordinate: Sequence[int],
    decisions: Decisions,
    device: str = "cpu",
    training: bool = True,
    sent: Collection[str] = (),
) -> Dataflow:
    """What the rank at ``coordinate`` computes in a forward pass on this kind of device; ``sent``: of a stage, the results
    that other stages read.

    Raises
    ------
    LoweringError
        When the strategy lacks an operator or a source of the graph, or cannot be run; the message names the operator and
        where in the model it stands.
    """
    place = Place(strategy.axes, tuple(coordinate), strategy.cuts)
    flow = _Builder(graph, strategy, place, decisions, device, training).build()
    return replace(flow, sent=frozenset(sent)) if sent else flow


class _Builder:
    def __init__(
        self, graph: Graph, strategy: Strategy, place: Place, decisions: Decisions, device: str, training: bool
    ) -> None:
        self.graph, self.strategy, self.place, self.training = graph, strategy, place, training
        self.decisions, self.device = decisions, device
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.rest: dict[str, int] = {}
        self.home: dict[str, int] = {}
        self.changed: dict[tuple[str, tuple[Need, ...], Extents], int] = {}
        self.pieces = Pieces(graph, place, device)
        self.locals: dict[object, Strided] = {}
        self.bound: dict[object, tuple[Route, tuple[BoundStep, ...], tuple[BoundStep, ...]]] = {}
        self.equal = in_equal_parts(graph, strategy)
        self.places = dict.fromkeys(self.equal, place.even)
        """Of parameters that rest in equal parts; everything else is cut as the axes cut."""
        self.begins: list[int] = []
        """Per operator, its first node; changes of layout belong to the operator that they serve."""

    def build(self) -> Dataflow:
        for name in self.graph.sources:
            if name not in self.strategy.resting:
                raise LoweringError(f"the strategy has no resting layout for {name!r}.", "Make the plan again.")
            self.rest[name] = self.home[name] = self._value(name, self.strategy.resting[name])
        for op in self.graph.ops:
            self.begins.append(len(self.nodes))
            self._operator(op)
        self.begins.append(len(self.nodes))
        outputs = tuple(self._result(out.name) if isinstance(out, Ref) else out for out in self.graph.outputs)
        mutations = tuple(
            (held, self._read(new, self.strategy.resting[held], "")) for held, new in self.graph.mutations
        )
        return Dataflow(
            self.graph,
            self.strategy,
            self.place,
            self.device,
            tuple(self.values),
            tuple(self.nodes),
            self.rest,
            outputs,
            mutations,
            self.training,
            self._recomputed(),
            equal=self.equal,
        )

    def _recomputed(self) -> tuple[tuple[range, bool], ...]:
        """From the first to the last operator of every block; where blocks overlap, the earlier one has the nodes."""
        spans = []
        for path in self.strategy.recomputed if self.training else ():
            ops = span_of(self.graph, path)
            if not ops:
                raise LoweringError(
                    f"there is no block {path!r} to recompute.", "Name modules as in model.named_modules()."
                )
            spans.append((self.begins[ops.start], self.begins[ops.stop], path in self.strategy.lightly))
        found: list[tuple[range, bool]] = []
        for start, stop, lightly in sorted(spans):
            start = max(start, found[-1][0].stop if found else 0)
            if start < stop:
                found.append((range(start, stop), lightly))
        return tuple(found)

    def _value(self, tensor: str, needs: tuple[Need, ...], extents: Extents = ()) -> int:
        meta = self.graph.tensors[tensor]
        place = self.places.get(tensor, self.place)
        key = (meta.shape, meta.dtype, meta.grad, needs, extents, place.cuts)
        if key not in self.locals:  # the layers of a deep model have the same few
            self.locals[key] = self._local(meta, needs, extents, place)
        self.values.append(Value(tensor, needs, self.locals[key]))
        return len(self.values) - 1

    def _local(self, meta: Tensor, needs: tuple[Need, ...], extents: Extents, place: Place) -> Strided:
        plain: Layout = tuple(Replicate() if isinstance(n, Window) else n for n in needs)
        shape = list(local_shape(meta.shape, plain, place.cuts, place.coordinate))
        for axis, extent in extents:
            need = needs[axis]
            if isinstance(need, Window):
                start, stop = nested_chunk(extent, [(self.place.cuts[axis], self.place.coordinate[axis])])
                first, end, _, _ = need.region(start, stop, meta.shape[need.dim])
                shape[need.dim] = max(end - first, 0)
        return Strided.contiguous(tuple(shape), meta.dtype, meta.grad and self.training)

    def _operator(self, op: Op) -> None:
        split = self.strategy.splits.get(op.name)
        piece = self.pieces.of(op, split)
        assert split is not None  # there would be no piece
        if (maker := cut_otherwise(op, split, self.graph, self.strategy.splits)) is not None:
            raise LoweringError(
                f"{describe(op)}: it reads rows that {maker.name} leaves in orders of their own, and is cut otherwise.",
                "Make the plan again.",
            )
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
        self.nodes.append(
            Compute(
                op,
                piece.op,
                piece.rules,
                split,
                piece.call(slots),
                inputs,
                outputs,
                footprint,
                piece.lines,
                piece.kernel,
            )
        )

    def _footprint(
        self,
        op: Op,
        piece: CutOperator,
        slots: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int | None, ...],
    ) -> ForwardFootprint:
        """Ask how the operator treats memory, and note how its results lie there."""
        follows = self.training and op.grad
        given = tuple(self.values[i].local if follows else self.values[i].local.without_gradient for i in inputs)
        expected = tuple(None if o is None else self.values[o].local for o in outputs)
        footprint = piece.footprint(slots, given, self.device, expected)
        for number, result in zip(outputs, footprint.results, strict=False):
            if number is None or result is None or result.tensor.shape != self.values[number].local.shape:
                continue
            if result.tensor.strides != self.values[number].local.strides:
                local = replace(self.values[number].local, strides=result.tensor.strides)
                self.values[number] = replace(self.values[number], local=local)
        return footprint

    def _read(self, tensor: str, needs: tuple[Need, ...], module: str, extents: Sequence[int] = ()) -> int:
        """The value of a tensor in the layout a reader needs, changed on first use."""
        home = self._at_home(tensor, module)
        if self.values[home].needs == needs:
            return home
        windows = tuple((a, e) for a, e in enumerate(extents) if isinstance(needs[a], Window))
        key = (tensor, needs, windows)
        if key not in self.changed:
            self.changed[key] = self._change(tensor, home, needs, windows, module)
        return self.changed[key]

    def _at_home(self, tensor: str, module: str) -> int:
        """The value that every reader of a tensor starts from."""
        home, kept = self.home[tensor], self.strategy.kept.get(tensor)
        if kept is not None and self.values[home].needs != kept:
            home = self.home[tensor] = self._change(tensor, home, kept, (), module)
        return home

    def _change(self, tensor: str, source: int, needs: tuple[Need, ...], extents: Extents, module: str) -> int:
        meta, layout = self.graph.tensors[tensor], self.values[source].needs
        place = self.places.get(tensor, self.place)
        key = (meta.shape, meta.dtype, meta.grad, layout, needs, extents, place.cuts)
        if key not in self.bound:
            self.bound[key] = self._bound(meta, layout, needs, extents, meta.grad, place)
        route, forward, backward = self.bound[key]
        result = self._value(tensor, needs, extents)
        if all(step.is_view for step in route.forward):
            local = replace(self.values[result].local, strides=self.values[source].local.strides)
            self.values[result] = replace(self.values[result], local=local)
        parameter = self.graph.parameter_of.get(tensor)
        reads = parameter is not None and source == self.rest[tensor]
        ahead = first_gather(step.kind for step in route.forward) if reads else None
        again = ahead is not None and self.training and tensor in self.strategy.regathered
        where = parameter.paths[0] if parameter is not None else module
        operator = len(self.begins) - 1
        self.nodes.append(LayoutChange(route, forward, backward, source, result, where, reads, ahead, again, operator))
        return result

    def _bound(
        self,
        meta: Tensor,
        layout: tuple[Need, ...],
        needs: tuple[Need, ...],
        extents: Extents,
        grad: bool,
        place: Place,
    ) -> tuple[Route, tuple[BoundStep, ...], tuple[BoundStep, ...]]:
        """The route between two layouts with this rank's numbers, proved to lead there and back."""
        route = self.decisions.route(meta.shape, meta.dtype, layout, needs, grad)  # type: ignore[arg-type]  # a layout
        if route is None:
            raise LoweringError(
                f"tensor {meta.name!r} of shape {meta.shape} cannot go from {layout} to {needs}.", "Split otherwise."
            )
        forward, reached = bind(route.forward, layout, meta.shape, place, dict(extents))
        backward, returned = bind(route.backward, dual(needs), meta.shape, place, dict(extents))
        if reached != needs or (grad and returned != dual(layout)):
            raise LoweringError(
                f"the change of {meta.name!r} from {layout} to {needs} ends in {reached}, its gradient in {returned}.",
                "This is a defect of the plan; make it again.",
            )
        return route, forward, backward

    def _result(self, tensor: str) -> ResultValue:
        """An output: partial sums are completed; where every rank holds it, each contributes its share of the gradient."""
        home = self._at_home(tensor, "")
        layout: Layout = self.values[home].needs  # type: ignore[assignment]  # windows are for readers
        shares, whole = replicas(layout, self.place.sizes), completed(layout)
        if whole == layout:
            return ResultValue(home, shares)
        route, forward, _ = self._bound(self.graph.tensors[tensor], layout, whole, (), True, self.place)
        result = self._value(tensor, whole)
        producer = self.graph.producer.get(tensor)
        where = producer.module if producer else ""
        # The gradient, the same on every rank, is that of the unreduced sum already: nothing is sent back.
        self.nodes.append(
            LayoutChange(Route(route.forward, ()), forward, (), home, result, where, operator=len(self.begins) - 1)
        )
        return ResultValue(result, shares)
