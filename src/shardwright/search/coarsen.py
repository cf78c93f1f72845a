"""Tofu's coarsening (Wang, Huang and Li, EuroSys 2019, section 5): operators that share a decision become one node.

Three kinds of operators decide together. Forward with backward: an operator and its gradient are one node from the start,
since a node's price holds both passes. Unrolled time steps: operators of repeated blocks (time steps that share weights,
and equal layers) are one node of the formulation already. Pointwise operators that feed each other and make tensors of the
same shape: done here. They share the layout of their results, so the group's options are the layouts every member offers.
A solution of the coarse problem expands to one of the fine problem at the same cost; what the coarse problem cannot say
is a change of layout, or an unreduced sum, between two members of one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.graph import Graph
from shardwright.operators.rules import Layout, OpRules, output_layouts
from shardwright.search.choose import Edge, Problem, Usage
from shardwright.search.formulate import Formulation


@dataclass(frozen=True, eq=False)
class Coarse:
    """A smaller problem, and for every node of the finer one its place and the option each coarse option means."""

    problem: Problem
    place: Sequence[int]
    meaning: Sequence[np.ndarray]
    groups: tuple[tuple[str, ...], ...]
    """Operators of the graph by name that share one decision, in order; those that decide alone are left out."""

    def expand(self, choice: np.ndarray) -> np.ndarray:
        """The choice of the finer problem that a choice of the coarse one means; it costs the same."""
        return np.array([means[choice[at]] for at, means in zip(self.place, self.meaning, strict=True)])


def coarsen(stated: Formulation) -> Coarse:
    """Join the nodes of pointwise operators that feed each other.

    >>> from shardwright.search.formulate import formulate
    >>> coarse = coarsen(formulate(graph, mesh))
    >>> stated.strategy(coarse.expand(solve(coarse.problem).answer))
    """
    fine = stated.problem
    meaning = [np.arange(size) for size in fine.sizes]
    leader = list(range(len(fine.costs)))
    for names in pointwise_groups(stated.graph, stated.rules):
        nodes = list(dict.fromkeys(stated.stands_for["op", name] for name in names))
        shared = _shared_options(stated, nodes)
        if len(nodes) > 1 and shared is not None:
            for node, options in zip(nodes, shared, strict=True):
                leader[node], meaning[node] = nodes[0], options
    kept = [node for node, first in enumerate(leader) if node == first]
    number = {node: at for at, node in enumerate(kept)}
    place = [number[first] for first in leader]
    return Coarse(_joined(fine, place, meaning, len(kept)), place, meaning, _groups(stated, place))


def pointwise_groups(graph: Graph, rules: Mapping[str, OpRules]) -> list[tuple[str, ...]]:
    """Names of pointwise operators connected by tensors between operators of one result shape, in program order."""
    first: dict[str, int] = {}
    groups: dict[int, list[str]] = {}
    for number, op in enumerate(graph.ops):
        if rules[op.name].kind != "elementwise" or len(op.outputs) != 1 or op.outputs[0] is None:
            continue
        first[op.name], groups[number] = number, [op.name]
        for tensor in op.inputs:
            maker = graph.producer.get(tensor)
            if maker is None or maker.name not in first or maker.outputs[0] is None:
                continue
            if graph.tensors[maker.outputs[0]].shape == graph.tensors[op.outputs[0]].shape:
                here, there = sorted((first[maker.name], first[op.name]))
                if here != there:
                    groups[here] += groups.pop(there)
                    first.update(dict.fromkeys(groups[here], here))
    program = {op.name: number for number, op in enumerate(graph.ops)}
    return [tuple(sorted(names, key=program.__getitem__)) for names in groups.values() if len(names) > 1]


def _shared_options(stated: Formulation, nodes: Sequence[int]) -> list[np.ndarray] | None:
    """Per node its cheapest option for every result layout that all of them offer; nothing where they share none."""
    cheapest: list[dict[Layout, int]] = []
    for node in nodes:
        rules, costs = stated.rules[stated.nodes[node].name], stated.problem.costs[node]
        best: dict[Layout, int] = {}
        for option, split in enumerate(stated.nodes[node].options):
            layout = output_layouts(rules, split, 1)[0]
            if layout not in best or costs[option] < costs[best[layout]]:
                best[layout] = option
        cheapest.append(best)
    common = [layout for layout in cheapest[0] if all(layout in best for best in cheapest)]
    return [np.array([best[layout] for layout in common]) for best in cheapest] if common else None


def _joined(fine: Problem, place: Sequence[int], meaning: Sequence[np.ndarray], count: int) -> Problem:
    costs: list[np.ndarray | None] = [None] * count
    for node, (at, means) in enumerate(zip(place, meaning, strict=True)):
        own = fine.costs[node][means]
        known = costs[at]
        costs[at] = own if known is None else known + own
    edges: dict[tuple[int, int], np.ndarray] = {}
    for first, second, matrix in fine.edges:
        a, b, between = place[first], place[second], matrix[np.ix_(meaning[first], meaning[second])]
        if a == b:
            costs[a] = costs[a] + np.diag(between)
            continue
        key, between = ((a, b), between) if a < b else ((b, a), between.T)
        edges[key] = edges[key] + between if key in edges else between
    usages = [Usage(place[u.node], u.start, u.stop, u.amounts[meaning[u.node]]) for u in fine.usages]
    given = [cost for cost in costs if cost is not None]
    return replace(fine, costs=given, edges=[Edge(a, b, m) for (a, b), m in edges.items()], usages=usages)


def _groups(stated: Formulation, place: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    members: dict[int, list[str]] = {}
    for op in stated.graph.ops:
        members.setdefault(place[stated.stands_for["op", op.name]], []).append(op.name)
    return tuple(tuple(names) for names in members.values() if len(names) > 1)
