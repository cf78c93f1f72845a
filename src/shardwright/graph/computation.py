"""What a graph computes, whatever the order in which its independent operators were traced.

Some models walk through a Python ``set`` of names, and the order of a set of strings differs from process to process. Two
captures then hold the same operators in another order, under other numbers. The digest here names every tensor by what it
is computed from (a Merkle tree), so that such graphs are recognised as one and the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from shardwright.graph.core import Graph, Ref, Value


def computation(graph: Graph) -> str:
    """A digest of what the graph computes from what; graphs that differ in the order of operators alone have the same.

    >>> computation(graph) == computation(from_json(to_json(graph)))                      # doctest: +SKIP
    True
    """
    known: dict[str, str] = {}

    def about(name: str) -> str:
        tensor = graph.tensors[name]
        return f"{tensor.dtype}{list(tensor.shape)}{tensor.grad}"

    for parameter in graph.parameters:
        known[parameter.tensor] = _digest("parameter", parameter.paths, parameter.trainable, about(parameter.tensor))
    for buffer in graph.buffers:
        known[buffer.tensor] = _digest("buffer", buffer.path, buffer.persistent, about(buffer.tensor))
    for constant in graph.constants:
        known[constant.tensor] = _digest("constant", hashlib.sha256(constant.data).hexdigest(), about(constant.tensor))
    for given in graph.inputs:
        if given.tensor is not None:
            known[given.tensor] = _digest("input", given.path, about(given.tensor))
    performed = []
    for op in graph.ops:
        kwargs = sorted((key, _named(value, known)) for key, value in op.kwargs)
        own = _digest(op.target, _named(op.args, known), kwargs, op.grad, op.module)
        performed.append(own)
        for index, name in enumerate(op.outputs):
            if name is not None:
                known[name] = _digest(own, index, about(name))
    mutations = sorted((known[held], known[fresh]) for held, fresh in graph.mutations)
    everything = sorted([*known.values(), *performed])  # also operators nobody reads, and how often each occurs
    plain = [(given.path, given.value) for given in graph.inputs if given.tensor is None]
    trees = (graph.input_tree, graph.output_tree, graph.training)
    return _digest(_named(graph.outputs, known), mutations, everything, plain, trees)


def _named(value: Value, known: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return known[value.name]
    if isinstance(value, tuple):
        return f"({','.join(_named(item, known) for item in value)})"
    return repr(value)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
