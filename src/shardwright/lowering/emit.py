"""From what a rank computes to an FX ``GraphModule`` of plain local tensors, for ``torch.compile`` to take whole.

The module takes one local tensor per source (parameters, buffers, constants, inputs, in ``Graph.sources`` order) and
gives the results followed by the new values of changed buffers. Autograd goes through it. Gradients follow the dual rule: a
parameter's gradient leaves the module reduced into the parameter's own layout, and a result that ``n`` ranks hold alike
receives the same gradient on each of them, so each takes an ``n``-th. Everything is inline; the compiler schedules it.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from shardwright.errors import LoweringError
from shardwright.lowering.calls import local_call
from shardwright.lowering.collectives import convert, scale_gradient
from shardwright.program.binding import bind, dual
from shardwright.program.dataflow import Compute, Dataflow, LayoutChange, ResultValue
from shardwright.program.decisions import Decisions
from shardwright.program.steps import BoundStep, Line


class Local(torch.nn.Module):
    """A local operator."""

    def __init__(self, call: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        return self.call(*tensors)


class Converter(torch.nn.Module):
    """A change of layout."""

    def __init__(self, forward: tuple[BoundStep, ...], backward: tuple[BoundStep, ...]) -> None:
        super().__init__()
        self.steps, self.back = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return convert(x, self.steps, self.back)

    def extra_repr(self) -> str:
        return " ".join(step.kind for step in self.steps)


def emit(
    flow: Dataflow, decisions: Decisions, lines: Callable[[Line], Line], device: torch.device | str = "cpu"
) -> fx.GraphModule:
    """A rank's forward pass as a module: ``module(*sources) -> (results, new buffer values)``.

    ``lines`` puts process groups in place of the axes' names.
    """
    module = _Emitter(flow, decisions, lines, torch.device(device)).module()
    return with_recomputation(module, flow.strategy.recomputed if flow.training else ())


class _Emitter:
    def __init__(
        self, flow: Dataflow, decisions: Decisions, lines: Callable[[Line], Line], device: torch.device
    ) -> None:
        self.flow, self.decisions, self.lines, self.device = flow, decisions, lines, device
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.values: dict[int, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        flow = self.flow
        # Numbers, not the graph's names, which may come from a file: the name of a placeholder becomes source text.
        sources = {name: self.graph.placeholder(f"source_{i}") for i, name in enumerate(flow.graph.sources)}
        for name, node in sources.items():
            self.values[flow.rest[name]] = self._reduced(name, node)
        begun: list[fx.Node] = []
        for number, made in enumerate(flow.nodes):
            before = len(self.graph.nodes)
            if isinstance(made, Compute):
                self._compute(number, made)
            else:
                self._change(number, made)
            begun += list(self.graph.nodes)[before:]
            if isinstance(made, Compute):  # changes belong to the operator that they serve
                for node in begun:
                    node.meta["path"] = made.op.module
                begun = []
        results = tuple(self._result(output) for output in flow.outputs)
        self.graph.output((results, tuple(self.values[new] for _, new in flow.mutations)))
        module = fx.GraphModule(self.root, self.graph, class_name="RankProgram")
        module.graph.lint()
        return module

    def _submodule(self, name: str, module: torch.nn.Module) -> str:
        self.root.add_module(name, module)
        return name

    def _converted(self, name: str, node: fx.Node, forward: Any, backward: Any) -> fx.Node:
        steps = [tuple(s._replace(line=self.lines(s.line)) for s in part) for part in (forward, backward)]
        return self.graph.call_module(self._submodule(name, Converter(*steps)), (node,))

    def _reduced(self, tensor: str, node: fx.Node) -> fx.Node:
        """A parameter, whose gradient is brought from the dual of its resting layout into that layout."""
        flow, resting = self.flow, self.flow.strategy.resting[tensor]
        parameter = flow.graph.parameter_of.get(tensor)
        if parameter is None or not parameter.trainable or dual(resting) == resting:
            return node
        meta = flow.graph.tensors[tensor]
        route = self.decisions.route(meta.shape, meta.dtype, dual(resting), resting, False)  # type: ignore[arg-type]
        assert route is not None  # sums can always be completed
        steps = bind(route.forward, dual(resting), meta.shape, flow.place)[0]
        return self._converted(f"reduce_{flow.rest[tensor]}", node, (), steps)

    def _change(self, number: int, change: LayoutChange) -> None:
        source = self.values[change.source]
        self.values[change.result] = self._converted(f"change_{number}", source, change.forward, change.backward)

    def _compute(self, number: int, node: Compute) -> None:
        call = local_call(node, self.flow, self.lines, self.device)
        inputs = tuple(self.values[value] for value in node.inputs)
        made = self.graph.call_module(self._submodule(f"compute_{number}", Local(call)), inputs)
        for place, value in enumerate(node.outputs):
            if value is None:
                continue
            part = self.graph.call_function(python_operator.getitem, (made, place))
            if not node.op.grad:
                part = self.graph.call_function(torch.ops.aten.detach.default, (part,))
            self.values[value] = part

    def _result(self, output: ResultValue | Any) -> Any:
        if not isinstance(output, ResultValue):
            return output
        node = self.values[output.value]
        return self.graph.call_function(scale_gradient, (node, 1.0 / output.shares)) if output.shares > 1 else node


class Recomputed(torch.nn.Module):
    """A part of a program that keeps only its inputs for backward."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.part(*inputs)
        return checkpoint(self.part, *inputs, use_reentrant=False)


def with_recomputation(module: fx.GraphModule, blocks: Sequence[str]) -> fx.GraphModule:
    """The same program with these blocks recomputed in the backward pass (Chen et al., 2016).

    A block is named by its module path (``blocks.3``); everything between its first and its last operator runs under
    ``torch.utils.checkpoint``, and collectives inside run again with it. Nodes carry the path they came from in
    ``meta["path"]``.
    """
    if not blocks:
        return module
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    spans: list[tuple[int, int, str]] = []
    for block in blocks:
        inside = [i for i, node in enumerate(nodes) if _within(node.meta.get("path", ""), block)]
        if not inside:
            raise LoweringError(
                f"there is no block {block!r} to recompute.", "Name modules as in model.named_modules()."
            )
        spans.append((inside[0], inside[-1], block))
    spans.sort()
    part: dict[str, int] = {}
    recomputed: set[int] = set()
    number, span = 0, 0
    for i, node in enumerate(nodes):
        while span < len(spans) and i > spans[span][1]:
            span, number = span + 1, number + 1
        if span < len(spans) and spans[span][0] <= i <= spans[span][1]:
            if i == spans[span][0]:
                number += 1
            recomputed.add(number)
        part[node.name] = number
    whole = split_module(module, module, lambda node: part[node.name], keep_original_order=True)
    for number in recomputed:
        name = f"submod_{number}"
        setattr(whole, name, Recomputed(whole.get_submodule(name)))
    return whole


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")
