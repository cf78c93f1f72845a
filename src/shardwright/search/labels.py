"""Which loops run over the batch, the sequence, or the picture: labels carried from the inputs through the loops.

Dim 0 of every user input is the batch, dim 1 of a matrix of integers is the sequence, the trailing dims of a picture are
spatial. A loop that cuts a labelled dim of an input carries the label to the output dim it makes; what is made inside the
model for the batch is labelled from where it is used. Baselines by name (data parallelism, Megatron) are stated in these
labels; the search itself needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Shard

from shardwright.graph import Graph
from shardwright.operators.rules import OWN, OpRules, Window

Labels = Mapping[str, Mapping[str, str]]
"""Operator name → loop name → label; loops without a label are absent."""


def label_loops(graph: Graph, rules: Mapping[str, OpRules]) -> Labels:
    """Label the loops of every operator that descend from a labelled input dim."""
    dims: dict[str, dict[int, str]] = {}
    for leaf in graph.inputs:
        if leaf.tensor is None:
            continue
        tensor = graph.tensors[leaf.tensor]
        marks = {0: "batch"} if tensor.shape else {}
        if len(tensor.shape) == 2 and "int" in tensor.dtype:
            marks[1] = "sequence"
        elif len(tensor.shape) == 4:
            marks |= {2: "spatial", 3: "spatial"}
        dims[tensor.name] = marks
    table: dict[str, dict[str, str]] = {}
    sorts: dict[str, str] = {}  # what the rows that a sort handles are
    for op in graph.ops:
        marks_of_op: dict[str, str] = {}
        orders = [order for name in op.inputs if (order := graph.tensors[name].order) is not None]
        for loop in rules[op.name].loops:
            for name, need in zip(op.inputs, loop.inputs, strict=True):
                if isinstance(need, Shard | Window) and need.dim in dims.get(name, {}):
                    marks_of_op[loop.name] = dims[name][need.dim]
                    break
            if loop.name == OWN:  # counts of rows have no dim to carry a label
                known = sorts.get(orders[0].sort if orders else "")
                if known is not None:
                    marks_of_op[OWN] = known
                elif not orders and OWN in marks_of_op:
                    sorts[op.name] = marks_of_op[OWN]
            if loop.name in marks_of_op:
                for out, given in zip(op.outputs, loop.outputs, strict=True):
                    if out is not None and isinstance(given, Shard):
                        dims.setdefault(out, {})[given.dim] = marks_of_op[loop.name]
        table[op.name] = marks_of_op
    _label_makers(graph, rules, table, dims)
    _label_sorted(graph, rules, table)
    return table


def _label_makers(
    graph: Graph, rules: Mapping[str, OpRules], table: dict[str, dict[str, str]], dims: dict[str, dict[int, str]]
) -> None:
    """Carry the batch back to what is made for it inside the model, such as masks: left whole, they would be computed for
    the batch of all ranks on each of them."""
    made = {name for op in graph.ops for name in op.outputs}
    for op in reversed(graph.ops):
        for loop in rules[op.name].loops:
            outputs = zip(op.outputs, loop.outputs, strict=True)
            if any(isinstance(p, Shard) and dims.get(str(out), {}).get(p.dim) == "batch" for out, p in outputs):
                table[op.name].setdefault(loop.name, "batch")
            if table[op.name].get(loop.name) == "batch":
                for name, need in zip(op.inputs, loop.inputs, strict=True):
                    if isinstance(need, Shard) and name in made:
                        dims.setdefault(name, {}).setdefault(need.dim, "batch")


def _label_sorted(graph: Graph, rules: Mapping[str, OpRules], table: dict[str, dict[str, str]]) -> None:
    """All that handle the rows of one sort call them the same: they are cut together or not at all, also those whose label
    came back from a reader, such as the positions in the sort of ERNIE's router, of which the counts know nothing."""
    together: dict[str, list[str]] = {}
    for op in graph.ops:
        if OWN in rules[op.name].by_name:
            orders = [order for name in op.inputs if (order := graph.tensors[name].order) is not None]
            together.setdefault(orders[0].sort if orders else op.name, []).append(op.name)
    for names in together.values():
        label = next((table[name][OWN] for name in names if OWN in table[name]), None)
        if label is not None:
            for name in names:
                table[name].setdefault(OWN, label)
