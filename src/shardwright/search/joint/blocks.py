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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cluster import Device, Mesh
from shardwright.errors import Infeasible, ProblemError
from shardwright.graph import Graph
from shardwright.graph.shorten import longest_run, shortened
from shardwright.operators import analyse
from shardwright.operators.strategy import Strategy
from shardwright.search.bills import Pricing
from shardwright.search.choose import solve
from shardwright.search.formulate import Described
from shardwright.search.formulation import Formulation
from shardwright.search.joint.parts import BLOCK, HEAD, TAIL, Parts, Priced, Sums, by_blocks, sums_of
from shardwright.search.labels import label_loops
from shardwright.search.narrowing import narrowed
from shardwright.search.options import EVERYTHING, Restriction, among
from shardwright.search.strategies import part_of, state

BYTE_PRICES = (0.0, 0.1, 1.0, 10.0)
"""Seconds per byte, in units of (all seconds / all bytes) of the fastest strategy."""
NAMED = ("data-parallel", "megatron", "fsdp")
"""Recipes priced beside, so that no answer is worse than a pipeline of them."""


@dataclass(frozen=True)
class Again:
    """What it takes that a block recomputes: ``seconds`` more, for bytes that it ``saves`` per micro-batch in flight."""

    seconds: float
    saves: float


NEVER = Again(0.0, 0.0)


@dataclass(frozen=True)
class BlockPrice:
    """One strategy on one mesh for one micro-batch size."""

    mesh: Mesh
    name: str
    strategy: Strategy
    seconds: Parts  # per micro-batch, forward and backward
    traffic: Parts  # of them, parameters on their way to their readers: what may hide under computation
    closing: Parts  # once per step: gradient sums over replicas, update
    resting: Parts  # bytes, whatever is in flight: parameters, optimizer state, gradients, gathered copies
    held: Parts  # bytes per micro-batch in flight
    wholly: Again  # where a block recomputes all of its activations
    lightly: Again  # where it recomputes what is cheap
    fastest: bool  # found without a price on bytes
    always: bool = False  # every block recomputes wholly, whether memory asks for it or not

    @property
    def devices(self) -> int:
        return self.mesh.devices

    def without_recomputing(self) -> BlockPrice:
        return replace(self, wholly=NEVER, lightly=NEVER)

    def corrected(self, held: float, saved: float) -> BlockPrice:
        """The same where blocks hold more per micro-batch, and save more or less by recomputing, than was priced."""
        light = max(self.lightly.saves + min(saved, 0.0), 0.0)  # what is held beyond the price may not be cheap
        return replace(
            self,
            held=replace(self.held, block=max(self.held.block + held, 0.0)),
            wholly=replace(self.wholly, saves=max(self.wholly.saves + saved, 0.0)),
            lightly=replace(self.lightly, saves=light),
        )

    def recomputing_everything(self) -> BlockPrice:
        """The same where every block recomputes, whether memory asks for it or not."""
        return replace(self, always=True)


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
        self._prices: dict[tuple[object, ...], list[BlockPrice]] = {}
        self._larger = described(larger)
        self._smaller = replace(described(smaller), known=self._larger.known)  # the same operators

    @cached_property
    def boundary_bytes(self) -> float:
        """Bytes of a micro-batch's activations that go from block to block."""
        run, ops = self.run, self.graph.ops
        made = {out for op in ops[run.start : run.start + run.period] for out in op.outputs if out is not None}
        later = {name for op in ops[run.start + run.period :] for name in op.inputs}
        return float(sum(self.graph.tensors[name].bytes for name in made & later))

    def prices(self, mesh: Mesh, microbatches: int, names: Sequence[str] = NAMED) -> list[BlockPrice]:
        """The strategies worth knowing on a mesh, when a step has so many micro-batches."""
        key = (mesh, microbatches, *names)
        if key not in self._prices:
            found = list(worth_knowing(self._larger, mesh, microbatches, self.optimizer, names))
            self._prices[key] = self._priced(found, microbatches)
        return self._prices[key]

    def alike(
        self, mesh: Mesh, kinds: Sequence[Device], microbatches: int, name: str
    ) -> dict[Device, BlockPrice] | None:
        """A recipe's strategy on a mesh of unlike devices, priced as if all were of each kind; none where there is none."""
        try:
            stated = [
                Priced.of(state(self._larger, replace(mesh, device=device, kinds=()), name, optimizer=self.optimizer))
                for device in (mesh.device, *kinds)
            ]
            problem = stated[0].stated.repriced(Pricing(once=1.0 / microbatches)).problem
            choice = np.asarray(solve(replace(problem, usages=(), usage_limit=None), time_limit=5.0).answer)
        except Infeasible:
            return None
        if any(one.stated.nodes != stated[0].stated.nodes for one in stated):
            return None  # what is worth choosing differs from kind to kind
        found = [Chosen.of(one, choice, name, True) for one in stated[1:]]
        return {kind: self._priced([one], microbatches)[0] for kind, one in zip(kinds, found, strict=True)}

    def _priced(self, found: Sequence[Chosen], microbatches: int) -> list[BlockPrice]:
        smaller, wholly, lightly = (
            restated(found, described, self.optimizer, recompute, light)
            for described, recompute, light in (
                (self._smaller, (), False),
                (self._larger, self._larger.blocks, False),
                (self._larger, self._larger.blocks, True),
            )
        )
        return [self._price(*each, microbatches) for each in zip(found, smaller, wholly, lightly, strict=True)]

    def _price(self, one: Chosen, smaller: Priced, wholly: Priced, lightly: Priced, microbatches: int) -> BlockPrice:
        counts = ((one.priced, self.count), (smaller, self.count - 1))
        sums = [self._sums(priced, one.strategy, blocks, microbatches) for priced, blocks in counts]

        def parts(key: str) -> Parts:
            large, small = (getattr(one, key) for one in sums)
            return Parts(float(large[HEAD]), max(float(large[BLOCK] - small[BLOCK]), 0.0), float(large[TAIL]))

        def again(priced: Priced) -> Again:
            once_more = self._sums(priced, one.strategy, self.count, microbatches)
            seconds = float(once_more.seconds[BLOCK] - sums[0].seconds[BLOCK])
            saves = float(sums[0].held[BLOCK] - once_more.held[BLOCK])
            return Again(max(seconds, 0.0) / self.count, max(saves, 0.0) / self.count)

        return BlockPrice(
            mesh=one.priced.stated.mesh,
            name=one.name,
            strategy=one.strategy,
            seconds=parts("seconds"),
            traffic=parts("traffic"),
            closing=parts("closing"),
            resting=parts("resting"),
            held=parts("held"),
            wholly=again(wholly),
            lightly=again(lightly),
            fastest=one.fastest,
        )

    def _sums(self, priced: Priced, strategy: Strategy, blocks: int, microbatches: int) -> Sums:
        return sums_of(priced, strategy, by_blocks(priced.stated, self.run, blocks), microbatches)


class Chosen(NamedTuple):
    """A solved choice of splits, by whose name, and whether it was found without a price on bytes."""

    priced: Priced
    choice: np.ndarray
    strategy: Strategy
    name: str
    fastest: bool

    @classmethod
    def of(cls, priced: Priced, choice: np.ndarray, name: str, fastest: bool) -> Chosen:
        return cls(priced, choice, priced.stated.strategy(choice), name, fastest)


def restated(
    found: Sequence[Chosen], described: Described, optimizer: str, recompute: Sequence[str], lightly: bool
) -> list[Priced]:
    """Problems of another graph with the same operators, or with blocks recomputed, that price choices made on one mesh:
    one for all that were made where everything is charged alike."""
    kinds = {one.name: EVERYTHING if (within := one.priced.stated.within).plain else within for one in found}
    problems: dict[str, Priced] = {}
    for within in {kind.name: kind for kind in kinds.values()}.values():
        chosen = [one for one in found if kinds[one.name] is within]
        alone = within & among([one.strategy for one in chosen])
        stated = state(
            described,
            chosen[0].priced.stated.mesh,
            optimizer=optimizer,
            recompute=recompute,
            lightly=lightly,
            within=alone,
        )
        problems[within.name] = Priced.of(stated)
    return [problems[kinds[one.name].name] for one in found]


def worth_knowing(
    described: Described, mesh: Mesh, microbatches: int, optimizer: str, names: Sequence[str]
) -> Iterator[Chosen]:
    """The strategies of a graph on a mesh between fastest and smallest, and the recipes ``names``."""
    whole = state(described, mesh, optimizer=optimizer)
    assert whole.price is not None
    at = cache(whole.price)

    def part(within: Restriction) -> Formulation | None:
        return narrowed(whole, within, described.labels, described.known[mesh], at) if within.plain else None

    for name in ("auto", *(names if mesh.devices > 1 else ())):
        try:
            stated = whole if name == "auto" else part(part_of(mesh, name))
            priced = Priced.of(stated or state(described, mesh, name, optimizer=optimizer))
        except Infeasible:
            continue
        per_step = priced.stated.repriced(Pricing(once=1.0 / microbatches)).problem
        free = replace(per_step, usages=(), usage_limit=None)
        amounts = [np.zeros(len(costs)) for costs in free.costs]
        for usage in per_step.usages:
            amounts[usage.node] = amounts[usage.node] + usage.amounts
        seen: set[bytes] = set()
        scale = 0.0
        for price in BYTE_PRICES if name == "auto" else BYTE_PRICES[:1]:
            weighted = replace(free, costs=[c + price * scale * a for c, a in zip(free.costs, amounts, strict=True)])
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
                yield Chosen.of(priced, choice, name, price == 0.0)


def described(graph: Graph) -> Described:
    """A graph with the rules of its operators."""
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    return Described(graph, rules, label_loops(graph, rules))
