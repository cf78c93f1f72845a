"""The dataflow graph of one forward pass: operators in execution order, connected by named tensors.

A ``Graph`` is functional (no operator writes into its inputs; a changed buffer is a new tensor listed under
``mutations``), static (every extent is an integer) and neutral (operators are named by strings such as
``"aten.linear.default"``, dtypes by ``"float32"``). Construction checks that every reference is defined before its use,
so a graph that exists is well formed. What changes per rank (devices, local shapes) is decided by later rooms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Union

from shardwright.graph.orders import Order, marked

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}


@dataclass(frozen=True)
class Ref:
    """A tensor used as an argument."""

    name: str


@dataclass(frozen=True)
class Atom:
    """An argument that is neither a number nor a tensor: ``Atom("dtype", "float32")``, ``Atom("layout", "strided")``."""

    kind: str
    value: str


Value = Union[Ref, Atom, bool, int, float, str, None, tuple["Value", ...]]
"""What may stand as an argument of an operator; lists are tuples here."""


@dataclass(frozen=True)
class Tensor:
    """A value in the graph. ``grad`` says whether a gradient flows back to it in training.

    ``order``: the sort of rows that it hangs on, if any; a graph finds that out for itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad: bool = False
    order: Order | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Op:
    """One operator. ``outputs`` names its tensor results by position; a result nobody uses may be ``None``.

    ``grad`` is false for operators that ran under ``torch.no_grad`` in the model.
    """

    name: str
    target: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...]
    outputs: tuple[str | None, ...]
    module: str = ""
    source: str = ""
    grad: bool = True

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensor arguments in order of appearance (keyword arguments last); repeated uses repeat."""
        return tuple(r.name for r in refs((self.args, tuple(v for _, v in self.kwargs))))

    @property
    def short(self) -> str:
        """What people call the operator: ``linear`` of ``aten.linear.default``."""
        return self.target.split(".")[1] if "." in self.target else self.target

    def kwarg(self, key: str, default: Value = None) -> Value:
        return next((v for k, v in self.kwargs if k == key), default)


@dataclass(frozen=True)
class Parameter:
    """A trained tensor. ``paths`` holds every name it has in the module: more than one where weights are tied."""

    tensor: str
    paths: tuple[str, ...]
    trainable: bool = True


@dataclass(frozen=True)
class Buffer:
    """State that is not trained, such as batch-norm statistics."""

    tensor: str
    path: str
    persistent: bool = True


@dataclass(frozen=True)
class Constant:
    """A tensor written into the model's code; its raw little-endian bytes travel with the graph."""

    tensor: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Input:
    """One leaf of the flattened call ``forward(*args, **kwargs)``: a tensor, or a plain value fixed at capture."""

    tensor: str | None
    value: Value = None
    path: str = ""


def refs(value: Any) -> Iterator[Ref]:
    """Every tensor reference inside a (nested) argument, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


@dataclass(frozen=True)
class Graph:
    """One forward pass. ``outputs`` are the flattened results; ``input_tree`` and ``output_tree`` restore their nesting.

    Example
    -------
    >>> x, y = Tensor("x", (4, 8), "float32"), Tensor("y", (4, 8), "float32")
    >>> relu = Op("relu", "aten.relu.default", (Ref("x"),), (), ("y",))
    >>> Graph({"x": x, "y": y}, (relu,), inputs=(Input("x"),), outputs=(Ref("y"),)).ops[0].inputs
    ('x',)
    """

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Value, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    constants: tuple[Constant, ...] = ()
    mutations: tuple[tuple[str, str], ...] = ()
    """Pairs (buffer tensor, tensor holding its new value)."""
    input_tree: str = ""
    output_tree: str = ""
    training: bool = True
    notes: tuple[str, ...] = ()
    """Sentences about what capture left out or took for granted; they decide nothing."""

    def __post_init__(self) -> None:
        defined = set(self.sources)
        for op in self.ops:
            for name in op.inputs:
                if name not in defined:
                    raise ValueError(f"operator {op.name} ({op.target}) uses tensor {name!r} before it is defined")
            for out in op.outputs:
                if out is None:
                    continue
                if out in defined:
                    raise ValueError(f"tensor {out!r} is defined twice, the second time by operator {op.name}")
                defined.add(out)
        used = {r.name for r in refs(self.outputs)} | {new for _, new in self.mutations}
        if missing := (used - defined) | (defined - set(self.tensors)):
            raise ValueError(f"tensors {sorted(missing)} are used or produced but not declared")
        object.__setattr__(self, "tensors", marked(self))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Tensors no operator produces: parameters, buffers, constants and inputs, in this order."""
        held = [p.tensor for p in self.parameters] + [b.tensor for b in self.buffers]
        held += [c.tensor for c in self.constants]
        return tuple(held + [i.tensor for i in self.inputs if i.tensor is not None])

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """The operator that makes each tensor (sources have none)."""
        return {out: op for op in self.ops for out in op.outputs if out is not None}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        """The operators that read each tensor, in execution order, each once."""
        users: dict[str, list[Op]] = {name: [] for name in self.tensors}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                users[name].append(op)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def parameter_of(self) -> Mapping[str, Parameter]:
        return {p.tensor: p for p in self.parameters}

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(self.tensors[p.tensor].bytes for p in self.parameters)
