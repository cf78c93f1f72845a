"""Which operators have a backward: those that the gradient reaches, from the loss towards the sources.

The loss is the first scalar result with a gradient; where there is none, every result with a gradient is one. Operators that
only feed other results (logits beside a loss) are never differentiated.
"""

from __future__ import annotations

from shardwright.graph.core import Graph, refs
from shardwright.graph.repeats import remembered


def differentiated(graph: Graph) -> frozenset[str]:
    """The names of the operators whose backward runs in a training step; none outside of training.

    >>> differentiated(graph) <= {op.name for op in graph.ops}
    True
    """
    return remembered(graph, "_differentiated", lambda: _find(graph)) if graph.training else frozenset()


def _find(graph: Graph) -> frozenset[str]:
    results = [ref.name for ref in refs(graph.outputs) if graph.tensors[ref.name].grad]
    scalars = [name for name in results if not graph.tensors[name].shape]
    reached, found = set(scalars[:1] or results), set()
    for op in reversed(graph.ops):
        if op.grad and not reached.isdisjoint(op.outputs):
            given = [name for name in op.inputs if graph.tensors[name].grad]
            if given:
                found.add(op.name)
                reached.update(given)
    return frozenset(found)
