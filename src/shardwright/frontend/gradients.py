"""Where gradients flow in a graph: from the results back to what is trained, and to inputs that ask for one.

A graph is captured for training its parameters. Called with an input that requires a gradient (a module before it is
trained too), the same operators carry gradients further back; :func:`with_input_gradients` is that graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from shardwright.graph.core import Graph, Op, refs

_STOPS = ("aten.detach.default", "aten.detach_copy.default")


def is_differentiable(dtype: str) -> bool:
    """Whether numbers of this dtype have gradients.

    >>> is_differentiable("bfloat16"), is_differentiable("int64")
    (True, False)
    """
    return dtype.startswith(("float", "bfloat", "complex"))


def passes_gradients(op: Op) -> bool:
    """Whether a gradient of the operator's results becomes one of its arguments."""
    return op.grad and op.target not in _STOPS


def wanted_gradients(graph: Graph, ops: Iterable[Op], depends: Mapping[str, bool]) -> set[str]:
    """Of the tensors that ``depend`` on something trained, those that a differentiable result depends on."""
    wanted = {ref.name for ref in refs(graph.outputs)}
    for op in reversed(tuple(ops)):
        if passes_gradients(op) and any(out in wanted and depends[out] for out in op.outputs if out):
            wanted.update(op.inputs)
    return {name for name in graph.tensors if depends[name] and name in wanted}


def with_input_gradients(graph: Graph, inputs: Collection[str]) -> Graph:
    """The same graph where gradients flow back to these inputs as well.

    Examples
    --------
    >>> from shardwright.graph import Input, Ref, Tensor
    >>> x, y = Tensor("x", (4,), "float32"), Tensor("y", (4,), "float32")
    >>> relu = Op("relu", "aten.relu.default", (Ref("x"),), (), ("y",))
    >>> graph = Graph({"x": x, "y": y}, (relu,), inputs=(Input("x"),), outputs=(Ref("y"),))
    >>> with_input_gradients(graph, {"x"}).tensors["y"].grad
    True
    """
    depends = {name: tensor.grad or name in inputs for name, tensor in graph.tensors.items()}
    for op in graph.ops:
        flows = passes_gradients(op) and any(depends[name] for name in op.inputs)
        for out in op.outputs:
            if out is not None:
                depends[out] |= flows and is_differentiable(graph.tensors[out].dtype)
    wanted = wanted_gradients(graph, graph.ops, depends)
    tensors = {name: dataclasses.replace(tensor, grad=name in wanted) for name, tensor in graph.tensors.items()}
    return dataclasses.replace(graph, tensors=tensors)
