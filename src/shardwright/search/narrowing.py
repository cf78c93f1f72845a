"""A recipe's problem cut out of the whole one: the same nodes with fewer options, nothing described or priced anew.

A restriction only strikes options out and forbids gathers. Unless it also changes what is charged (what is gathered once
instead of twice, what surely shares a collective), every price of its problem stands in the problem of the whole
space on the same mesh. At prices that no execution undercuts all restrictions are charged alike, so bounds can always be
told from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch.distributed.tensor import Replicate

from shardwright.operators.rules import Need, input_layouts, output_layouts
from shardwright.search.bills import Pricing
from shardwright.search.choose import Edge, Problem
from shardwright.search.choose.problem import with_options
from shardwright.search.formulate import Known
from shardwright.search.formulation import Formulation, Node
from shardwright.search.labels import Labels
from shardwright.search.options import Restriction, kept_layouts, rows_within
from shardwright.search.prices import gathers_over


def narrowed(
    wide: Formulation,
    within: Restriction,
    labels: Labels,
    known: Known,
    priced: Callable[[Pricing], Problem] | None = None,
) -> Formulation | None:
    """The problem of a restriction out of that of everything; nothing where that has not all of its options.

    ``known`` are the splits of operators as ``wide`` has them, ``priced`` gives its problem at other prices.

    >>> narrowed(stated, restriction("megatron", 2), labels, known).problem  # doctest: +SKIP
    """
    narrow = _Narrow(wide, within, labels, known)
    if not narrow.possible:
        return None
    at = priced or wide.price
    assert at is not None
    return replace(
        wide,
        nodes=tuple(replace(node, options=options) for node, options in zip(wide.nodes, narrow.options, strict=True)),
        problem=narrow.cut(wide.problem),
        within=within,
        price=lambda pricing: narrow.cut(at(pricing)),
    )


class _Narrow:
    """Which options of every node are left, and which pairs of them are forbidden."""

    def __init__(self, wide: Formulation, within: Restriction, labels: Labels, known: Known) -> None:
        self.wide, self.within, self.possible = wide, within, True
        self.picks: list[np.ndarray] = []
        self.options: list[list] = []
        self.operators = {op.name: op for op in wide.graph.ops}
        for node in wide.nodes:  # a kept tensor comes after its maker and readers
            rows = self._rows(node, labels, known)
            self.picks.append(np.array(rows, dtype=np.int64))
            self.options.append([node.options[row] for row in rows])
        self.forbidden = self._forbidden()

    def _rows(self, node: Node, labels: Labels, known: Known) -> Sequence[int]:
        graph, sizes = self.wide.graph, self.wide.mesh.sizes
        if node.kind == "op":
            op, rules = self.operators[node.name], self.wide.rules[node.name]
            table = known.get(node.name)
            if table is None or len(table.every.splits) != len(node.options):
                self.possible = False
                return range(len(node.options))
            return rows_within(op, rules, sizes, dict(labels[op.name]), self.within, table.every).tolist()
        if node.kind == "parameter":
            meta = graph.tensors[node.name]
            rows = [row for row, layout in enumerate(node.options) if self.within.rest(meta, layout)]
            return rows or [self._place(node, (Replicate(),) * len(sizes))]
        maker = graph.producer[node.name]
        made = [
            outputs[maker.outputs.index(node.name)]
            for outputs in self._layouts(maker.name, output_layouts, len(maker.outputs))
        ]
        needs = [self._needs(reader.name, node.name) for reader in graph.consumers[node.name]]
        return [self._place(node, layout) for layout in kept_layouts(made, needs, len(sizes))]

    def _layouts(self, name: str, of: Callable, count: int) -> list:
        """Of one side of an operator, under every split that is left."""
        return [of(self.wide.rules[name], split, count) for split in self.options[self.wide.stands_for["op", name]]]

    def _needs(self, reader: str, tensor: str) -> list[tuple[Need, ...]]:
        op = self.operators[reader]
        position = op.inputs.index(tensor)
        return [inputs[position] for inputs in self._layouts(reader, input_layouts, len(op.inputs))]

    def _place(self, node: Node, option: object) -> int:
        """Where an option stands in the whole problem."""
        place = self.wide.place_of(node, option)
        self.possible &= place >= 0
        return max(place, 0)

    def _forbidden(self) -> dict[tuple[int, int], np.ndarray]:
        """Pairs of nodes, in order → the pairs of their options under which a parameter is gathered where none may be."""
        axes = [axis for axis in range(len(self.wide.mesh.sizes)) if not self.within.gather(axis)]
        found: dict[tuple[int, int], np.ndarray] = {}
        for number, node in enumerate(self.wide.nodes if axes else ()):
            if node.kind != "parameter":
                continue
            for op in self.wide.graph.consumers[node.name]:
                reader = self.wide.stands_for["op", op.name]
                mask = gathers_over(axes, self.options[number], self._needs(op.name, node.name))
                key, mask = ((number, reader), mask) if number < reader else ((reader, number), mask.T)
                found[key] = found[key] | mask if key in found else mask
        return found

    def cut(self, problem: Problem) -> Problem:
        """What is left of the whole problem, at whatever prices."""
        left = with_options(problem, self.picks)
        edges = [self._edge(edge) for edge in left.edges]
        return replace(left, edges=edges, usages=[usage for usage in left.usages if usage.amounts.any()])

    def _edge(self, edge: Edge) -> Edge:
        mask = self.forbidden.get((edge.first, edge.second))
        return edge if mask is None else edge._replace(costs=np.where(mask, np.inf, edge.costs))
