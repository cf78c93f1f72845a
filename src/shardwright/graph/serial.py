"""Graphs to and from JSON without loss, and the fingerprint that ties a plan to the graph it was made for.

The fingerprint hashes what decides a plan's meaning: operators, arguments, shapes, dtypes, parameter names. Source lines
are left out, so upgrading a library without changing its computation keeps old plans valid. Reading is strict: a graph
that comes out is well formed, and anything else is one sentence.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from shardwright.errors import GraphError
from shardwright.files import parse_json
from shardwright.graph.core import DTYPE_BYTES, Atom, Buffer, Constant, Graph, Input, Op, Parameter, Ref, Tensor, Value
from shardwright.graph.repeats import remembered
from shardwright.records import read_record, shown

FORMAT = "shardwright-graph-1"
ATOMS = {
    "dtype": frozenset(DTYPE_BYTES),
    "layout": frozenset(["strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"]),
    "memory_format": frozenset(["contiguous_format", "preserve_format", "channels_last", "channels_last_3d"]),
    "device": frozenset(["any", "cpu", "cuda", "meta"]),
}
"""What arguments that are neither numbers nor tensors may be called: nothing else is looked up in ``torch``."""
LARGEST_BYTES = 1 << 60
"""Of one tensor: beyond it sizes cannot be told in PyTorch's numbers, and no machine has it."""


def _encode(value: Value) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Atom):
        return {value.kind: value.value}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no inf or nan
    return value


def _decode(data: Any) -> Value:
    if isinstance(data, list):
        return tuple(_decode(v) for v in data)
    if not isinstance(data, dict):
        if isinstance(data, int) and abs(data) >= 2**63:
            raise ValueError(f"{shown(data)} is beyond every whole number of an operator")
        return data
    if len(data) != 1 or not all(isinstance(value, str) for value in data.values()):
        raise ValueError(f"{shown(data)} is no argument of an operator")
    ((kind, value),) = data.items()
    if kind == "ref":
        return Ref(value)
    if kind == "float":
        return float(value)
    if kind == "complex":
        complex(value)
    elif value not in ATOMS.get(kind, ()):
        raise ValueError(f"{shown(data)} is no argument of an operator")
    return Atom(kind, value)


@dataclass(frozen=True)
class _Op:
    """An operator as it is written."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str | None, ...]
    grad: bool
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class _Document:
    """A graph as it is written."""

    format: str
    training: bool
    tensors: dict[str, tuple[str, tuple[int, ...], bool]]
    inputs: tuple[tuple[str | None, Any, str], ...]
    input_tree: str
    parameters: tuple[tuple[str, tuple[str, ...], bool], ...]
    buffers: tuple[tuple[str, str, bool], ...]
    constants: tuple[tuple[str, str], ...]
    ops: tuple[_Op, ...]
    outputs: tuple[Any, ...]
    output_tree: str
    mutations: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def _op(op: Op, provenance: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": op.name,
        "target": op.target,
        "args": _encode(op.args),
        "kwargs": {k: _encode(v) for k, v in op.kwargs},
        "outputs": list(op.outputs),
        "grad": op.grad,
    }
    if provenance:
        data |= {"module": op.module, "source": op.source}
    return data


def _document(graph: Graph, provenance: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "training": graph.training,
        "tensors": {t.name: [t.dtype, list(t.shape), t.grad] for t in graph.tensors.values()},
        "inputs": [[i.tensor, _encode(i.value), i.path] for i in graph.inputs],
        "input_tree": graph.input_tree,
        "parameters": [[p.tensor, list(p.paths), p.trainable] for p in graph.parameters],
        "buffers": [[b.tensor, b.path, b.persistent] for b in graph.buffers],
        "constants": [[c.tensor, base64.b64encode(c.data).decode()] for c in graph.constants],
        "ops": [_op(op, provenance) for op in graph.ops],
        "outputs": [_encode(o) for o in graph.outputs],
        "output_tree": graph.output_tree,
        "mutations": [list(m) for m in graph.mutations],
        **({"notes": list(graph.notes)} if provenance and graph.notes else {}),
    }


def to_json(graph: Graph) -> str:
    """The graph as one JSON document; ``from_json(to_json(g)) == g``."""
    return json.dumps(_document(graph, provenance=True))


def from_json(text: str) -> Graph:
    """Read a graph written by :func:`to_json`; what is no graph is a `GraphError`."""
    data = parse_json(text, "the graph", GraphError)
    found = data.get("format") if isinstance(data, dict) else data
    if found != FORMAT:
        raise GraphError(f"not a graph of format {FORMAT!r}: {shown(found)}.", "Capture the model again.")
    document = read_record(_Document, data, where="the graph is damaged", error=GraphError)
    try:
        return _graph(document)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"the graph is damaged: {error}.", "Capture the model again.") from None


def _graph(data: _Document) -> Graph:
    graph = Graph(
        tensors={n: _tensor(n, dtype, shape, grad) for n, (dtype, shape, grad) in data.tensors.items()},
        ops=tuple(
            Op(
                name=o.name,
                target=o.target,
                args=tuple(_decode(a) for a in o.args),
                kwargs=tuple((k, _decode(v)) for k, v in o.kwargs.items()),
                outputs=o.outputs,
                module=o.module,
                source=o.source,
                grad=o.grad,
            )
            for o in data.ops
        ),
        inputs=tuple(Input(t, _decode(v), path) for t, v, path in data.inputs),
        outputs=tuple(_decode(o) for o in data.outputs),
        parameters=tuple(Parameter(t, paths, trainable) for t, paths, trainable in data.parameters),
        buffers=tuple(Buffer(t, path, persistent) for t, path, persistent in data.buffers),
        constants=tuple(Constant(t, _bytes(d)) for t, d in data.constants),
        mutations=data.mutations,
        input_tree=data.input_tree,
        output_tree=data.output_tree,
        training=data.training,
        notes=data.notes,
    )
    if len({op.name for op in graph.ops}) != len(graph.ops) or len(set(graph.sources)) != len(graph.sources):
        raise ValueError("two operators or two sources have the same name")
    if nameless := [p.tensor for p in graph.parameters if not p.paths]:
        raise ValueError(f"parameter {nameless[0]!r} has no name in the module")
    for constant in graph.constants:
        if constant.tensor not in graph.tensors or len(constant.data) != graph.tensors[constant.tensor].bytes:
            raise ValueError(f"the constant {constant.tensor!r} has {len(constant.data)} bytes, which do not fill it")
    return graph


def _tensor(name: str, dtype: str, shape: tuple[int, ...], grad: bool) -> Tensor:
    if dtype not in DTYPE_BYTES or any(extent < 0 for extent in shape):
        raise ValueError(f"tensor {name!r} is {shown(dtype)} of shape {shown(shape)}")
    if math.prod(shape) * DTYPE_BYTES[dtype] > LARGEST_BYTES:
        raise ValueError(f"tensor {name!r} of shape {shown(shape)} is larger than any memory")
    return Tensor(name, shape, dtype, grad)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a constant is {shown(text)}: {error}") from None


def fingerprint(graph: Graph) -> str:
    """A short stable hash of what the graph computes, the same in every process and on every machine."""

    def find() -> str:
        text = json.dumps(_document(graph, provenance=False), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    return remembered(graph, "_fingerprint", find)
