"""How samples are written: a function of sizes, so that the same call is tried even, uneven and with random shapes.

>>> @sample("mylib.product.default")
... def product(pick):
...     i, k, j = pick(3)
...     yield t(i, k), t(k, j)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwright._torch_compat import operator
from shardwright.graph import Atom, Op, Ref, Tensor, Value

Pick = Callable[[int], Any]


@dataclass(frozen=True)
class Spec:
    """A tensor to be made: its shape, and what may be in it."""

    shape: tuple[int, ...]
    content: str = "normal"
    low: int = 0
    high: int = 0
    grad: bool = True


def t(*shape: int, grad: bool = True) -> Spec:
    """Normally distributed float64."""
    return Spec(shape, grad=grad)


def positive(*shape: int, grad: bool = True) -> Spec:
    """Between 0.1 and 0.9: a probability, a denominator."""
    return Spec(shape, "positive", grad=grad)


def ints(*shape: int, below: int, low: int = 0) -> Spec:
    return Spec(shape, "ints", low, below, grad=False)


def bools(*shape: int) -> Spec:
    return Spec(shape, "bools", grad=False)


def complexes(*shape: int) -> Spec:
    return Spec(shape, "complex")


@dataclass(frozen=True)
class Sample:
    """One call: an operator of a graph, its tensors, and concrete inputs."""

    op: Op
    tensors: dict[str, Tensor]
    inputs: tuple[torch.Tensor, ...]


SAMPLES: dict[str, Callable[[Pick], Iterator[Any]]] = {}


def sample(*targets: str) -> Callable[[Callable[..., Iterator[Any]]], Callable[..., Iterator[Any]]]:
    """Register sample calls: tuples of positional arguments, the last one a dict of keywords if there are any."""

    def register(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        for target in targets:
            SAMPLES[target] = function
        return function

    return register


EVEN = (12, 24, 12, 8, 24, 12)
UNEVEN = (7, 10, 9, 5, 11, 6)


def picker(sizes: tuple[int, ...]) -> Pick:
    """Sizes one after the other, from the beginning again when they run out."""
    source = itertools.cycle(sizes)

    def pick(count: int) -> Any:
        found = [next(source) for _ in range(count)]
        return found[0] if count == 1 else found

    return pick


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


def calls(target: str, sizes: tuple[int, ...], seed: int = 0) -> Iterator[Sample]:
    """Every sample call of an operator with these sizes."""
    for arguments in SAMPLES[target](picker(sizes)):
        yield concrete(target, arguments if isinstance(arguments, tuple) else (arguments,), seed)
