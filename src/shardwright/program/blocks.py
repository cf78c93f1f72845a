"""Recomputed blocks among the nodes of a forward pass: what is computed again of each, and so what is kept.

Of a block that is recomputed as a whole only the inputs are kept (Chen et al., 2016). Of one that is recomputed *lightly*
the results of products, convolutions, attention and random operators are kept too, and what is cheap for its size is
computed again: norms, activations, rotations, the scores of an attention that is written out (Korthikanti et al., 2022, keep
all but these). Either way the first backward node that asks for something that was saved has the nodes run again that lead
to what any node of the block saves, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwright.graph import Graph, Op
from shardwright.operators.rules import OpRules
from shardwright.program.dataflow import Compute, Dataflow
from shardwright.program.footprints import ForwardFootprint, OperatorCall, Strided, forward
from shardwright.program.nodes import made, read, saves

CHEAP = ("copy", "creation", "elementwise", "gather", "normalisation", "reduction", "view")
"""Kinds of operators that a light recomputation runs again."""
SHORT = 256
"""And products of at most so many terms per element of the result."""

Node = TypeVar("Node")
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class RecomputedBlock:
    """A recomputed block: its ``nodes``, and those that run ``again``, in order."""

    nodes: range
    again: tuple[int, ...]


def blocks(flow: Dataflow) -> Mapping[int, RecomputedBlock]:
    """Every node of a recomputed block → its block. Blocks that save nothing have nothing to compute again."""
    table: dict[int, RecomputedBlock] = {}
    for span, lightly in flow.recomputed:
        again = _again(flow, span, _cheap(flow, span) if lightly else span)
        if again:
            table.update(dict.fromkeys(span, RecomputedBlock(span, tuple(sorted(again)))))
    return table


def leading_to(
    asked: Iterable[Value],
    makers: Mapping[Value, Node],
    may: Container[Node],
    reads: Callable[[Node], Iterable[Value]],
) -> set[Node]:
    """Of the nodes that ``may`` run again, those that must for these values to be there; all else is kept.

    >>> leading_to(["c"], {"b": 1, "c": 2}, {1, 2}, {1: ["a"], 2: ["b"]}.get)
    {1, 2}
    """
    left, found = list(asked), set[Node]()
    while left:
        node = makers.get(left.pop())
        if node is not None and node in may and node not in found:
            found.add(node)
            left += reads(node)
    return found


def _again(flow: Dataflow, span: range, may: Container[int]) -> set[int]:
    """The nodes of a block that lead to what its nodes save."""
    makers = {value: number for number in span for value in made(flow.nodes[number])}
    asked: list[int] = []
    for number in span:
        node = flow.nodes[number]
        if isinstance(node, Compute) and saves(node):
            asked += [node.inputs[i] for i in node.footprint.saved_inputs]
            if node.footprint.saved_fresh:
                asked += made(node)
    return leading_to(asked, makers, may, lambda number: read(flow.nodes[number]))


def _cheap(flow: Dataflow, span: range) -> set[int]:
    """Nodes of a block that may run again lightly. Of changes of layout: views, those that make more of little, and those
    that follow something cheap; parameters that were let go of are gathered again for the backward pass anyway."""
    nodes = [node for number in span if isinstance(node := flow.nodes[number], Compute)]
    cheap = cheap_operators(flow.graph, [node.op for node in nodes], {n.op.name: n.rules for n in nodes}, flow.device)
    found: set[int] = set()
    makers: dict[int, int] = {}
    for number in span:
        node = flow.nodes[number]
        makers.update(dict.fromkeys(made(node), number))
        if isinstance(node, Compute):
            again = node.op.name in cheap
        else:
            grows = flow.values[node.result].local.bytes > flow.values[node.source].local.bytes
            again = not node.reads and (node.is_view or grows or makers.get(node.source) in found)
        if again:
            found.add(number)
    return found


def cheap_operators(graph: Graph, ops: Sequence[Op], rules: Mapping[str, OpRules], device: str) -> frozenset[str]:
    """Which of a block's operators a light recomputation may run again.

    Not one that is not smaller than what it reads of an expensive operator, if nobody else needs that and it does not
    either when it goes backward (the sum of a residual stream): keeping its result takes the same bytes and no time.

    >>> cheap_operators(graph, graph.ops[4:20], rules, "cuda")  # doctest: +SKIP
    """
    found: set[str] = set()
    expensive: set[str] = set()
    """Tensors of which somebody expensive is the maker, and views of these, that one operator reads."""
    for op in ops:
        outputs = [name for name in op.outputs if name]
        alone = [name for name in outputs if len(graph.consumers[name]) == 1]
        size = sum(graph.tensors[name].bytes for name in outputs)
        if not _is_cheap(graph, op, rules[op.name]):
            expensive.update(alone)
        elif rules[op.name].kind == "view":
            found.add(op.name)
            expensive.update(alone if op.inputs and op.inputs[0] in expensive else ())
        else:
            instead = [i for i, name in enumerate(op.inputs) if name in expensive and size <= graph.tensors[name].bytes]
            if set(instead) <= {*(whole_footprint(graph, op, device).saved_inputs if instead else ())}:
                found.add(op.name)
    return frozenset(found)


def _is_cheap(graph: Graph, op: Op, rules: OpRules) -> bool:
    if rules.kind == "matmul":
        return rules.flops <= 2 * SHORT * sum(graph.tensors[name].elements for name in op.outputs if name)
    return rules.kind in CHEAP


def whole_footprint(graph: Graph, op: Op, device: str) -> ForwardFootprint:
    """What autograd saves of an operator that is not cut, on this kind of device."""
    tensors = [graph.tensors[name] for name in op.inputs]
    given = tuple(Strided.contiguous(t.shape, t.dtype, t.grad and op.grad and graph.training) for t in tensors)
    return forward(OperatorCall.of(op), given, device, expected=whole_results(graph, op))


def whole_results(graph: Graph, op: Op) -> tuple[Strided | None, ...]:
    """The results of an operator that is not cut, as they would lie; autograd follows those of an operator that trains."""

    def lies(name: str) -> Strided:
        tensor = graph.tensors[name]
        return Strided.contiguous(tensor.shape, tensor.dtype, tensor.grad and op.grad and graph.training)

    return tuple(None if name is None else lies(name) for name in op.outputs)
