"""The function that computes one rank's piece of an operator: local tensors in, a tuple of its results out.

Most are the operator itself with its constant arguments filled in; pieces that exchange statistics call a kernel with the
process groups of their loops; random operators that are cut draw from a generator seeded for their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright._torch_compat import operator, returns_list, schema
from shardwright.graph import Atom, Op, Ref
from shardwright.lowering.collectives import exchange
from shardwright.lowering.randomness import Drawn, Dropout
from shardwright.operators.record import RESHAPE, draws, record
from shardwright.program.dataflow import Compute, Dataflow
from shardwright.program.steps import Line

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
    how = record(op.target).draws
    if place is not None and how is not None and how.dropout:
        several = len(op.outputs) > 1
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
    two layouts. Graphs come from files: nothing of one becomes source text, names are looked up and values handed over."""
    target = operator(RESHAPE if record(op.target).reshapes else op.target)
    count = 0

    def filled(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Ref):
            count += 1
            return _Place(count - 1)
        if isinstance(value, tuple):
            return [filled(item) for item in value]
        return _atom(value, device) if isinstance(value, Atom) else value

    args = [filled(value) for value in op.args]
    kwargs = {key: filled(value) for key, value in op.kwargs}
    if not count and any(argument.name == "device" for argument in schema(op.target).arguments):
        kwargs["device"] = device  # graphs do not say where a tensor is made
    return _called(target, args, kwargs, count)


class _Place(int):
    """Where the tensor of this number goes among an operator's arguments."""


def _called(target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], count: int) -> Callable[..., Any]:
    """``target`` with these arguments as a function of the tensors. This is called thousands of times in a step: the usual
    cases (no list, or one list of all the tensors) need no loop."""
    if not kwargs and len(args) == count and all(type(value) is _Place for value in args):
        return target
    fixed = not any(map(_has_place, kwargs.values()))
    if fixed and len(args) > 1 and not any(isinstance(value, list) and _has_place(value) for value in args):
        constants = tuple(value for value in args if type(value) is not _Place)
        behind = itertools.count(count)  # where the constants stand behind the tensors
        order = [int(value) if type(value) is _Place else next(behind) for value in args]

        def ordered(*tensors: torch.Tensor) -> Any:
            every = tensors + constants
            return target(*[every[place] for place in order], **kwargs)

        return ordered
    if fixed and args and isinstance(args[0], list) and len(args[0]) == count and not any(map(_has_place, args[1:])):
        rest = args[1:]
        return lambda *tensors: target(tensors, *rest, **kwargs)

    def call(*tensors: torch.Tensor) -> Any:
        named = kwargs if fixed else {key: _put(value, tensors) for key, value in kwargs.items()}
        return target(*[_put(value, tensors) for value in args], **named)

    return call


def _has_place(value: Any) -> bool:
    return type(value) is _Place or (isinstance(value, list) and any(map(_has_place, value)))


def _put(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(value) is _Place:
        return tensors[value]
    return [_put(item, tensors) for item in value] if type(value) is list else value


def _atom(atom: Atom, device: torch.device) -> Any:
    if atom.kind == "device":
        return device
    if atom.kind == "complex":
        return complex(atom.value)
    return getattr(torch, atom.value)
