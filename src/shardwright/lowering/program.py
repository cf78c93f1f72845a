"""The program of one rank: reads, changes of layout and local operators, in execution order.

``lower`` walks the graph once. Every tensor is brought from the layout its producer leaves it in (or it rests in) to its
``kept`` layout, if it has one, and from there to what each reader needs; equal needs share one change. Changes are the
steps that ``costs.redistribute`` priced, so predicted and performed communication agree by construction. The program
holds no process groups: mesh axes stand for them by name until :mod:`shardwright.lowering.emit` makes a module of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Union

from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright._torch_compat import takes_device
from shardwright.cluster import Mesh
from shardwright.costs import bundles
from shardwright.costs.redistribute import conversion
from shardwright.errors import LoweringError, ShardwrightError
from shardwright.graph import Atom, Graph, Op, Ref, Value
from shardwright.lowering.bind import Place, bind, dual
from shardwright.lowering.collectives import BoundStep
from shardwright.operators import analyse, piece
from shardwright.operators.rules import (
    Layout,
    Need,
    OpRules,
    Split,
    Window,
    doubly_windowed,
    input_layouts,
    local_shape,
    nested_chunk,
    output_layouts,
)
from shardwright.operators.strategy import Strategy


@dataclass(frozen=True)
class Read:
    """A source in its resting layout."""

    result: str
    tensor: str
    layout: Layout


@dataclass(frozen=True)
class Change:
    """A value in another layout. ``source`` and ``result`` are values, ``tensor`` is what they are layouts of."""

    result: str
    source: str
    tensor: str
    layout: tuple[Need, ...]
    forward: tuple[BoundStep, ...]
    backward: tuple[BoundStep, ...]


@dataclass(frozen=True)
class Compute:
    """One local operator: the rewritten ``op``, or a ``kernel`` in its place. ``inputs`` are values in ``Op.inputs`` order.

    ``lines`` tells, for each cut loop, the mesh axes that cut it.
    """

    op: Op
    inputs: tuple[str, ...]
    needs: tuple[tuple[Need, ...], ...]
    outputs: tuple[str | None, ...]
    layouts: tuple[Layout, ...]
    split: Split
    lines: Mapping[str, tuple[int, ...]]
    kind: str
    kernel: Callable[..., Any] | None = None


Instruction = Union[Read, Change, Compute]


@dataclass(frozen=True)
class Result:
    """One flattened output: a value to hand out in ``layout``; ``shares`` divides its gradient (see :mod:`emit`)."""

    value: str
    tensor: str
    layout: Layout
    shares: int


@dataclass(frozen=True)
class Program:
    """What one rank runs. ``results`` follow ``Graph.outputs``; ``mutations`` pair a buffer with the value to store."""

    graph: Graph
    strategy: Strategy
    mesh: Mesh
    place: Place
    instructions: tuple[Instruction, ...]
    results: tuple[Result | Any, ...]
    mutations: tuple[tuple[str, str], ...]

    def local_shape(self, tensor: str, layout: Layout) -> tuple[int, ...]:
        """Shape of this rank's shard of a tensor."""
        return local_shape(self.graph.tensors[tensor].shape, layout, self.place.sizes, self.place.coordinate)


def lower(graph: Graph, strategy: Strategy, mesh: Mesh, coordinate: tuple[int, ...], device: str = "cpu") -> Program:
    """The program of the rank at ``coordinate``, whose operators create tensors on this kind of device.

    Raises
    ------
    LoweringError
        When the strategy cannot be run; the message names the operator and where in the model it stands.
    """
    if strategy.axes != mesh.names:
        raise LoweringError(
            f"the strategy is for a mesh {dict(strategy.axes)}, not for {dict(mesh.names)}.",
            "Make a plan for this cluster.",
        )
    return _Lowering(graph, strategy, mesh, Place(strategy.axes, tuple(coordinate)), device).program()


class _Lowering:
    """The walk's state: instructions so far and the values that exist already."""

    def __init__(self, graph: Graph, strategy: Strategy, mesh: Mesh, place: Place, device: str) -> None:
        self.graph, self.strategy, self.mesh, self.place = graph, strategy, mesh, place
        self.device = Atom("device", device)
        self.instructions: list[Instruction] = []
        self.home: dict[str, tuple[str, Layout]] = {}
        self.changed: dict[tuple[str, tuple[Need, ...], tuple[tuple[int, int], ...]], str] = {}

    def program(self) -> Program:
        for name in self.graph.sources:
            if name not in self.strategy.resting:
                raise LoweringError(f"the strategy has no resting layout for {name!r}.", "Make the plan again.")
        for op in self.graph.ops:
            try:
                self._operator(op)
            except ShardwrightError as error:
                raise LoweringError(f"{describe(op)}: {error.message}", error.remedy) from error
        results = tuple(self._result(value.name) if isinstance(value, Ref) else value for value in self.graph.outputs)
        mutations = tuple((name, self._value(new, self.strategy.resting[name])) for name, new in self.graph.mutations)
        return Program(self.graph, self.strategy, self.mesh, self.place, tuple(self.instructions), results, mutations)

    def _operator(self, op: Op) -> None:
        split = self.strategy.splits.get(op.name)
        if split is None:
            raise LoweringError("the strategy has no split for it.", "Make the plan again for this model.")
        rules = analyse(op, self.graph.tensors)
        ranges, lines = self._ranges(rules, split)
        needs = input_layouts(rules, split, len(op.inputs))
        extents = {axis: rules.by_name[loop].extent for axis, loop in enumerate(split) if loop is not None}
        inputs = tuple(
            self._value(name, need, _window_extents(need, extents)) for name, need in zip(op.inputs, needs, strict=True)
        )
        placed = self._placed(op)
        made = piece(placed, self.graph.tensors, ranges)
        layouts = output_layouts(rules, split, len(op.outputs))
        self.instructions.append(
            Compute(
                op=made.op if made.op is not None else placed,
                inputs=inputs,
                needs=tuple(needs),
                outputs=op.outputs,
                layouts=tuple(layouts),
                split=split,
                lines=lines,
                kind=rules.kind,
                kernel=made.kernel,
            )
        )
        for name, layout in zip(op.outputs, layouts, strict=True):
            if name is not None:
                self.home[name] = (name, layout)

    def _placed(self, op: Op) -> Op:
        """The operator with this rank's device wherever it names one or could: the model was captured on another."""

        def here(value: Value) -> Value:
            if isinstance(value, Atom) and value.kind == "device":
                return self.device
            return tuple(here(item) for item in value) if isinstance(value, tuple) else value

        kwargs = {key: here(value) for key, value in op.kwargs}
        if takes_device(op.target):
            kwargs["device"] = self.device
        return replace(op, args=tuple(here(value) for value in op.args), kwargs=tuple(kwargs.items()))

    def _ranges(self, rules: OpRules, split: Split) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]:
        """This rank's piece of every cut loop, and the axes that cut it."""
        if len(split) != len(self.place.axes):
            raise LoweringError(f"its split {split} does not name one loop per mesh axis.", "Make the plan again.")
        lines: dict[str, tuple[int, ...]] = {}
        for axis, name in enumerate(split):
            if name is not None:
                if name not in rules.by_name:
                    known = ", ".join(rules.by_name) or "none"
                    raise LoweringError(f"it has no loop {name!r} (it has {known}).", "Make the plan again.")
                lines[name] = (*lines.get(name, ()), axis)
        if (double := doubly_windowed(rules, split)) is not None:
            raise LoweringError(
                f"loop {double!r} reads windows of a dim that another mesh axis cuts too.", "Split that dim once."
            )
        ranges = {}
        for name, axes in lines.items():
            rule = rules.by_name[name]
            pieces = 1
            for axis in axes:
                pieces *= self.place.sizes[axis]
            if not rule.allows(pieces):
                raise LoweringError(
                    f"loop {name!r} of extent {rule.extent} cannot be cut into {pieces} pieces.",
                    "Choose another split, or sizes that divide.",
                )
            if rule.divides:
                cuts = [(self.place.sizes[axis], self.place.coordinate[axis]) for axis in axes]
                ranges[name] = nested_chunk(rule.extent, cuts)
        return ranges, lines

    def _at_home(self, tensor: str) -> tuple[str, Layout]:
        """The value every reader of a tensor starts from, made on first use."""
        if tensor not in self.home:
            resting = self.strategy.resting[tensor]
            self.instructions.append(Read(tensor, tensor, resting))
            self.home[tensor] = (tensor, resting)
        kept = self.strategy.kept.get(tensor)
        value, layout = self.home[tensor]
        if kept is not None and layout != kept:
            result = self._change(tensor, value, layout, kept, {})
            self.home[tensor] = (result, kept)
        return self.home[tensor]

    def _value(self, tensor: str, needs: tuple[Need, ...], extents: tuple[tuple[int, int], ...] = ()) -> str:
        """The value of a tensor in the layout a reader needs."""
        value, layout = self._at_home(tensor)
        if layout == needs:
            return value
        key = (tensor, needs, extents)
        if key not in self.changed:
            self.changed[key] = self._change(tensor, value, layout, needs, dict(extents))
        return self.changed[key]

    def _change(
        self, tensor: str, value: str, layout: Layout, needs: tuple[Need, ...], extents: Mapping[int, int]
    ) -> str:
        meta = self.graph.tensors[tensor]
        steps = conversion(meta.shape, meta.dtype, layout, needs, self.mesh, meta.grad)
        if not steps.possible:
            raise LoweringError(
                f"tensor {tensor!r} {meta.shape} cannot go from {layout} to {needs}.", "Split otherwise."
            )
        forward, reached = bind(steps.forward, layout, meta.shape, self.place, extents)
        backward, returned = bind(steps.backward, dual(needs), meta.shape, self.place, extents)
        if reached != needs or (meta.grad and returned != dual(layout)):
            raise LoweringError(
                f"the change of {tensor!r} from {layout} to {needs} ends in {reached}, its gradient in {returned}.",
                "This is a defect of the plan; make it again.",
            )
        result = f"{tensor}__{_suffix(needs)}"
        while any(getattr(made, "result", None) == result for made in self.instructions):
            result += "_"
        self.instructions.append(Change(result, value, tensor, needs, forward, backward))
        return result

    def _result(self, tensor: str) -> Result:
        """An output: partial sums are completed; where every rank holds it, each contributes its share of the gradient."""
        value, layout = self._at_home(tensor)
        shares = 1
        for size, placement in zip(self.place.sizes, layout, strict=True):
            shares *= size if isinstance(placement, Replicate) else 1
        whole = tuple(Replicate() if isinstance(placement, Partial) else placement for placement in layout)
        if whole != layout:
            meta = self.graph.tensors[tensor]
            steps = conversion(meta.shape, meta.dtype, layout, whole, self.mesh)
            forward, _ = bind(steps.forward, layout, meta.shape, self.place)
            result = f"{tensor}__result"
            self.instructions.append(Change(result, value, tensor, whole, forward, ()))
            value = result
        return Result(value, tensor, whole, shares)


def parameter_reads(program: Program) -> list[tuple[Change, bundles.Read]]:
    """The changes of layout that start from a parameter at rest, in order, and what they are to the bundles."""
    found, operator = [], 0
    for made in program.instructions:
        if isinstance(made, Compute):
            operator += 1
        elif isinstance(made, Change) and made.source in program.graph.parameter_of:
            meta, resting = program.graph.tensors[made.tensor], program.strategy.resting[made.tensor]
            steps = conversion(meta.shape, meta.dtype, resting, made.layout, program.mesh, meta.grad)
            found.append((made, bundles.Read(made.tensor, operator, steps)))
    return found


def parameter_reduction(program: Program, tensor: str) -> tuple[BoundStep, ...]:
    """The cheapest steps that bring a parameter's gradient from the dual of its resting layout into that layout."""
    meta, resting = program.graph.tensors[tensor], program.strategy.resting[tensor]
    steps = conversion(meta.shape, meta.dtype, dual(resting), resting, program.mesh, grad=False).forward
    return bind(steps, dual(resting), meta.shape, program.place)[0]


def describe(op: Op) -> str:
    """``linear_3 (aten.linear.default) at blocks.0.attention, model.py:42`` as far as it is known."""
    where = ", ".join(part for part in (op.module, op.source) if part)
    return f"operator {op.name} ({op.target})" + (f" at {where}" if where else "")


def _window_extents(needs: tuple[Need, ...], extents: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Extents of the loops whose windows a reader needs, by mesh axis."""
    return tuple((axis, extents[axis]) for axis, need in enumerate(needs) if isinstance(need, Window))


def _suffix(needs: tuple[Need, ...]) -> str:
    """A readable name for a layout: ``s0_r`` is ``(Shard(0), Replicate())``."""
    words = []
    for need in needs:
        if isinstance(need, Window):
            words.append(f"w{need.dim}")
        else:
            words.append(f"s{need.dim}" if isinstance(need, Shard) else "r" if isinstance(need, Replicate) else "p")
    return "_".join(words)
