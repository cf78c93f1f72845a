"""A choice problem of a graph with the way back to strategies, and from strategies to the problem, to price them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import Mesh
from shardwright.graph import Graph
from shardwright.operators.rules import Layout, OpRules, Split, input_layouts
from shardwright.operators.strategy import Strategy
from shardwright.search.bills import Pricing
from shardwright.search.choose import Problem
from shardwright.search.choose.reductions import reduce_problem
from shardwright.search.choose.workspace import Back
from shardwright.search.options import EVERYTHING, Restriction


@dataclass(frozen=True)
class Node:
    """One decision. ``kind`` is ``op``, ``parameter`` or ``kept``; ``options`` are splits or layouts."""

    kind: str
    name: str
    options: Sequence[Any]
    times: int
    """How many operators (parameters, tensors) of the graph this decision stands for."""


@dataclass(frozen=True, eq=False)
class Formulation:
    """A choice problem and the way back to strategies (and from strategies, to price them by the same rules)."""

    graph: Graph
    mesh: Mesh
    nodes: tuple[Node, ...]
    problem: Problem
    stands_for: Mapping[tuple[str, str], int]
    """``(kind, name)`` of every operator, parameter and kept tensor of the graph → its node."""
    rules: Mapping[str, OpRules]
    recompute: tuple[str, ...] = ()
    lightly: bool = False
    within: Restriction = EVERYTHING
    price: Callable[[Pricing], Problem] | None = None
    """The same nodes and options at other prices."""

    def repriced(self, pricing: Pricing) -> Formulation:
        """The same statement at other prices.

        >>> floor = stated.repriced(LEAST)
        """
        assert self.price is not None
        return replace(self, problem=self.price(pricing))

    def strategy(self, choice: np.ndarray) -> Strategy:
        """The strategy a choice describes, unfolded over all repeats."""
        splits: dict[str, Split] = {}
        resting: dict[str, Layout] = {}
        kept: dict[str, Layout] = {}
        replicated = (Replicate(),) * len(self.mesh.sizes)
        for (kind, name), number in self.stands_for.items():
            option = self.nodes[number].options[choice[number]]
            {"op": splits, "parameter": resting, "kept": kept}[kind][name] = option  # type: ignore[index] # one of three
        for name in self.graph.sources:
            resting.setdefault(name, self.within.arrives.get(name, replicated))
        told: dict[tuple[int, ...], bool] = {}  # by decision: repeated blocks share theirs
        for tensor, key in self._read_by.items():
            if key not in told:
                told[key] = self._gathers(tensor, resting[tensor], splits)
        gathered = frozenset(tensor for tensor, key in self._read_by.items() if told[key])
        again = gathered if self.graph.training and self.within.regather else frozenset()
        whole = gathered if self.graph.training and self.within.whole_gradients else frozenset()
        light = frozenset(self.recompute if self.lightly else ())
        return Strategy(self.mesh.names, splits, resting, kept, again, self.recompute, whole, lightly=light)

    def choice(self, strategy: Strategy) -> np.ndarray:
        """The choice a strategy describes, so that any strategy can be priced by this problem."""
        tables = {"op": strategy.splits, "parameter": strategy.resting, "kept": strategy.kept}
        picked = np.full(len(self.nodes), -1)
        for (kind, name), number in self.stands_for.items():
            if picked[number] < 0:
                picked[number] = list(self.nodes[number].options).index(tables[kind][name])
        return picked

    @cached_property
    def _read_by(self) -> dict[str, tuple[int, ...]]:
        """Every parameter → the decisions about it and about its readers."""
        node = self.stands_for
        return {
            p.tensor: (node["parameter", p.tensor], *(node["op", op.name] for op in self.graph.consumers[p.tensor]))
            for p in self.graph.parameters
        }

    def _gathers(self, tensor: str, layout: Layout, splits: Mapping[str, Split]) -> bool:
        for op in self.graph.consumers[tensor]:
            needs = input_layouts(self.rules[op.name], splits[op.name], len(op.inputs))
            for name, need in zip(op.inputs, needs, strict=True):
                if name == tensor and any(isinstance(a, Shard) and a != b for a, b in zip(layout, need, strict=True)):
                    return True
        return False

    @cached_property
    def _places(self) -> dict[tuple[str, str], dict[Any, int]]:
        return {}

    def place_of(self, node: Node, option: Any) -> int:
        """Where an option stands among those of a node; -1 where it is none of them."""
        key = (node.kind, node.name)
        if key not in self._places:
            self._places[key] = {option: place for place, option in enumerate(node.options)}
        return self._places[key].get(option, -1)

    @cached_property
    def reduced(self) -> tuple[Problem, Back]:
        """The problem less what no choice needs under any limit on memory, and the way back; found once for all limits."""
        return reduce_problem(self.problem)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of what every node decides about: its result, its parameter, its tensor."""
        tensors, producers = self.graph.tensors, {op.name: op for op in self.graph.ops}
        made = {n.name: [o for o in producers[n.name].outputs if o] for n in self.nodes if n.kind == "op"}
        return np.array([sum(tensors[t].bytes for t in made.get(n.name, [n.name])) for n in self.nodes], dtype=float)
