"""How one rank computes its piece of an operator.

Most pieces are the operator itself, called on local inputs. Operators that are told sizes (views, expands, creations) get
them rewritten; operators with windows, exchanges or positions have a kernel, registered with ``computes``: a closure over
plain integers that ``torch.compile`` can trace. Ranges are counted in the units of ``LoopRule.extent``: where a rule is
``even``, one unit is several points of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Union

from torch.distributed.tensor import Shard

from shardwright.errors import LoweringError
from shardwright.graph import Atom, Op, Ref, Tensor, Value, refs
from shardwright.graph.orders import ADDED_UP, GROUPED, HISTOGRAM, INDEX, PUT, SORTS
from shardwright.operators.binding import Bound, bind
from shardwright.operators.record import record
from shardwright.operators.rules import OWN, LoopRule, OpRules, Window

Ranges = Mapping[str, tuple[int, int]]
Kernel = Callable[..., Any]
"""``kernel(*tensor_inputs, exchange=...) -> tensor or tuple of tensors``; inputs in the order of ``Op.inputs``."""


@dataclass(frozen=True)
class Piece:
    """Either ``op`` (run it on the local tensors) or ``kernel`` (call it with them and with ``exchange``)."""

    op: Op | None = None
    kernel: Kernel | None = None


@dataclass(frozen=True)
class Span:
    """One rank's part ``[start, stop)`` of a dim of ``extent`` elements, along ``loop``."""

    loop: str
    start: int
    stop: int
    extent: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Call:
    """An operator about to be run in pieces: what kernels are built from."""

    op: Op
    tensors: Mapping[str, Tensor]
    rules: OpRules
    ranges: Ranges

    @cached_property
    def bound(self) -> Bound:
        return bind(self.op)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its schema name; tensors are references."""
        found = self.bound.values.get(name)
        return default if found is None else found

    def tensor(self, name: str) -> Tensor:
        """The (whole) tensor passed as argument ``name``."""
        reference = self.bound.values[name]
        assert isinstance(reference, Ref)
        return self.tensors[reference.name]

    @property
    def output(self) -> Tensor:
        """The first output, whole."""
        name = next(n for n in self.op.outputs if n is not None)
        return self.tensors[name]

    def position(self, name: str) -> int | None:
        """Place of a tensor argument among the inputs; ``None`` where it was not given."""
        wanted = self.bound.values.get(name)
        if not isinstance(wanted, Ref):
            return None
        count = 0
        for argument, value in zip(self.bound.names, self.op.args, strict=False):
            if argument == name:
                return count
            count += sum(1 for _ in refs(value))
        for key, value in self.op.kwargs:
            if key == name:
                return count
            count += sum(1 for _ in refs(value))
        return None

    def cut(self, *loops: str) -> list[str]:
        """Those of ``loops`` that are cut here."""
        return [loop for loop in loops if loop in self.ranges]

    def output_spans(self, output: int = 0) -> dict[int, Span]:
        """Per cut dim of an output, the part that is computed here."""
        spans = {}
        name = self.op.outputs[output]
        shape = self.tensors[name].shape if name is not None else self.output.shape
        for loop, (start, stop) in self.ranges.items():
            rule = self.rules.by_name[loop]
            placement = rule.outputs[output]
            if rule.divides and isinstance(placement, Shard):
                extent = shape[placement.dim]
                unit = extent // rule.extent if rule.even else 1
                spans[placement.dim] = Span(loop, start * unit, stop * unit, extent)
        return spans

    def input_spans(self, position: int) -> dict[int, Span]:
        """Per cut dim of an input, the part that is held here (windows: what was asked for, clipped)."""
        spans = {}
        shape = self.tensors[self.op.inputs[position]].shape
        for loop, (start, stop) in self.ranges.items():
            rule = self.rules.by_name[loop]
            need = rule.inputs[position]
            if isinstance(need, Window):
                first, last, _, _ = need.region(start, stop, shape[need.dim])
                spans[need.dim] = Span(loop, first, last, shape[need.dim])
            elif rule.divides and isinstance(need, Shard):
                extent = shape[need.dim]
                unit = extent // rule.extent if rule.even else 1
                spans[need.dim] = Span(loop, start * unit, stop * unit, extent)
        return spans

    def missing(self, position: int) -> dict[int, tuple[int, int]]:
        """Per windowed dim of an input, how many elements before and after the clipped region the piece must supply."""
        pads = {}
        shape = self.tensors[self.op.inputs[position]].shape
        for loop, (start, stop) in self.ranges.items():
            need = self.rules.by_name[loop].inputs[position]
            if isinstance(need, Window):
                _, _, before, after = need.region(start, stop, shape[need.dim])
                pads[need.dim] = (before, after)
        return pads

    def local_shape(self, output: int = 0) -> tuple[int, ...]:
        """Shape of the part of an output that is computed here."""
        name = self.op.outputs[output]
        assert name is not None
        shape = list(self.tensors[name].shape)
        for dim, span in self.output_spans(output).items():
            shape[dim] = span.size
        return tuple(shape)

    def rewritten(self, **changes: Value) -> Piece:
        """The same operator with some arguments changed."""
        args = list(self.op.args)
        kwargs = dict(self.op.kwargs)
        for name, value in changes.items():
            place = self.bound.names.index(name)
            if place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return Piece(op=replace(self.op, args=tuple(args), kwargs=tuple(kwargs.items())))

    def kernel(self, function: Callable[..., Any]) -> Piece:
        """A piece that calls ``function(exchange, **arguments)``: the operator's arguments by name, tensors filled in."""
        fill = self.filler()

        def kernel(*inputs: Any, exchange: Any = None) -> Any:
            return function(exchange, **fill(inputs))

        return Piece(kernel=kernel)

    def filler(self) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """A function from local input tensors to the operator's arguments by name."""
        count = 0

        def template(value: Value) -> Any:
            nonlocal count
            if isinstance(value, Ref):
                count += 1
                return _Slot(count - 1)
            if isinstance(value, Atom):
                return plain(value)
            if isinstance(value, tuple):
                return tuple(template(v) for v in value)
            return value

        positional = {name: template(v) for name, v in zip(self.bound.names, self.op.args, strict=False)}
        keyword = {name: template(v) for name, v in self.op.kwargs}
        templates = {
            name: positional[name] if name in positional else keyword.get(name, template(self.bound.values[name]))
            for name in self.bound.names
        }

        def fill(inputs: Sequence[Any]) -> dict[str, Any]:
            return {name: _fill(value, inputs) for name, value in templates.items()}

        return fill


@dataclass(frozen=True)
class _Slot:
    position: int


def _fill(value: Any, inputs: Sequence[Any]) -> Any:
    if isinstance(value, _Slot):
        return inputs[value.position]
    if isinstance(value, tuple):
        return [_fill(v, inputs) for v in value]
    return value


def plain(value: Union[Value, Any]) -> Any:
    """An argument as torch takes it: atoms become dtypes, devices, layouts and memory formats."""
    import torch

    if isinstance(value, Atom):
        if value.kind == "device":
            return torch.device(value.value)
        return getattr(torch, value.value)
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value


def build(call: Call) -> Piece:
    """The piece of a cut operator: that of its kernel, where one is registered and needed, else the operator itself."""
    for loop in call.ranges:
        if loop not in call.rules.by_name:
            known = ", ".join(call.rules.by_name) or "none"
            raise LoweringError(
                f"Operator {call.op.name} ({call.op.target}) has no loop {loop!r}.", f"Its loops are: {known}."
            )
    if OWN in call.ranges and call.op.target in (*SORTS, *GROUPED, INDEX, PUT, HISTOGRAM, ADDED_UP):
        # Such a piece is to itself what the whole is: its positions and counts are those of its own rows.
        call = replace(call, ranges={loop: part for loop, part in call.ranges.items() if loop != OWN})
        if call.op.target == PUT:
            return _as_many_as_there_are(call)
    maker = record(call.op.target).piece
    made = maker(call) if maker is not None and any(call.rules.by_name[n].divides for n in call.ranges) else None
    if made is None and maker is None and any(call.rules.by_name[n].windowed for n in call.ranges):
        made = _cropped(call)
    return made if made is not None else Piece(op=call.op)


def _as_many_as_there_are(call: Call) -> Piece:
    """Write positions to as many places as there are here: the first of all positions are those of the rows here."""
    from shardwright._torch_compat import operator

    function = operator(call.op.target)

    def kernel(exchange: Any, **arguments: Any) -> Any:
        places = arguments["indices"][0]
        return function(**(arguments | {"values": arguments["values"][: places.shape[0]]}))

    return call.kernel(kernel)


def croppable(rule: LoopRule, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a windowed loop can be run by the operator itself on the window: inputs and loop have the same extent."""
    windows = [(need, shape) for need, shape in zip(rule.inputs, shapes, strict=True) if isinstance(need, Window)]
    return all(w.scale == 1 and shape[w.dim] == rule.extent and w.low <= 0 <= w.high for w, shape in windows)


def _cropped(call: Call) -> Piece:
    """Run the operator on the window and keep what belongs to the piece.

    The description does not depend on positions, so results at least a halo away from the window's ends are those of the
    whole operator; at the tensor's own border the window ends there too, and the operator pads as it always does.
    """
    from shardwright._torch_compat import operator

    function = operator(call.op.target)
    offsets: dict[str, int] = {}
    for position in range(len(call.op.inputs)):
        for span in call.input_spans(position).values():
            rule = call.rules.by_name[span.loop]
            if isinstance(rule.inputs[position], Window):
                offsets[span.loop] = call.ranges[span.loop][0] - span.start
    crops = []
    for number, name in enumerate(call.op.outputs):
        spans = {} if name is None else call.output_spans(number)
        crops.append([(dim, offsets[s.loop], s.size) for dim, s in spans.items() if s.loop in offsets])

    def kernel(exchange: Any, **arguments: Any) -> Any:
        made = function(**arguments)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        for number, crop in enumerate(crops):
            for dim, start, size in crop:
                results[number] = results[number].narrow(dim, start, size)
        return tuple(results) if isinstance(made, (tuple, list)) else results[0]

    return call.kernel(kernel)
