"""What a solved choice of splits comes to, told apart by where its operators stand: before the blocks, in them, after them;
or operator by operator.

Seconds that every micro-batch pays, seconds that come once a step (gradients on their way home, updates), bytes at rest and
bytes that a micro-batch holds. To what the choice problem counts comes what only micro-batches have: gradients that are
added up, as their parameters are read, and the weights of an attention that is cut along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor import Shard

from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.graph.repeats import Repeat
from shardwright.operators.rules import Need, Placement, Window, input_layouts, largest_shard, local_shape
from shardwright.operators.strategy import Strategy
from shardwright.program.sums import replica_axes
from shardwright.search.bills import Pricing
from shardwright.search.choose import Problem
from shardwright.search.formulate import END, FORWARD, UPDATE
from shardwright.search.formulation import Formulation, Node
from shardwright.search.saving import is_replaced

HEAD, BLOCK, TAIL = range(3)


@dataclass(frozen=True)
class Parts:
    """Something measured before the blocks, per block, and after them."""

    head: float
    block: float
    tail: float

    def of(self, blocks: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Of stages with so many blocks, which may be the first or the last."""
        return blocks * self.block + first * self.head + last * self.tail


@dataclass(frozen=True, eq=False)
class Priced:
    """A problem; the same less what comes once a step, which is what every micro-batch pays; and less what may hide."""

    stated: Formulation
    each: Problem
    unhidden: Problem

    @staticmethod
    def of(stated: Formulation) -> Priced:
        each, unhidden = (stated.repriced(Pricing(traffic=traffic, once=0.0)).problem for traffic in (1.0, 0.0))
        return Priced(stated, each, unhidden)


class Sums(NamedTuple):
    """By part: ``seconds`` per micro-batch, ``traffic`` of them that may hide, seconds ``closing`` a step, bytes ``resting``
    and bytes ``held`` per micro-batch."""

    seconds: np.ndarray
    traffic: np.ndarray
    closing: np.ndarray
    resting: np.ndarray
    held: np.ndarray


class Where(NamedTuple):
    """In which part the decisions of a problem and the changes of layout between them stand: [nodes, parts] and [edges,
    parts], shares that add up to 1."""

    nodes: np.ndarray
    edges: np.ndarray

    def gathered(self, members: np.ndarray) -> Where:
        """In other parts, each of which has some of these: ``members`` [other parts, parts]."""
        return Where(self.nodes @ members.T, self.edges @ members.T)


def by_blocks(stated: Formulation, run: Repeat, blocks: int) -> Where:
    """Parts before so many blocks, in them, after them. What changes between two parts is paid outside the blocks."""
    stop = run.start + run.period * blocks
    place = _places(stated.graph)
    places = [place(node.kind, node.name) for node in stated.nodes]
    parts = [HEAD if index < run.start else BLOCK if index < stop else TAIL for index in places]
    between = []
    for edge in stated.problem.edges:
        ends = sorted((parts[edge.first], parts[edge.second]))
        between.append(ends[0] if ends[0] == ends[1] else HEAD if ends == [HEAD, BLOCK] else TAIL)
    one = np.eye(3)
    return Where(one[parts], one[between] if between else np.zeros((0, 3)))


def by_operators(stated: Formulation) -> Where:
    """Every operator a part. What a decision costs is shared by all that it stands for, evenly: a parameter's by its first
    reader, a change of layout by who reads, or where a tensor is settled for several readers, by who makes it."""
    graph, node_of, place = stated.graph, stated.stands_for, _places(stated.graph)
    nodes = np.zeros((len(stated.nodes), len(graph.ops)))
    for (kind, name), number in node_of.items():
        nodes[number, place(kind, name)] += 1.0
    numbers = {(edge.first, edge.second): k for k, edge in enumerate(stated.problem.edges)}
    edges = np.zeros((len(numbers), len(graph.ops)))

    def paid(one: int, other: int, index: int) -> None:
        if (pair := (min(one, other), max(one, other))) in numbers:
            edges[numbers[pair], index] += 1.0

    for index, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.inputs):
            maker = ("op", graph.producer[name].name) if name in graph.producer else None
            home = next((key for key in (("kept", name), ("parameter", name), maker) if key in node_of), None)
            if home is not None:
                paid(node_of[home], node_of["op", op.name], index)
        for out in op.outputs:
            if out is not None and ("kept", out) in node_of:
                paid(node_of["op", op.name], node_of["kept", out], index)
    return Where(*(table / table.sum(axis=1, keepdims=True) for table in (nodes, edges)))


def _places(graph: Graph) -> Callable[[str, str], int]:
    """The operator with which a decision stands: itself, who makes the tensor, the parameter's first reader."""
    place = {op.name: index for index, op in enumerate(graph.ops)}

    def of(kind: str, name: str) -> int:
        if kind == "op":
            return place[name]
        if kind == "kept":
            return place[graph.producer[name].name]
        readers = graph.consumers[name]
        return place[readers[0].name] if readers else 0

    return of


def sums_of(priced: Priced, strategy: Strategy, where: Where, microbatches: int) -> Sums:
    """What a strategy comes to in a step of so many micro-batches."""
    stated, each, unhidden = priced.stated, priced.each, priced.unhidden
    choice, problem = stated.choice(strategy), stated.problem
    # Adding a gradient to those before it reads two and writes one; the first micro-batch's is not added.
    adding = 3 * (microbatches - 1) / microbatches / stated.mesh.device.bandwidth
    seconds, resting, held = np.zeros((3, len(stated.nodes)))
    saving = {usage.node for usage in problem.usages}
    for number, node in enumerate(stated.nodes):
        if node.kind == "parameter":
            added, uncounted = _added_up(stated, node, choice)
            seconds[number] += adding * added * node.times
            resting[number] += uncounted * node.times
        elif node.kind == "op" and stated.rules[node.name].kind == "attention" and number in saving:
            held[number] += _probabilities(stated, node, choice) * node.times
    for usage in problem.usages:
        amount = float(usage.amounts[choice[usage.node]])
        flies = stated.nodes[usage.node].kind != "parameter" and (usage.start, usage.stop) == (FORWARD, UPDATE)
        assert usage.stop <= END
        (held if flies else resting)[usage.node] += amount

    def of(one: Problem) -> np.ndarray:
        costs = np.array([costs[pick] for costs, pick in zip(one.costs, choice, strict=True)])
        changes = np.array([edge.costs[choice[edge.first], choice[edge.second]] for edge in one.edges])
        return costs @ where.nodes + changes @ where.edges

    whole, repeated, shown = of(problem), of(each), of(unhidden)
    return Sums(
        seconds=repeated + seconds @ where.nodes,
        traffic=repeated - shown,
        closing=whole - repeated,
        resting=resting @ where.nodes,
        held=held @ where.nodes,
    )


def _added_up(stated: Formulation, node: Node, choice: np.ndarray) -> tuple[float, float]:
    """Bytes of a parameter's gradient, and how many of them are beyond what the choice problem counts.

    From micro-batch to micro-batch it is added up as the parameter is read (:mod:`shardwright.costs.passes`): whole where
    that is gathered, and beside the buckets that replicas are summed in.
    """
    graph, sizes, readers = stated.graph, stated.mesh.sizes, stated.graph.consumers[node.name]
    if not readers or not graph.parameter_of[node.name].trainable:
        return 0.0, 0.0
    op, meta = readers[0], graph.tensors[node.name]
    reader = stated.stands_for["op", op.name]
    needs = input_layouts(stated.rules[op.name], stated.nodes[reader].options[choice[reader]], len(op.inputs))
    read = largest_shard(meta.shape, _plain(needs[op.inputs.index(node.name)]), sizes)
    rests = node.options[choice[stated.stands_for["parameter", node.name]]]
    counted = 0 if replica_axes(rests, sizes) else largest_shard(meta.shape, rests, sizes)
    return float(read * DTYPE_BYTES[meta.dtype]), float((read - counted) * DTYPE_BYTES[meta.dtype])


def _probabilities(stated: Formulation, node: Node, choice: np.ndarray) -> float:
    """Bytes of attention's weights between positions, which are kept where a kernel of ours cuts along the sequence."""
    graph, sizes = stated.graph, stated.mesh.sizes
    op, rules = next(op for op in graph.ops if op.name == node.name), stated.rules[node.name]
    split = node.options[choice[stated.stands_for["op", node.name]]]
    if not is_replaced(graph, op, rules, split, sizes):
        return 0.0
    needs = input_layouts(rules, split, len(op.inputs))
    query, key = (graph.tensors[op.inputs[i]] for i in (0, 1))
    rows, columns = (
        local_shape(tensor.shape, _plain(need), sizes, [0] * len(sizes))
        for tensor, need in zip((query, key), needs, strict=False)
    )
    return float(np.prod(rows[:-1]) * columns[-2] * DTYPE_BYTES[query.dtype])


def _plain(need: Sequence[Need]) -> list[Placement]:
    return [Shard(p.dim) if isinstance(p, Window) else p for p in need]
