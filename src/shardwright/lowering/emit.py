"""From a rank's program to an FX ``GraphModule`` of plain local tensors.

The module takes one local tensor per source (parameters, buffers, constants, inputs, in ``Graph.sources`` order) and
gives the results followed by the new values of changed buffers. Gradients follow the dual rule: a parameter's gradient
leaves the module reduced into the parameter's own layout, and a result that ``n`` ranks hold alike receives the same
gradient on each of them, so each takes an ``n``-th. A runtime that overlaps communication with work replaces the reads
of parameters by its own (``readers``); without that everything is inline and compiles whole.
"""

from __future__ import annotations

import functools
import operator as python_operator
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from shardwright._torch_compat import operator, returns_list, schema
from shardwright.graph import Atom, Op, Ref
from shardwright.lowering.collectives import BoundStep, Line, convert, exchange, scale_gradient
from shardwright.lowering.program import Change, Compute, Program, Read, Result, parameter_reduction
from shardwright.lowering.randomness import Drawn, Dropout, draws

# A local shard may be laid out in memory otherwise than the whole tensor was, where only a reshape is sure to work.
_AS_RESHAPE = {"aten.view.default", "aten._unsafe_view.default"}


class Kernel(torch.nn.Module):
    """A local operator that exchanges statistics with the other pieces of its loops."""

    def __init__(self, kernel: Callable[..., Any], lines: Mapping[str, tuple[Line, ...]]) -> None:
        super().__init__()
        self.kernel = kernel
        self.lines = dict(lines)

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.kernel(*tensors, exchange=self._exchange)

    def _exchange(self, tensor: torch.Tensor, reduce: str, loop: str) -> torch.Tensor:
        return exchange(tensor, reduce, self.lines[loop])


class Converter(torch.nn.Module):
    """A change of layout."""

    def __init__(self, forward: tuple[BoundStep, ...], backward: tuple[BoundStep, ...]) -> None:
        super().__init__()
        self.steps, self.back = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return convert(x, self.steps, self.back)

    def extra_repr(self) -> str:
        return " ".join(step.kind for step in self.steps)


class _Recording(fx.Graph):
    """A graph that remembers which nodes were made since one last looked."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[fx.Node] = []

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.made.append(node)
        return node


class Emitter:
    """Writes the nodes of one program; ``groups`` gives the process group of every mesh axis."""

    def __init__(
        self,
        program: Program,
        groups: Mapping[str, str],
        device: torch.device,
        readers: Mapping[str, torch.nn.Module] | None = None,
    ) -> None:
        self.program, self.groups, self.device = program, groups, device
        self.readers = readers
        self.graph = _Recording()
        self.root = torch.nn.Module()
        self.values: dict[str, fx.Node] = {}
        self.sources = {name: self.graph.placeholder(name) for name in program.graph.sources}

    def module(self) -> fx.GraphModule:
        made = self.graph.made
        for instruction in self.program.instructions:
            if isinstance(instruction, Compute):
                self._compute(instruction)
            elif isinstance(instruction, Change):
                self._change(instruction)
            else:
                self._read(instruction)
            if isinstance(instruction, Compute):  # reads and changes belong to the operator that they serve
                for node in made:
                    node.meta["path"] = instruction.op.module
                made.clear()
        results = [self._result(result) for result in self.program.results]
        self.graph.output((tuple(results), tuple(self.values[new] for _, new in self.program.mutations)))
        module = fx.GraphModule(self.root, self.graph, class_name="RankProgram")
        module.graph.lint()
        return module

    def _bound(self, steps: tuple[BoundStep, ...]) -> tuple[BoundStep, ...]:
        """Steps with the process groups in place of the axes' names."""
        return tuple(step._replace(line=self._line(step.line)) for step in steps)

    def _line(self, line: Line) -> Line:
        return line._replace(group=self.groups[line.group])

    def _submodule(self, name: str, module: torch.nn.Module) -> str:
        name = name.replace(".", "_")  # results of one operator are called ``chunk.0``, ``chunk.1``
        while name in self.root._modules:
            name += "_"
        self.root.add_module(name, module)
        return name

    def _read(self, read: Read) -> None:
        node = self.sources[read.tensor]
        parameter = self.program.graph.parameter_of.get(read.tensor)
        if self.readers is not None and parameter is not None:
            node = self._fetch(read.result, read.tensor) if read.result in self.readers else node
        elif parameter is not None and parameter.trainable:
            backward = parameter_reduction(self.program, read.tensor)
            node = self._converted(f"reduce_{read.result}", node, (), backward) if backward else node
        self.values[read.result] = node

    def _fetch(self, value: str, tensor: str) -> fx.Node:
        assert self.readers is not None
        name = self._submodule(f"read_{value}", self.readers[value])
        return self.graph.call_module(name, (self.sources[tensor],))

    def _change(self, change: Change) -> None:
        if self.readers is not None and change.result in self.readers:
            self.values[change.result] = self._fetch(change.result, change.tensor)
            return
        source = self.values[change.source]
        self.values[change.result] = self._converted(f"to_{change.result}", source, change.forward, change.backward)

    def _converted(
        self, name: str, node: fx.Node, forward: tuple[BoundStep, ...], backward: tuple[BoundStep, ...]
    ) -> fx.Node:
        module = Converter(self._bound(forward), self._bound(backward))
        return self.graph.call_module(self._submodule(name, module), (node,))

    def _compute(self, compute: Compute) -> None:
        op = compute.op
        inputs = [self.values[name] for name in compute.inputs]
        place = self._random_place(compute)
        if place is not None and op.target in ("aten.dropout.default", "aten.native_dropout.default"):
            several = op.target == "aten.native_dropout.default"
            assert isinstance(op.args[1], float)
            drop = Dropout(op.args[1], place, mask=several)
            node = self.graph.call_module(self._submodule(f"drop_{op.name}", drop), (inputs[0],))
        elif compute.kernel is not None:
            lines = {
                loop: tuple(self._line(self.program.place.line(axis)) for axis in axes)
                for loop, axes in compute.lines.items()
            }
            kernel: torch.nn.Module = Kernel(compute.kernel, lines)
            kernel = kernel if place is None else Drawn(kernel, place, self.device)
            node = self.graph.call_module(self._submodule(f"kernel_{op.name}", kernel), tuple(inputs))
            several = len(op.outputs) > 1
        else:
            node = self._call(op, inputs, place)
            several = len(op.outputs) > 1 or returns_list(op.target)
        for index, name_or_none in enumerate(op.outputs):
            if name_or_none is None:
                continue
            part = self.graph.call_function(python_operator.getitem, (node, index)) if several else node
            if not op.grad:
                part = self.graph.call_function(torch.ops.aten.detach.default, (part,))
            self.values[name_or_none] = part

    def _random_place(self, compute: Compute) -> int | None:
        """For a random operator that is cut, which of its pieces this rank computes."""
        if not draws(compute.op, compute.kind):
            return None
        here = self.program.place
        axes = [axis for axis, loop in enumerate(compute.split) if loop not in (None, "+")]
        place = 0
        for axis in axes:
            place = place * here.sizes[axis] + here.coordinate[axis]
        return place if axes else None

    def _call(self, op: Op, inputs: list[fx.Node], place: int | None = None) -> fx.Node:
        """Inputs replace the references one by one, because one tensor may be read in two layouts."""
        target = operator("aten.reshape.default" if op.target in _AS_RESHAPE else op.target)
        nodes = iter(inputs)
        args = tuple(self._argument(value, nodes) for value in op.args)
        kwargs = {key: self._argument(value, nodes) for key, value in op.kwargs}
        if not inputs and any(argument.name == "device" for argument in schema(op.target).arguments):
            kwargs["device"] = self.device  # graphs do not say where a tensor is made
        if place is not None:
            drawn = Drawn(target, place, self.device)
            return self.graph.call_module(self._submodule(f"drawn_{op.name}", drawn), args, kwargs)
        return self.graph.call_function(target, args, kwargs)

    def _argument(self, value: Any, nodes: Iterator[fx.Node]) -> Any:
        if isinstance(value, Ref):
            return next(nodes)
        if isinstance(value, tuple):
            return [self._argument(item, nodes) for item in value]
        if isinstance(value, Atom):
            return self._atom(value)
        return value

    def _atom(self, atom: Atom) -> Any:
        if atom.kind == "device":
            return self.device
        if atom.kind == "complex":
            return complex(atom.value)
        return getattr(torch, atom.value)

    def _result(self, result: Any) -> Any:
        if not isinstance(result, Result):
            return result
        node = self.values[result.value]
        if result.shares > 1:
            node = self.graph.call_function(scale_gradient, (node, 1.0 / result.shares))
        return node


def emit(
    program: Program,
    groups: Mapping[str, str],
    device: torch.device | str = "cpu",
    readers: Mapping[str, torch.nn.Module] | None = None,
) -> fx.GraphModule:
    """The program as a module of local tensors: ``module(*sources) -> (results, new buffer values)``."""
    return Emitter(program, groups, torch.device(device), readers).module()


def direct(module: fx.GraphModule) -> Callable[..., Any]:
    """The same program as one plain function, which calls its parts without the machinery of ``nn.Module``."""
    code = module.graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    parts = {name: direct(part) if isinstance(part, fx.GraphModule) else part.forward for name, part in _parts(module)}
    return functools.partial(scope["forward"], SimpleNamespace(**parts))


def _parts(module: fx.GraphModule) -> Iterator[tuple[str, torch.nn.Module]]:
    """Submodules by name, also where two names are one module."""
    return ((name, part) for name, part in module._modules.items() if part is not None)
