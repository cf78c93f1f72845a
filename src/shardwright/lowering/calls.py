"""The function that computes one rank's piece of an operator: local tensors in, a tuple of its results out.

Most are the operator itself with its constant arguments filled in; pieces that exchange statistics call a kernel with the
process groups of their loops; random operators that are cut draw from a generator seeded for their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright._torch_compat import operator, returns_list, schema
from shardwright.graph import Atom, Op, Ref
from shardwright.lowering.collectives import exchange
from shardwright.lowering.randomness import Drawn, Dropout
from shardwright.program.dataflow import Compute, Dataflow
from shardwright.program.recording import draws
from shardwright.program.steps import Line

# A local shard may be laid out in memory otherwise than the whole tensor was, where only a reshape is sure to work.
_AS_RESHAPE = {"aten.view.default", "aten._unsafe_view.default"}

Call = Callable[..., tuple[Any, ...]]


def local_call(node: Compute, flow: Dataflow, lines: Callable[[Line], Line], device: torch.device) -> Call:
    """The function for a node; ``lines`` puts process groups in place of the axes' names."""
    function, several = _function(node, flow, lines, device)
    count = len(node.op.outputs)

    def call(*tensors: torch.Tensor) -> tuple[Any, ...]:
        made = function(*tensors)
        return tuple(made)[:count] if several else (made,)

    return call


def _function(
    node: Compute, flow: Dataflow, lines: Callable[[Line], Line], device: torch.device
) -> tuple[Callable[..., Any], bool]:
    op, place = node.local, _random_place(node, flow)
    if place is not None and op.target in ("aten.dropout.default", "aten.native_dropout.default"):
        several = op.target == "aten.native_dropout.default"
        assert isinstance(op.args[1], float)
        return Dropout(op.args[1], place, mask=several), several
    if node.kernel is not None:
        bound = {loop: tuple(lines(flow.place.line(axis)) for axis in axes) for loop, axes in node.lines.items()}
        kernel: Callable[..., Any] = _Kernel(node.kernel, bound)
        return (kernel if place is None else Drawn(kernel, place, device)), len(op.outputs) > 1
    function = _filled(op, device)
    several = len(op.outputs) > 1 or returns_list(op.target)
    return (function if place is None else Drawn(function, place, device)), several


class _Kernel:
    """A local operator that exchanges statistics with the other pieces of its loops."""

    def __init__(self, kernel: Callable[..., Any], lines: Mapping[str, tuple[Line, ...]]) -> None:
        self.kernel, self.lines = kernel, dict(lines)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.kernel(*tensors, exchange=self._exchange)

    def _exchange(self, tensor: torch.Tensor, reduce: str, loop: str) -> torch.Tensor:
        return exchange(tensor, reduce, self.lines[loop])


def _random_place(node: Compute, flow: Dataflow) -> int | None:
    """For a random operator that is cut, which of its pieces this rank computes."""
    if not draws(node.local, node.rules.kind):
        return None
    axes = [axis for axis, loop in enumerate(node.split) if loop not in (None, "+")]
    place = 0
    for axis in axes:
        place = place * flow.place.sizes[axis] + flow.place.coordinate[axis]
    return place if axes else None


def _filled(op: Op, device: torch.device) -> Callable[..., Any]:
    """The operator as a function of its tensors alone, which replace the references one by one: one tensor may be read in
    two layouts. Written as source, because this is called thousands of times in a step."""
    target = operator("aten.reshape.default" if op.target in _AS_RESHAPE else op.target)
    scope: dict[str, Any] = {"target": target}
    names: list[str] = []

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            names.append(f"x{len(names)}")
            return names[-1]
        if isinstance(value, tuple):
            return f"[{', '.join(text(item) for item in value)}]"
        scope[f"c{len(scope)}"] = _atom(value, device) if isinstance(value, Atom) else value
        return f"c{len(scope) - 1}"

    arguments = [text(value) for value in op.args]
    kwargs = {key: text(value) for key, value in op.kwargs}
    if not names and any(argument.name == "device" for argument in schema(op.target).arguments):
        scope["here"], kwargs["device"] = device, "here"  # graphs do not say where a tensor is made
    arguments += [f"{key}={value}" for key, value in kwargs.items()]
    source = f"lambda {', '.join(names)}: target({', '.join(arguments)})"
    return eval(source, scope)


def _atom(atom: Atom, device: torch.device) -> Any:
    if atom.kind == "device":
        return device
    if atom.kind == "complex":
        return complex(atom.value)
    return getattr(torch, atom.value)
