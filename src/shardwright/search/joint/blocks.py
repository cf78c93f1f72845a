"""What a repeated block costs on a sub-mesh: seconds, bytes at rest and in flight, each priced once and then
composed.

A model with N alike blocks is cut to three of them (:mod:`shardwright.graph.shorten`); the choice of splits is stated
and solved on the sub-mesh by the same formulation as ever, and its costs are told apart by where their operators
stand: before the blocks, in them, after them. What a further block adds is the difference to two blocks. Solving with
bytes at several prices in seconds gives a few strategies between fastest and smallest (the corners of the trade-off),
so a stage that must hold more micro-batches can take a smaller one. Seconds are sums, as in the choice problem:
nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch.distributed.tensor import Shard

from shardwright.cluster import Mesh
from shardwright.errors import Infeasible, ProblemError
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.graph.repeats import Repeat
from shardwright.graph.shorten import longest_run, shortened
from shardwright.operators import analyse
from shardwright.operators.rules import Need, Placement, Window, input_layouts, largest_shard, local_shape
from shardwright.operators.strategy import Strategy
from shardwright.program.sums import replica_axes
from shardwright.search.choose import solve
from shardwright.search.formulate import END, FORWARD, UPDATE
from shardwright.search.formulation import Formulation, Node
from shardwright.search.labels import label_loops
from shardwright.search.saving import is_replaced
from shardwright.search.strategies import Described, state

HEAD, BLOCK, TAIL = range(3)
BYTE_PRICES = (0.0, 0.1, 1.0, 10.0)
"""Seconds per byte, in units of (all seconds / all bytes) of the fastest strategy."""
NAMED = ("data-parallel", "megatron", "fsdp")
"""Recipes priced beside, so that no answer is worse than a pipeline of them."""


@dataclass(frozen=True)
class Parts:
    """Something measured before the blocks, per block, and after them."""

    head: float
    block: float
    tail: float

    def of(self, blocks: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Of stages with so many blocks, which may be the first or the last."""
        return blocks * self.block + first * self.head + last * self.tail


@dataclass(frozen=True)
class BlockPrice:
    """One strategy on one mesh for one micro-batch size."""

    mesh: Mesh
    name: str
    strategy: Strategy
    seconds: Parts  # per micro-batch, forward and backward
    closing: Parts  # once per step: gradient sums over replicas, update
    resting: Parts  # bytes, whatever is in flight: parameters, optimizer state, gradients, gathered copies
    held: Parts  # bytes per micro-batch in flight
    recompute_seconds: float  # more, per block that recomputes its activations
    recompute_saves: float  # bytes per micro-batch in flight, per such block
    fastest: bool  # found without a price on bytes

    @property
    def devices(self) -> int:
        return self.mesh.devices

    def without_recomputing(self) -> BlockPrice:
        return replace(self, recompute_saves=0.0)

    def recomputing_everything(self) -> BlockPrice:
        """The same where every block recomputes; one block's activations are there in full meanwhile."""
        return replace(
            self,
            seconds=replace(self.seconds, block=self.seconds.block + self.recompute_seconds),
            held=replace(self.held, block=self.held.block - self.recompute_saves),
            resting=replace(self.resting, tail=self.resting.tail + self.held.block),
            recompute_saves=0.0,
        )


class BlockPricer:
    """Prices the blocks of one captured graph (of one micro-batch size) on meshes."""

    def __init__(self, graph: Graph, *, optimizer: str = "adamw") -> None:
        run = longest_run(graph)
        if run is None:
            raise ProblemError(
                "the model has no repeated blocks to build stages from.",
                "Use `shardwright place`, which cuts any graph into stages.",
            )
        self.graph, self.run, self.optimizer = graph, run, optimizer
        count = min(3, run.count)
        larger = graph if count == run.count else shortened(graph, count)
        smaller = shortened(graph, count - 1)
        if larger is None or smaller is None:
            raise ProblemError(
                "something outside the blocks reads from the middle of them, so they cannot be cut apart.",
                "Use `shardwright place`, which cuts any graph into stages.",
            )
        self.count = count
        self._larger, self._smaller = _described(larger), _described(smaller)

    @cached_property
    def boundary_bytes(self) -> float:
        """Bytes of a micro-batch's activations that go from block to block."""
        run, ops = self.run, self.graph.ops
        made = {out for op in ops[run.start : run.start + run.period] for out in op.outputs if out is not None}
        later = {name for op in ops[run.start + run.period :] for name in op.inputs}
        return float(sum(self.graph.tensors[name].bytes for name in made & later))

    def prices(self, mesh: Mesh, microbatches: int, names: Sequence[str] = NAMED) -> list[BlockPrice]:
        """The strategies worth knowing on a mesh, when a step has so many micro-batches."""
        found: list[BlockPrice] = []
        for name in ("auto", *(names if mesh.devices > 1 else ())):
            try:
                larger = state(self._larger, mesh, name, optimizer=self.optimizer)
            except Infeasible:
                continue
            per_step = replace(
                larger.problem,
                costs=[
                    costs / microbatches if node.kind == "parameter" else costs
                    for costs, node in zip(larger.problem.costs, larger.nodes, strict=True)
                ],
            )
            free = replace(per_step, usages=(), usage_limit=None)
            amounts = [np.zeros(len(costs)) for costs in free.costs]
            for usage in per_step.usages:
                amounts[usage.node] = amounts[usage.node] + usage.amounts
            seen: set[bytes] = set()
            scale = 0.0
            for price in BYTE_PRICES if name == "auto" else BYTE_PRICES[:1]:
                weighted = replace(
                    free, costs=[c + price * scale * a for c, a in zip(free.costs, amounts, strict=True)]
                )
                try:
                    solution = solve(weighted, time_limit=5.0)
                except Infeasible:
                    break
                choice = np.asarray(solution.answer)
                if not scale:
                    size = sum(float(a[k]) for a, k in zip(amounts, choice, strict=True))
                    scale = solution.cost / max(size, 1.0)
                if choice.tobytes() not in seen:
                    seen.add(choice.tobytes())
                    found.append(self._price(larger, choice, mesh, name, price == 0.0))
        return found

    def _price(self, larger: Formulation, choice: np.ndarray, mesh: Mesh, name: str, fastest: bool) -> BlockPrice:
        strategy = larger.strategy(choice)
        smaller = self._stated(self._smaller, larger, mesh, ())
        again_large = self._stated(self._larger, larger, mesh, self._larger.blocks)
        sums = [
            _sums(stated, stated.choice(strategy), self.run, blocks)
            for stated, blocks in ((larger, self.count), (smaller, self.count - 1))
        ]
        once_more = _sums(again_large, again_large.choice(strategy), self.run, self.count)

        def parts(key: int) -> Parts:
            large, small = sums[0][key], sums[1][key]
            return Parts(large[HEAD], max(large[BLOCK] - small[BLOCK], 0.0), large[TAIL])

        return BlockPrice(
            mesh=mesh,
            name=name,
            strategy=strategy,
            seconds=parts(0),
            closing=parts(1),
            resting=parts(2),
            held=parts(3),
            recompute_seconds=max(once_more[0][BLOCK] - sums[0][0][BLOCK], 0.0) / self.count,
            recompute_saves=max(sums[0][3][BLOCK] - once_more[3][BLOCK], 0.0) / self.count,
            fastest=fastest,
        )

    def _stated(self, described: Described, like: Formulation, mesh: Mesh, recompute: Sequence[str]) -> Formulation:
        """The same problem of another graph or with blocks recomputed, kept for the next strategy."""
        key = (id(described), mesh, bool(recompute), like.within.name)
        if key not in self._kept:
            self._kept[key] = state(
                described, mesh, "auto", optimizer=self.optimizer, recompute=recompute, within=like.within
            )
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict[tuple[object, ...], Formulation]:
        return {}


def _added_up(stated: Formulation, node: Node, choice: np.ndarray) -> float:
    """Bytes of a parameter's gradient beyond what the choice problem counts.

    From micro-batch to micro-batch it is added up as the parameter is read (:mod:`shardwright.simulator.held`): whole where
    that is gathered, and beside the buckets that replicas are summed in.
    """
    graph, sizes, readers = stated.graph, stated.mesh.sizes, stated.graph.consumers[node.name]
    if not readers or not graph.parameter_of[node.name].trainable:
        return 0.0
    op, meta = readers[0], graph.tensors[node.name]
    reader = stated.stands_for["op", op.name]
    needs = input_layouts(stated.rules[op.name], stated.nodes[reader].options[choice[reader]], len(op.inputs))
    read = _plain(needs[op.inputs.index(node.name)])
    rests = node.options[choice[stated.stands_for["parameter", node.name]]]
    counted = 0 if replica_axes(rests, sizes) else largest_shard(meta.shape, rests, sizes)
    return float((largest_shard(meta.shape, read, sizes) - counted) * DTYPE_BYTES[meta.dtype])


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


def _described(graph: Graph) -> Described:
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    return Described(graph, rules, label_loops(graph, rules))


def _sums(stated: Formulation, choice: np.ndarray, run: Repeat, blocks: int) -> list[list[float]]:
    """[what][part]: seconds per micro-batch, seconds per step, bytes at rest, bytes per micro-batch held."""
    graph = stated.graph
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
    totals = [[0.0] * 3 for _ in range(4)]
    saving = {usage.node for usage in stated.problem.usages}
    for node, part, costs, pick in zip(stated.nodes, parts, stated.problem.costs, choice, strict=True):
        totals[1 if node.kind == "parameter" else 0][part] += float(costs[pick])
        if node.kind == "parameter":
            totals[2][part] += _added_up(stated, node, choice) * node.times
        elif (
            node.kind == "op"
            and stated.rules[node.name].kind == "attention"
            and stated.stands_for["op", node.name] in saving
        ):
            totals[3][part] += _probabilities(stated, node, choice) * node.times
    for edge in stated.problem.edges:
        ends = sorted((parts[edge.first], parts[edge.second]))
        part = ends[0] if ends[0] == ends[1] else HEAD if ends == [HEAD, BLOCK] else TAIL
        totals[0][part] += float(edge.costs[choice[edge.first], choice[edge.second]])
    for usage in stated.problem.usages:
        amount = float(usage.amounts[choice[usage.node]])
        flies = stated.nodes[usage.node].kind != "parameter" and (usage.start, usage.stop) == (FORWARD, UPDATE)
        assert usage.stop <= END
        totals[3 if flies else 2][parts[usage.node]] += amount
    return totals
