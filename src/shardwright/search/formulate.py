"""From a graph and a mesh to the choice problem: nodes are operators, parameters and shared tensors, edges are layouts.

Minimise the sum of node costs (an operator's seconds forward and backward, a parameter's optimizer step) and edge costs
(the change of layout forward plus its backward dual), with the memory of every device below a limit. Repeated blocks are
folded: the N identical layers share one variable per operator, whose costs count N times; what they pay on their edges is
counted first and priced once, so depth is nearly free. A tensor with several readers gets a node of its own, the layout it
is converted to once.

Memory is counted at two moments: the end of the forward pass, where saved activations peak, and the update, where all
gradients are there (and, as expected but not for sure, the update's temporaries: steps that are recorded have none); the
exact curve over time is computed for the chosen plan by ``costs.memory``.

One statement can be priced in several ways (:class:`Pricing`): as the search expects a step to cost, with parameter traffic
taken to be hidden, and as no execution of a strategy undercuts, whatever shares its bundles and buckets and whatever it
keeps gathered: the optimum at those prices bounds the summed seconds of every plan that can be delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor import Partial, Replicate

from shardwright.cluster import Mesh
from shardwright.costs.compute import op_times
from shardwright.costs.optimizer import optimizer, state_bytes, step_seconds
from shardwright.costs.redistribute import Weights, conversion_matrix
from shardwright.graph import Graph, Op, refs
from shardwright.graph.backward import differentiated
from shardwright.graph.core import DTYPE_BYTES
from shardwright.graph.repeats import block_paths, representatives
from shardwright.operators import analyse
from shardwright.operators.rules import (
    Layout,
    Need,
    OpRules,
    Split,
    input_layouts,
    largest_shard,
    output_layouts,
    own_axes,
)
from shardwright.program.bundles import shares
from shardwright.program.sums import replica_axes
from shardwright.search.bills import EXPECTED, Bill, Change, Handed, Pricing, Seconds
from shardwright.search.choose import Problem, Usage
from shardwright.search.formulation import Formulation, Node
from shardwright.search.labels import Labels, label_loops
from shardwright.search.options import (
    EVERYTHING,
    Restriction,
    SplitTable,
    kept_layouts,
    layouts_of,
    rows_within,
    splits_of,
)
from shardwright.search.prices import EdgePrices, places
from shardwright.search.recomputing import recomputation
from shardwright.search.saving import needed_in_backward, saved_bytes, saving

FORWARD, UPDATE, END = 0, 1, 2
"""Moments of a step: the end of the forward pass lasts until the update, the update until the end."""


class Timed(NamedTuple):
    """Every split of an operator on a mesh and its seconds, one row each."""

    every: SplitTable
    seconds: np.ndarray


Known = dict[str, Timed]
"""What a statement over the whole space found out about operators, for narrower statements about the same graph and mesh."""


@dataclass(frozen=True, eq=False)
class Described:
    """A graph with what every search on it shares: the rules of its operators and the labels of their loops."""

    graph: Graph
    rules: Mapping[str, OpRules]
    labels: Labels
    known: dict[Mesh, Known] = field(default_factory=dict)
    """What a search over the whole space found out about operators on a mesh, for narrower ones there."""

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that recomputation is about; none where there is no backward pass."""
        return block_paths(self.graph) if self.graph.training else ()


def describe_graph(graph: Graph) -> Described:
    """The rules and labels every search on this graph shares.

    >>> describe_graph(graph).labels["matmul"]  # doctest: +SKIP
    """
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    return Described(graph, rules, label_loops(graph, rules))


def formulate(
    graph: Graph | Described,
    mesh: Mesh,
    *,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    within: Restriction = EVERYTHING,
    recompute: Sequence[str] = (),
    lightly: bool = False,
) -> Formulation:
    """State the choice of splits for ``graph`` on ``mesh`` as a :class:`Problem`.

    ``recompute`` names blocks that keep only what leaves them and run forward twice, or (``lightly``) of which what is cheap
    does. Without a ``memory_limit`` memory is not counted.
    """
    described = graph if isinstance(graph, Described) else describe_graph(graph)
    return _Builder(described, mesh, optimizer, memory_limit, within, recompute, lightly).build()


class Home(NamedTuple):
    """Where a tensor is found: the node that decides its layout, and which output of it where that is an operator."""

    node: int
    position: int = -1


class Held(NamedTuple):
    """Bytes per option that a node holds from one moment to another: as expected, and surely."""

    start: int
    stop: int
    expected: np.ndarray
    sure: np.ndarray


class _Builder:
    def __init__(
        self,
        described: Described,
        mesh: Mesh,
        optimizer: str,
        memory_limit: float | None,
        within: Restriction,
        recompute: Sequence[str],
        lightly: bool,
    ) -> None:
        graph, rules, labels = described.graph, described.rules, described.labels
        self.known = described.known.setdefault(mesh, {})
        self.recompute = tuple(recompute)
        self.differentiated = differentiated(graph)
        self.again = recomputation(graph, recompute, mesh.device.kind, rules, lightly)
        self.saving = saving(graph, mesh.device.kind, self.again)
        self.graph, self.mesh, self.optimizer, self.limit = graph, mesh, optimizer, memory_limit
        self.within, self.rules, self.labels = within, rules, labels
        self.standing = representatives(graph) if within.fold else {op.name: op.name for op in graph.ops}
        self.op_by_name = {op.name: op for op in graph.ops}
        self.nodes: list[Node] = []
        self.seconds: list[Seconds] = []
        self.times: list[int] = []
        self.held: dict[int, list[Held]] = {}
        self.number: dict[tuple[str, str], int] = {}
        self.homes: dict[str, Home] = {}
        self.changes: dict[Hashable, Change] = {}
        self.handed: list[Handed] = []
        self.prices = EdgePrices(mesh, within, graph.training)
        trained = [p.tensor for p in graph.parameters if p.trainable]
        self.trained = graph.tensors[trained[0]].dtype if trained else "float32"
        self.largest = max((graph.tensors[p.tensor].bytes for p in graph.parameters), default=0)
        self.made: dict[tuple[int, int], list[Layout]] = {}
        self.needed: dict[tuple[int, int], list[tuple[Need, ...]]] = {}

    def build(self) -> Formulation:
        for op in self.graph.ops:
            self._operator(op)
        for parameter in self.graph.parameters:
            self._parameter(parameter.tensor)
        for tensor, maker in self.graph.producer.items():
            # Rows in orders of their own go from operator to operator as they are.
            if len(self.graph.consumers[tensor]) > 1 and self.graph.tensors[tensor].order is None:
                self._kept(tensor, maker)
        for op in self.graph.ops:
            for position, name in enumerate(op.inputs):
                if name not in op.inputs[:position]:
                    self._edge(name, op, position)
        self._results()
        together, bundled = self.within.together, shares(self.graph, self.recompute)
        changes = tuple(self.changes.values())
        bill = Bill(self.graph, self.prices, self.seconds, changes, self.handed, bundled, together)
        usages = {sure: self._usages(sure) if self.limit is not None else () for sure in (False, True)}

        def priced(pricing: Pricing) -> Problem:
            costs, edges = bill.total(pricing)
            return Problem(costs, edges, usages[pricing.least], self.limit, name="choice")

        nodes = tuple(replace(node, times=times) for node, times in zip(self.nodes, self.times, strict=True))
        problem, light = priced(EXPECTED), self.again.lightly
        return Formulation(
            self.graph, self.mesh, nodes, problem, self.number, self.rules, self.recompute, light, self.within, priced
        )

    def _usages(self, sure: bool) -> tuple[Usage, ...]:
        return tuple(
            Usage(node, held.start, held.stop, (held.sure if sure else held.expected) * self.times[node])
            for node, entries in sorted(self.held.items())
            for held in entries
        )

    def _add(self, kind: str, name: str, options: Sequence, seconds: Seconds) -> int:
        """A new decision; every further occurrence of it is one more of its ``times``."""
        self.nodes.append(Node(kind, name, options, 1))
        self.seconds.append(seconds)
        self.times.append(1)
        self.number[kind, name] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def _again(self, kind: str, name: str, node: int) -> int:
        """Another occurrence of a folded node: the same decision, its cost once more."""
        self.number[kind, name] = node
        self.times[node] += 1
        return node

    def _operator(self, op: Op) -> None:
        first = self.standing[op.name]
        node = self._again("op", op.name, self.number["op", first]) if first != op.name else self._first(op)
        self.seconds[node].runs += 1 + (op.name in self.again.runs)
        self.seconds[node].backs += op.name in self.differentiated
        for position, out in enumerate(op.outputs):
            if out is not None:
                self.homes[out] = Home(node, position)

    def _first(self, op: Op) -> int:
        rules = self.rules[op.name]
        splits, times = self._timed(op, rules)
        node = self._add("op", op.name, splits, Seconds(times[:, 0], times[:, 1]))
        saved = saved_bytes(
            self.graph, op, rules, splits, self.saving.get(representatives(self.graph)[op.name], ()), self.mesh.sizes
        )
        if saved.expected.any():
            self.held[node] = [Held(FORWARD, UPDATE, saved.expected, saved.sure)]
        return node

    def _timed(self, op: Op, rules: OpRules) -> tuple[list[Split], np.ndarray]:
        """The splits that are allowed and their seconds, looked up where a wider statement has timed them."""
        labels, known = dict(self.labels[op.name]), self.known.get(op.name)
        if known is not None:
            rows = rows_within(op, rules, self.mesh.sizes, labels, self.within, known.every)
            return [known.every.splits[row] for row in rows], known.seconds[rows]
        splits = splits_of(op, rules, self.mesh.sizes, labels, self.within)
        times = op_times(op, rules, self.graph.tensors, splits, self.mesh, training=self.graph.training)
        if self.within.any_split:
            self.known[op.name] = Timed(SplitTable.of(splits), times)
        return splits, times

    def _parameter(self, tensor: str) -> None:
        meta = self.graph.tensors[tensor]
        readers = self.graph.consumers[tensor]
        owner = self.standing[readers[0].name] if readers else None
        if owner is not None and owner != readers[0].name and len(readers) == 1:
            twin = self.op_by_name[owner].inputs[readers[0].inputs.index(tensor)]
            if ("parameter", twin) in self.number:
                node = self._again("parameter", tensor, self.number["parameter", twin])
                self._owned(tensor, node)
                return
        layouts = [layout for layout in layouts_of(meta, self.mesh.sizes) if self.within.rest(meta, layout)]
        layouts = layouts or [(Replicate(),) * len(self.mesh.sizes)]
        gets = any(reader.name in self.differentiated for reader in readers)  # else the optimizer passes it over
        trainable = self.graph.parameter_of[tensor].trainable and gets
        local = [largest_shard(meta.shape, layout, self.mesh.sizes) for layout in layouts]
        sizes = [int(n) * DTYPE_BYTES[meta.dtype] for n in local]
        seconds, own = np.zeros(len(sizes)), np.array(sizes, dtype=float)
        sums = np.zeros(len(sizes))
        least_sums: Callable[[Weights], np.ndarray] = lambda weights: sums
        rests, saved, updated = own, np.zeros(len(sizes)), np.zeros(len(sizes))
        passing = np.zeros(len(sizes))
        if trainable:  # the gradient rests as the parameter does
            launch = self._update(0)  # one launch serves all parameters
            seconds = np.array([self._update(size) - launch for size in sizes])
            sums = self.prices.sums(layouts, sizes)
            alone = len(readers) == 1
            least_sums = cache(lambda weights: self.prices.least_sums(layouts, sizes, self.largest, alone, weights))
            rests = own + np.array([state_bytes(self.optimizer, [size], meta.dtype) for size in sizes])
            summed = np.array([bool(replica_axes(layout, self.mesh.sizes)) for layout in layouts])
            rests = rests + own * summed  # the buckets that replicas are summed in live on from step to step
            updated = own * ~summed
            if self.mesh.device.kind == "cuda" and optimizer(self.optimizer).states == 2:
                passing = own  # Adam's denominators, of all parameters at once, which a recorded step does not have
            inside = not self.again.lightly and all(reader.name in self.again.block for reader in readers)
            if not (self.within.regather or inside):  # the gathered copy lives until backward
                saved = saved + meta.bytes
        node = self._add("parameter", tensor, layouts, Seconds(seconds, sums, least_sums))
        self._owned(tensor, node)
        spans = ((FORWARD, END, rests), (FORWARD, UPDATE, saved))
        self.held[node] = [Held(start, stop, amounts, amounts) for start, stop, amounts in spans if amounts.any()]
        if (updated + passing).any():
            self.held[node].append(Held(UPDATE, END, updated + passing, updated))

    def _update(self, size: int) -> float:
        return step_seconds(self.optimizer, [size], self.mesh.device, self.trained)[0]

    def _owned(self, tensor: str, node: int) -> None:
        """One more parameter that rests as a node decides: updated, and summed where a gradient comes."""
        self.homes[tensor] = Home(node)
        self.seconds[node].runs += 1
        self.seconds[node].backs += any(op.name in self.differentiated for op in self.graph.consumers[tensor])

    def _kept(self, tensor: str, op: Op) -> None:
        """A shared tensor's own decision; bringing it there costs its producer, once for all readers."""
        made_at = self.homes[tensor]
        first = self.graph.consumers[tensor][0]  # for whom the change is made
        again = (first.name, tensor) in self.again.reads
        twin = self.op_by_name[self.standing[op.name]].outputs[made_at.position]
        if twin is not None and twin != tensor and ("kept", twin) in self.number:
            node = self._again("kept", tensor, self.number["kept", twin])
        else:
            options = self._keeping(tensor, self._made(op, made_at.position))
            node = self._add("kept", tensor, options, Seconds.none(len(options)))
        self.homes[tensor] = Home(node)
        key = ("settle", made_at, node, again)
        if key not in self.changes:
            made = self._made(op, made_at.position)
            self.changes[key] = Change(tensor, made_at.node, made, node, self.nodes[node].options, again=again)
        self.changes[key].times += 1
        self.changes[key].backs += op.name in self.differentiated

    def _keeping(self, tensor: str, made: Sequence[Layout]) -> Sequence[Layout]:
        """In which layouts a shared tensor may be kept."""
        if tensor in self.within.kept:
            return self.within.kept[tensor]
        needs = [self._needs(reader, tensor) for reader in self.graph.consumers[tensor]]
        return kept_layouts(made, needs, len(self.mesh.sizes))

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

    def _edge(self, tensor: str, op: Op, position: int) -> None:
        """What it costs to bring ``tensor`` from where it is kept (made, or rests) to what ``op`` needs."""
        reader, again, home = self.number["op", op.name], (op.name, tensor) in self.again.reads, self.homes.get(tensor)
        arrives = self.within.arrives.get(tensor) if home is None else None
        meta = self.graph.tensors[tensor]
        key = (home or (meta.shape, meta.dtype, meta.grad, arrives), reader, position, again)
        change = self.changes.get(key)
        if change is None:
            change = self.changes[key] = self._change(tensor, op, home, again, arrives)
        change.times += 1
        change.backs += op.name in self.differentiated
        change.sharers = max(change.sharers, len(self.graph.consumers[tensor]))

    def _change(self, tensor: str, op: Op, home: Home | None, again: bool, arrives: Layout | None) -> Change:
        needs, reader = self._needs(op, tensor), self.number["op", op.name]
        if home is None:
            sources = [arrives or (Replicate(),) * len(self.mesh.sizes)]
            return Change(tensor, -1, sources, reader, needs)
        kind = self.nodes[home.node].kind
        parameter, settled = kind == "parameter", kind == "kept"
        twice = parameter and self.within.regather and needed_in_backward(self.graph, op, tensor, self.mesh.device.kind)
        made = self._made(self.graph.producer[tensor], home.position) if home.position >= 0 else None
        given: Sequence = made or self.nodes[home.node].options
        apart = None
        if self.graph.tensors[tensor].order is not None and tensor in self.graph.producer:
            makers, readers = (np.array([own_axes(s) for s in self.nodes[n].options]) for n in (home.node, reader))
            apart = (makers[:, None] != readers[None]).any(axis=2)
        return Change(tensor, home.node, given, reader, needs, parameter, again, twice, settled, apart=apart)

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
            shared = whole and bool(self.graph.consumers[tensor])
            self.handed.append(Handed(node, there[np.arange(len(made)), columns], shared))
