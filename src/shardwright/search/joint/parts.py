"""What a solved choice of splits comes to, told apart by where its operators stand: before the blocks, in them, after them.

Seconds that every micro-batch pays, seconds that come once a step (gradients on their way home, updates), bytes at rest and
bytes that a micro-batch holds. To what the choice problem counts comes what only micro-batches have: gradients that are
added up, as their parameters are read, and the weights of an attention that is cut along the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor import Shard

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

    seconds: list[float]
    traffic: list[float]
    closing: list[float]
    resting: list[float]
    held: list[float]


def sums_of(priced: Priced, strategy: Strategy, run: Repeat, blocks: int, microbatches: int) -> Sums:
    """What a strategy comes to in a step of so many micro-batches."""
    stated, each, unhidden = priced.stated, priced.each, priced.unhidden
    choice, graph, problem = stated.choice(strategy), stated.graph, stated.problem
    # Adding a gradient to those before it reads two and writes one; the first micro-batch's is not added.
    adding = 3 * (microbatches - 1) / microbatches / stated.mesh.device.bandwidth
    stop = run.start + run.period * blocks
    place = {op.name: index for index, op in enumerate(graph.ops)}

    def part_of(name: str, kind: str) -> int:
        if kind == "op":
            index = place[name]
        elif kind == "kept":
            index = place[graph.producer[name].name]
        else:
            readers = graph.consumers[name]
            index = place[readers[0].name] if readers else 0
        return HEAD if index < run.start else BLOCK if index < stop else TAIL

    parts = [part_of(node.name, node.kind) for node in stated.nodes]
    totals = Sums(*([0.0] * 3 for _ in Sums._fields))

    def pay(part: int, whole: float, repeated: float, shown: float) -> None:
        totals.seconds[part] += repeated
        totals.traffic[part] += repeated - shown
        totals.closing[part] += whole - repeated

    saving = {usage.node for usage in problem.usages}
    for number, (node, part, pick) in enumerate(zip(stated.nodes, parts, choice, strict=True)):
        pay(part, *(float(p.costs[number][pick]) for p in (problem, each, unhidden)))
        if node.kind == "parameter":
            added, uncounted = _added_up(stated, node, choice)
            totals.seconds[part] += adding * added * node.times
            totals.resting[part] += uncounted * node.times
        elif node.kind == "op" and stated.rules[node.name].kind == "attention" and number in saving:
            totals.held[part] += _probabilities(stated, node, choice) * node.times
    for edge, *same in zip(problem.edges, each.edges, unhidden.edges, strict=True):
        ends = sorted((parts[edge.first], parts[edge.second]))
        part = ends[0] if ends[0] == ends[1] else HEAD if ends == [HEAD, BLOCK] else TAIL
        picked = (choice[edge.first], choice[edge.second])
        pay(part, *(float(e.costs[picked]) for e in (edge, *same)))
    for usage in problem.usages:
        amount = float(usage.amounts[choice[usage.node]])
        flies = stated.nodes[usage.node].kind != "parameter" and (usage.start, usage.stop) == (FORWARD, UPDATE)
        assert usage.stop <= END
        (totals.held if flies else totals.resting)[parts[usage.node]] += amount
    return totals


def _added_up(stated: Formulation, node: Node, choice: np.ndarray) -> tuple[float, float]:
    """Bytes of a parameter's gradient, and how many of them are beyond what the choice problem counts.

    From micro-batch to micro-batch it is added up as the parameter is read (:mod:`shardwright.simulator.held`): whole where
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
