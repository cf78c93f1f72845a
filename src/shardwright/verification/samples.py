"""Concrete calls of operators, on which their rules are checked: those that records say, those that schemas of element-wise
operators suggest (tensors of three broadcast shapes, small numbers), and those that users give."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardwright._torch_compat import operator, schema
from shardwright.graph import Atom, Op, Ref, Tensor, Value
from shardwright.operators.elementwise import comparable, is_elementwise
from shardwright.operators.record import record, records
from shardwright.operators.samples import Spec

EVEN = (12, 24, 12, 8, 24, 12)
UNEVEN = (7, 10, 9, 5, 11, 6)
CONTENTS = ("positive", "ints", "bools", "complex")
"""What element-wise operators are tried on, in this order, until one accepts."""


@dataclass(frozen=True)
class Sample:
    """One call: an operator of a graph, its tensors, and concrete inputs."""

    op: Op
    tensors: dict[str, Tensor]
    inputs: tuple[torch.Tensor, ...]


def calls(target: str, sizes: tuple[int, ...], seed: int = 0) -> Iterator[Sample]:
    """Every sample call of an operator with these sizes, from the first again where it takes more of them."""
    written: Callable[..., Sequence[tuple[Any, ...]]] | None = record(target).samples
    if written is None:
        found = accepted(target)
        arguments = None if found is None else arguments_for(target, *found, sizes)
        written = lambda: [] if arguments is None else [arguments]
    taken = itertools.islice(itertools.cycle(sizes), len(inspect.signature(written).parameters))
    return (concrete(target, arguments, seed) for arguments in written(*taken))


def sampled() -> set[str]:
    """Operators whose records have samples."""
    return {target for target, known in records().items() if known.samples is not None}


@cache
def elementwise_targets() -> tuple[str, ...]:
    """Every functional ATen operator that the element-wise rule serves and that can be called by its schema alone."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = f"aten.{name}.{overload}"
            known = record(target)
            if name.endswith("_backward") or known.function is not None or known.samples is not None:
                continue
            if is_elementwise(target) and comparable(target) and _functional(target) and accepted(target) is not None:
                found.append(target)
    return tuple(sorted(found))


def _functional(target: str) -> bool:
    arguments, returns = schema(target).arguments, schema(target).returns
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    tensors = sum(str(a.type) == "Tensor" for a in arguments)
    return not writes and tensors > 0 and bool(returns) and all(str(r.type) == "Tensor" for r in returns)


def arguments_for(target: str, content: str, grad: bool, sizes: Sequence[int]) -> tuple[Any, ...] | None:
    """Arguments by the schema's types; ``None`` where a required one is of a kind nobody can guess."""
    a, b, *_ = sizes
    shapes = iter([(a, b), (b,), (a, 1), (a, b), (a, b)])
    values: list[Any] = []
    for argument in schema(target).arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            values.append(Spec(next(shapes), content, 0, 4, grad=grad))
        elif argument.has_default_value():
            break
        elif kind in ("number", "float"):
            values.append(0.5 if content == "positive" else 2)
        elif kind == "int":
            values.append(1)
        elif kind == "bool":
            values.append(False)
        else:
            return None
    if any(a.kwarg_only and not a.has_default_value() for a in schema(target).arguments[len(values) :]):
        return None
    return (*values, {})


@cache
def accepted(target: str) -> tuple[str, bool] | None:
    """The first content the operator takes, and whether it can be differentiated there."""
    for content in CONTENTS:
        arguments = arguments_for(target, content, False, (2, 3))
        if arguments is None:
            return None
        tensors = [make(v, torch.Generator().manual_seed(0)) if isinstance(v, Spec) else v for v in arguments[:-1]]
        try:
            result = operator(target)(*tensors)
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            continue
        first = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(first, torch.Tensor) and first.shape == (2, 3):
            return content, content == "positive" and _differentiable(target, tensors)
    return None


def _differentiable(target: str, values: list[Any]) -> bool:
    tensors = [v.requires_grad_() if isinstance(v, torch.Tensor) else v for v in values]
    try:
        result = operator(target)(*tensors)
        for r in result if isinstance(result, (tuple, list)) else (result,):
            if r.requires_grad:
                r.sum().backward(retain_graph=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def make(spec: Spec, generator: torch.Generator) -> torch.Tensor:
    """A tensor as its spec wants it."""
    if spec.content == "ints":
        return torch.randint(spec.low, spec.high, spec.shape, generator=generator)
    if spec.content == "bools":
        return torch.rand(spec.shape, generator=generator) < 0.5
    if spec.content == "positive":
        return torch.rand(spec.shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    if spec.content == "complex":
        return torch.randn(spec.shape, generator=generator, dtype=torch.complex128)
    return torch.randn(spec.shape, generator=generator, dtype=torch.float64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def concrete(target: str, arguments: tuple[Any, ...], seed: int = 0) -> Sample:
    """An operator in a graph with concrete inputs, from one sample call (specs, or tensors that are used as they are)."""
    generator = torch.Generator().manual_seed(seed)
    keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    positional = arguments[:-1] if keywords or (arguments and isinstance(arguments[-1], dict)) else arguments
    tensors: dict[str, Tensor] = {}
    inputs: list[torch.Tensor] = []

    def graph_value(value: Any) -> Value:
        if isinstance(value, Spec):
            name = f"input{len(inputs)}"
            inputs.append(make(value, generator))
            tensors[name] = Tensor(name, value.shape, name_of(inputs[-1].dtype), value.grad)
            return Ref(name)
        if isinstance(value, torch.Tensor):
            name = f"input{len(inputs)}"
            inputs.append(value.detach().double() if value.is_floating_point() else value.detach())
            grad = value.is_floating_point() or value.is_complex()
            tensors[name] = Tensor(name, tuple(value.shape), name_of(inputs[-1].dtype), grad)
            return Ref(name)
        if isinstance(value, torch.dtype):
            return Atom("dtype", name_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(graph_value(v) for v in value)
        return value

    args = tuple(graph_value(a) for a in positional)
    kwargs = tuple((k, graph_value(v)) for k, v in keywords.items())
    probe = iter(inputs)

    def fill(value: Value) -> Any:
        if isinstance(value, Ref):
            return next(probe)
        if isinstance(value, Atom):
            return getattr(torch, value.value)
        return [fill(v) for v in value] if isinstance(value, tuple) else value

    result = operator(target)(*[fill(a) for a in args], **{k: fill(v) for k, v in kwargs})
    results = result if isinstance(result, (tuple, list)) else (result,)
    outputs: list[str | None] = []
    for n, r in enumerate(results):
        if isinstance(r, torch.Tensor):
            outputs.append(f"output{n}")
            tensors[f"output{n}"] = Tensor(f"output{n}", tuple(r.shape), name_of(r.dtype), r.is_floating_point())
        else:
            outputs.append(None)
    op = Op("sample", target, args, kwargs, tuple(outputs))
    return Sample(op, tensors, tuple(inputs))
