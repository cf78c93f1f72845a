"""From a graph and a mesh to the choice problem: nodes are operators, parameters and shared tensors, edges are layouts.

Minimise the sum of node costs (an operator's seconds forward and backward, a parameter's optimiser step) and edge costs
(the change of layout forward plus its backward dual), with the memory of every device below a limit. Repeated blocks are
folded: the N identical layers share one variable per operator, whose costs count N times, so depth is nearly free. A
tensor with several readers gets a node of its own, the layout it is converted to once.

The memory row is the state of the end of the forward pass, where saved activations peak; the exact curve over time is
computed for the chosen plan by ``costs.memory``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.cluster import Mesh
from shardwright.costs.compute import op_times
from shardwright.costs.optimizer import state_bytes, step_seconds
from shardwright.costs.redistribute import conversion_matrix
from shardwright.graph import Graph, Op, refs
from shardwright.graph.core import DTYPE_BYTES
from shardwright.graph.repeats import representatives
from shardwright.operators import analyse
from shardwright.operators.rules import (
    Layout,
    Need,
    OpRules,
    Split,
    Window,
    input_layouts,
    largest_shard,
    output_layouts,
)
from shardwright.operators.strategy import Strategy
from shardwright.search.choose import Edge, Problem, Usage
from shardwright.search.labels import Labels, label_loops
from shardwright.search.options import EVERYTHING, Restriction, layouts_of, settled, splits_of
from shardwright.search.prices import EdgePrices, places
from shardwright.search.recomputing import recomputation
from shardwright.search.saving import is_saved, needed_in_backward


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
    within: Restriction = EVERYTHING

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
        gathered = frozenset(
            p.tensor for p in self.graph.parameters if self._gathers(p.tensor, resting[p.tensor], splits)
        )
        again = gathered if self.graph.training and self.within.regather else frozenset()
        return Strategy(self.mesh.names, splits, resting, kept, again, self.recompute)

    def choice(self, strategy: Strategy) -> np.ndarray:
        """The choice a strategy describes, so that any strategy can be priced by this problem."""
        tables = {"op": strategy.splits, "parameter": strategy.resting, "kept": strategy.kept}
        picked = np.full(len(self.nodes), -1)
        for (kind, name), number in self.stands_for.items():
            if picked[number] < 0:
                picked[number] = list(self.nodes[number].options).index(tables[kind][name])
        return picked

    def _gathers(self, tensor: str, layout: Layout, splits: Mapping[str, Split]) -> bool:
        for op in self.graph.consumers[tensor]:
            needs = input_layouts(self.rules[op.name], splits[op.name], len(op.inputs))
            for name, need in zip(op.inputs, needs, strict=True):
                if name == tensor and any(isinstance(a, Shard) and a != b for a, b in zip(layout, need, strict=True)):
                    return True
        return False

    def memory(self, choice: np.ndarray) -> tuple[float, float]:
        """Bytes the search counts for a choice: of parameters with all that rests beside them, and of activations."""
        parts = {"parameter": 0.0, "op": 0.0}
        for node, _, _, amounts in self.problem.usages:
            parts[self.nodes[node].kind] += float(amounts[choice[node]])
        return parts["parameter"], parts["op"]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of what every node decides about: its result, its parameter, its tensor."""
        tensors, producers = self.graph.tensors, {op.name: op for op in self.graph.ops}
        made = {n.name: [o for o in producers[n.name].outputs if o] for n in self.nodes if n.kind == "op"}
        return np.array([sum(tensors[t].bytes for t in made.get(n.name, [n.name])) for n in self.nodes], dtype=float)


def formulate(
    graph: Graph,
    mesh: Mesh,
    *,
    optimiser: str = "adamw",
    memory_limit: float | None = None,
    within: Restriction = EVERYTHING,
    rules: Mapping[str, OpRules] | None = None,
    labels: Labels | None = None,
    fold: bool = True,
    overlap: float = 0.0,
    activation_scale: float = 1.0,
    recompute: Sequence[str] = (),
) -> Formulation:
    """State the choice of splits for ``graph`` on ``mesh`` as a :class:`Problem`.

    ``overlap`` discounts the traffic of parameters (gathers and gradient reductions), which an executor hides under
    computation; the sum proper, and every bound on it, has ``overlap=0``. ``activation_scale`` multiplies the estimate of
    saved activations, so that a search can be repeated with the ratio an exact memory curve has shown. ``recompute``
    names blocks that keep only what leaves them and run forward twice.
    """
    rules = rules or {op.name: analyse(op, graph.tensors) for op in graph.ops}
    labels = labels or label_loops(graph, rules)
    return _Builder(
        graph, mesh, optimiser, memory_limit, within, rules, labels, fold, overlap, activation_scale, recompute
    ).build()


class _Builder:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        optimiser: str,
        memory_limit: float | None,
        within: Restriction,
        rules: Mapping[str, OpRules],
        labels: Labels,
        fold: bool,
        overlap: float,
        activation_scale: float,
        recompute: Sequence[str],
    ) -> None:
        self.recompute = tuple(recompute)
        self.again = recomputation(graph, recompute, mesh.device.kind)
        self.activation_scale = activation_scale
        self.graph, self.mesh, self.optimiser, self.limit = graph, mesh, optimiser, memory_limit
        self.within, self.rules, self.labels = within, rules, labels
        self.standing = representatives(graph) if fold else {op.name: op.name for op in graph.ops}
        self.nodes: list[Node] = []
        self.costs: list[np.ndarray] = []
        self.number: dict[tuple[str, str], int] = {}
        self.amounts: dict[int, np.ndarray] = {}
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        self.prices = EdgePrices(mesh, within, graph.training, overlap)
        self.made: dict[tuple[int, int], list[Layout]] = {}
        self.needed: dict[tuple[int, int], list[tuple[Need, ...]]] = {}

    def build(self) -> Formulation:
        for op in self.graph.ops:
            self._operator(op)
        for parameter in self.graph.parameters:
            self._parameter(parameter.tensor)
        for tensor in self.graph.tensors:
            if tensor in self.graph.producer and len(self.graph.consumers[tensor]) > 1:
                self._kept(tensor)
                self._settle(tensor)
        for op in self.graph.ops:
            for position, name in enumerate(op.inputs):
                if name not in op.inputs[:position]:
                    self._edge(name, op)
        self._results()
        usages = [Usage(node, 0, 1, amounts) for node, amounts in sorted(self.amounts.items())]
        edges = [Edge(u, v, costs) for (u, v), costs in self.pairs.items()]
        problem = Problem(self.costs, edges, usages if self.limit is not None else (), self.limit, name="choice")
        counted = [0] * len(self.nodes)
        for number in self.number.values():
            counted[number] += 1
        nodes = tuple(Node(n.kind, n.name, n.options, c) for n, c in zip(self.nodes, counted, strict=True))
        return Formulation(self.graph, self.mesh, nodes, problem, self.number, self.rules, self.recompute, self.within)

    def _add(self, kind: str, name: str, options: Sequence, costs: np.ndarray) -> int:
        self.nodes.append(Node(kind, name, options, 1))
        self.costs.append(costs)
        self.number[kind, name] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def _again(self, kind: str, name: str, first: int, costs: np.ndarray) -> None:
        """Another occurrence of a folded node: same decision, its cost once more."""
        self.number[kind, name] = first
        self.costs[first] = self.costs[first] + costs

    def _operator(self, op: Op) -> None:
        first = self.standing[op.name]
        if first != op.name:
            node = self.number["op", first]
            self.number["op", op.name] = node
            self.costs[node] = self.costs[node] + self._base[node]
            if node in self.amounts:
                self.amounts[node] = self.amounts[node] + self._saved[node]
            return
        rules = self.rules[op.name]
        splits = splits_of(op, rules, self.mesh.sizes, dict(self.labels[op.name]), self.within)
        times = op_times(op, rules, self.graph.tensors, splits, self.mesh, training=self.graph.training)
        seconds = times.sum(axis=1) + (times[:, 0] if op.name in self.again.runs else 0.0)
        node = self._add("op", op.name, splits, seconds)
        self._base[node] = seconds
        saved = self._saved_bytes(op, rules, splits)
        if saved.any():
            self._saved[node] = self.amounts[node] = saved

    @cached_property
    def _base(self) -> dict[int, np.ndarray]:
        return {}

    @cached_property
    def _saved(self) -> dict[int, np.ndarray]:
        return {}

    def _saved_bytes(self, op: Op, rules: OpRules, splits: Sequence[Split]) -> np.ndarray:
        """Bytes of outputs that live until the backward pass, per split."""
        total = np.zeros(len(splits))
        if not self.graph.training or rules.kind == "view":
            return total
        for position, out in enumerate(op.outputs):
            if out is None or not (self._leaves_block(op, out) and is_saved(self.graph, self.rules, out)):
                continue
            tensor = self.graph.tensors[out]
            for i, split in enumerate(splits):
                layout = output_layouts(rules, split, len(op.outputs))[position]
                total[i] += largest_shard(tensor.shape, layout, self.mesh.sizes) * DTYPE_BYTES[tensor.dtype]
        return total * self.activation_scale

    def _leaves_block(self, op: Op, tensor: str) -> bool:
        """Whether a tensor outlives the block it is made in; inside a recomputed block nothing else is kept."""
        block, readers = self.again.block, self.graph.consumers[tensor]
        return op.name not in block or any(block.get(reader.name) != block[op.name] for reader in readers)

    def _parameter(self, tensor: str) -> None:
        meta = self.graph.tensors[tensor]
        readers = self.graph.consumers[tensor]
        owner = self.standing[readers[0].name] if readers else None
        if readers and owner != readers[0].name and len(readers) == 1:
            position = readers[0].inputs.index(tensor)
            twin = self._op_by_name[owner].inputs[position]  # type: ignore[index] # owner is an operator's name
            if ("parameter", twin) in self.number:
                node = self.number["parameter", twin]
                self._again("parameter", tensor, node, self._base[node])
                self.amounts[node] = self.amounts[node] + self._saved[node]
                return
        layouts = [layout for layout in layouts_of(meta, self.mesh.sizes) if self.within.rest(meta, layout)]
        layouts = layouts or [(Replicate(),) * len(self.mesh.sizes)]
        trainable = self.graph.parameter_of[tensor].trainable and self.graph.training
        local = [largest_shard(meta.shape, layout, self.mesh.sizes) for layout in layouts]
        sizes = [int(n) * DTYPE_BYTES[meta.dtype] for n in local]
        seconds = np.zeros(len(sizes))
        held = np.array(sizes, dtype=float)
        if trainable:  # the gradient rests as the parameter does
            launch = step_seconds(self.optimiser, [0], self.mesh.device)[0]  # one launch serves all parameters
            seconds = np.array([step_seconds(self.optimiser, [size], self.mesh.device)[0] - launch for size in sizes])
            inside = all(reader.name in self.again.block for reader in readers)
            if not (self.within.regather or inside):  # the gathered copy lives until backward
                held = held + meta.bytes
            held = held + np.array(sizes) + np.array([state_bytes(self.optimiser, [size]) for size in sizes])
        node = self._add("parameter", tensor, layouts, seconds)
        self._base[node] = seconds
        self._saved[node] = self.amounts[node] = held

    @cached_property
    def _op_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.graph.ops}

    def _kept(self, tensor: str) -> None:
        op = self.graph.producer[tensor]
        position = op.outputs.index(tensor)
        first = self.standing[op.name]
        if first != op.name:
            twin = self._op_by_name[first].outputs[position]
            if twin is not None and ("kept", twin) in self.number:
                self.number["kept", tensor] = self.number["kept", twin]
                return
        offered = list(self._made(op, position))
        for reader in self.graph.consumers[tensor]:
            offered += [tuple(_resting(p) for p in need) for need in self._needs(reader, tensor)]
        options = settled(offered) or [(Replicate(),) * len(self.mesh.sizes)]
        self._add("kept", tensor, options, np.zeros(len(options)))

    def _settle(self, tensor: str) -> None:
        """What bringing a shared tensor into its kept layout costs its producer, once."""
        maker, node = self.graph.producer[tensor], self.number["kept", tensor]
        made = self._made(maker, maker.outputs.index(tensor))
        again = self.graph.consumers[tensor][0].name in self.again.reads  # the change is made for its first reader
        self._pay(self.number["op", maker.name], node, tensor, made, self.nodes[node].options, again=again)

    def _made(self, op: Op, position: int) -> list[Layout]:
        """The layout of one output under every split; computed once for all repeats of the operator."""
        node = self.number["op", op.name]
        if (node, position) not in self.made:
            rules, splits = self.rules[op.name], self.nodes[node].options
            self.made[node, position] = [output_layouts(rules, s, len(op.outputs))[position] for s in splits]
        return self.made[node, position]

    def _needs(self, op: Op, tensor: str) -> list[tuple[Need, ...]]:
        """What every split needs of one input; computed once for all repeats of the operator."""
        node, position = self.number["op", op.name], op.inputs.index(tensor)
        if (node, position) not in self.needed:
            rules, splits = self.rules[op.name], self.nodes[node].options
            self.needed[node, position] = [input_layouts(rules, s, len(op.inputs))[position] for s in splits]
        return self.needed[node, position]

    def _edge(self, tensor: str, op: Op) -> None:
        """What it costs to bring ``tensor`` from where it is kept (made, or rests) to what ``op`` needs."""
        reader = self.number["op", op.name]
        needs = self._needs(op, tensor)
        again = op.name in self.again.reads
        if ("kept", tensor) in self.number:
            node = self.number["kept", tensor]
            self._pay(node, reader, tensor, self.nodes[node].options, needs, again=again)
        elif tensor in self.graph.producer:
            maker = self.graph.producer[tensor]
            node = self.number["op", maker.name]
            self._pay(node, reader, tensor, self._made(maker, maker.outputs.index(tensor)), needs, again=again)
        elif ("parameter", tensor) in self.number:
            node = self.number["parameter", tensor]
            reads = 2 if again or (self.within.regather and needed_in_backward(self.graph, op, tensor)) else 1
            self._pay(node, reader, tensor, self.nodes[node].options, needs, reads)
        else:
            arrives = [self.within.arrives.get(tensor, (Replicate(),) * len(self.mesh.sizes))]
            price = self.prices.price(self.graph.tensors[tensor], arrives, needs)[0]
            self.costs[reader] = self.costs[reader] + price

    def _pay(
        self,
        first: int,
        second: int,
        tensor: str,
        sources: Sequence,
        needs: Sequence,
        reads: int = 0,
        again: bool = False,
    ) -> None:
        """Add the price of an edge; ``reads`` and ``again`` as in :meth:`EdgePrices.price`."""
        costs = self.prices.price(self.graph.tensors[tensor], sources, needs, reads, again)
        if first == second:
            self.costs[first] = self.costs[first] + np.diag(costs)
            return
        key, matrix = ((first, second), costs) if first < second else ((second, first), costs.T)
        self.pairs[key] = self.pairs[key] + matrix if key in self.pairs else matrix

    def _results(self) -> None:
        """Producers pay for handing out results: sums are reduced, new buffer values made whole."""
        handed = [(r.name, False) for r in refs(self.graph.outputs)] + [(new, True) for _, new in self.graph.mutations]
        for tensor, whole in handed:
            if tensor not in self.graph.producer:
                continue
            maker = self.graph.producer[tensor]
            node = self.number["op", maker.name]
            made = self._made(maker, maker.outputs.index(tensor))
            if ("kept", tensor) in self.number:
                node = self.number["kept", tensor]
                made = list(self.nodes[node].options)
            target = [tuple(Replicate() if whole or isinstance(p, Partial) else p for p in layout) for layout in made]
            meta = self.graph.tensors[tensor]
            there, _ = conversion_matrix(
                meta.shape, meta.dtype, made, list(dict.fromkeys(target)), self.mesh, grad=False
            )
            columns = places(target, list(dict.fromkeys(target)))
            self.costs[node] = self.costs[node] + there[np.arange(len(made)), columns]


def _resting(need: Need) -> Replicate | Shard | Partial:
    return Shard(need.dim) if isinstance(need, Window) else need
