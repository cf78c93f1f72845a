"""Graphs to and from JSON without loss, and the fingerprint that ties a plan to the graph it was made for.

The fingerprint hashes what decides a plan's meaning: operators, arguments, shapes, dtypes, parameter names. Source lines
are left out, so upgrading a library without changing its computation keeps old plans valid.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from typing import Any

from shardwright.graph.core import Atom, Buffer, Constant, Graph, Input, Op, Parameter, Ref, Tensor, Value

FORMAT = "shardwright-graph-1"


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
    if isinstance(data, dict):
        ((kind, value),) = data.items()
        if kind == "ref":
            return Ref(value)
        return float(value) if kind == "float" else Atom(kind, value)
    if isinstance(data, list):
        return tuple(_decode(v) for v in data)
    return data


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
    """Read a graph written by :func:`to_json`."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"not a graph of format {FORMAT!r}: {data.get('format')!r}")
    ops = tuple(
        Op(
            name=o["name"],
            target=o["target"],
            args=tuple(_decode(a) for a in o["args"]),
            kwargs=tuple((k, _decode(v)) for k, v in o["kwargs"].items()),
            outputs=tuple(o["outputs"]),
            module=o["module"],
            source=o["source"],
            grad=o["grad"],
        )
        for o in data["ops"]
    )
    return Graph(
        tensors={n: Tensor(n, tuple(shape), dtype, grad) for n, (dtype, shape, grad) in data["tensors"].items()},
        ops=ops,
        inputs=tuple(Input(t, _decode(v), path) for t, v, path in data["inputs"]),
        outputs=tuple(_decode(o) for o in data["outputs"]),
        parameters=tuple(Parameter(t, tuple(paths), trainable) for t, paths, trainable in data["parameters"]),
        buffers=tuple(Buffer(t, path, persistent) for t, path, persistent in data["buffers"]),
        constants=tuple(Constant(t, base64.b64decode(d)) for t, d in data["constants"]),
        mutations=tuple((a, b) for a, b in data["mutations"]),
        input_tree=data["input_tree"],
        output_tree=data["output_tree"],
        training=data["training"],
        notes=tuple(data.get("notes", ())),
    )


def fingerprint(graph: Graph) -> str:
    """A short stable hash of what the graph computes, the same in every process and on every machine."""
    text = json.dumps(_document(graph, provenance=False), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
