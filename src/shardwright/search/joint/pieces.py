"""What the stages of a general graph cost on a sub-mesh: each the difference of two ideals, from prices per operator.

The choice of splits is stated and solved on the micro-batch's whole graph, where alike blocks share their decisions already;
its costs are told apart operator by operator and added up per ideal, so that a stage between two of them costs their
difference. What a stage recomputes are the blocks of which it has operators (those that are recomputed on one mesh too),
all of them or none, wholly or lightly; where a model has no such blocks, nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from shardwright.cluster import Mesh
from shardwright.graph import Graph
from shardwright.graph.repeats import span_of
from shardwright.operators.strategy import Strategy
from shardwright.search.joint.blocks import NAMED, Chosen, described, restated, worth_knowing
from shardwright.search.joint.ideals import Ideals
from shardwright.search.joint.parts import Priced, Sums, Where, by_operators, sums_of
from shardwright.search.joint.problem import Floats
from shardwright.search.strategies import state


@dataclass(frozen=True, eq=False)
class ByIdeal:
    """Something measured of every ideal."""

    amounts: Floats

    def of(self, start: np.ndarray, end: np.ndarray) -> Floats:
        """Of stages between ideals."""
        found: Floats = self.amounts[end] - self.amounts[start]
        return found


@dataclass(frozen=True, eq=False)
class AllAgain:
    """What it takes that all blocks of a stage recompute: ``seconds`` more, for bytes that it ``saves`` per micro-batch in
    flight; while one is computed again, at most so many bytes are there ``meanwhile``."""

    seconds: ByIdeal
    saves: ByIdeal
    meanwhile: float
    less: float = 0.0
    """Bytes that each block was found to save less than that."""

    def saved(self, kinds: np.ndarray, blocks: np.ndarray) -> Floats:
        return np.maximum(self.saves.of(*kinds) - self.less * blocks, 0.0)


@dataclass(frozen=True, eq=False)
class PiecePrice:
    """One strategy on one mesh for one micro-batch size; as :class:`~shardwright.search.joint.blocks.BlockPrice`, but for
    stages between ideals."""

    mesh: Mesh
    name: str
    strategy: Strategy
    seconds: ByIdeal
    traffic: ByIdeal
    closing: ByIdeal
    resting: ByIdeal
    held: ByIdeal
    wholly: AllAgain
    lightly: AllAgain
    blocks: np.ndarray  # [start, end]: blocks of a stage that may recompute
    fastest: bool
    always: bool = False  # every block recomputes wholly, whether memory asks for it or not

    @property
    def devices(self) -> int:
        return self.mesh.devices

    def without_recomputing(self) -> PiecePrice:
        return replace(self, blocks=np.zeros_like(self.blocks))

    def recomputing_everything(self) -> PiecePrice:
        """The same where every block recomputes, whether memory asks for it or not."""
        return replace(self, always=True)

    def corrected(self, held: float, saved: float) -> PiecePrice:
        """The same where stages hold more, so many bytes for every number between their ideals, and blocks save more or
        less than they were priced at."""
        more = ByIdeal(self.held.amounts + held * np.arange(len(self.blocks)))
        less = max(-saved, 0.0)
        wholly, lightly = (replace(one, less=one.less + less) for one in (self.wholly, self.lightly))
        return replace(self, held=more, wholly=wholly, lightly=lightly)


class PiecePricer:
    """Prices the stages of one captured graph (of one micro-batch size) on meshes; ``alone`` is a device by whose seconds
    its pieces are made."""

    def __init__(self, graph: Graph, alone: Mesh, *, optimizer: str = "adamw") -> None:
        self.graph, self.optimizer = graph, optimizer
        self._described = described(graph)
        whole = Priced.of(state(self._described, alone, "auto", optimizer=optimizer))
        of_op = {name: number for (kind, name), number in whole.stated.stands_for.items() if kind == "op"}
        work = {name: float(whole.each.costs[k].min()) / whole.stated.nodes[k].times for name, k in of_op.items()}
        self.ideals = Ideals.of(graph, work)
        self._where: WeakKeyDictionary[Priced, Where] = WeakKeyDictionary()

    def prices(self, mesh: Mesh, microbatches: int, names: Sequence[str] = NAMED) -> list[PiecePrice]:
        """The strategies worth knowing on a mesh, when a step has so many micro-batches."""
        found = list(worth_knowing(self._described, mesh, microbatches, self.optimizer, names))
        recompute = self._described.blocks
        wholly, lightly = (
            restated(found, self._described, self.optimizer, recompute, light) if recompute else [None] * len(found)
            for light in (False, True)
        )
        return [self._price(*each, microbatches) for each in zip(found, wholly, lightly, strict=True)]

    def _price(self, one: Chosen, wholly: Priced | None, lightly: Priced | None, microbatches: int) -> PiecePrice:
        strategy, count = one.strategy, self.ideals.count
        sums = self._sums(one.priced, strategy, microbatches)

        def again(priced: Priced | None, light: bool) -> AllAgain:
            if priced is None:
                return AllAgain(ByIdeal(np.zeros(count)), ByIdeal(np.zeros(count)), 0.0)
            more = self._sums(priced, strategy, microbatches)
            saves = sums.held - more.held
            largest = float((saves if light else sums.held)[count:].max())
            return AllAgain(ByIdeal((more.seconds - sums.seconds)[:count]), ByIdeal(saves[:count]), largest)

        return PiecePrice(
            mesh=one.priced.stated.mesh,
            name=one.name,
            strategy=strategy,
            seconds=ByIdeal(sums.seconds[:count]),
            traffic=ByIdeal(sums.traffic[:count]),
            closing=ByIdeal(sums.closing[:count]),
            resting=ByIdeal(sums.resting[:count]),
            held=ByIdeal(sums.held[:count]),
            wholly=again(wholly, light=False),
            lightly=again(lightly, light=True),
            blocks=self.ideals.blocks,
            fastest=one.fastest,
        )

    def _sums(self, priced: Priced, strategy: Strategy, microbatches: int) -> Sums:
        """By ideal, and then by block that may recompute."""
        if priced not in self._where:
            members = np.zeros((len(self._described.blocks), len(self.graph.ops)), dtype=bool)
            for number, path in enumerate(self._described.blocks):
                members[number, list(span_of(self.graph, path))] = True
            parts = np.concatenate([self.ideals.members, members]).astype(float)
            self._where[priced] = by_operators(priced.stated).gathered(parts)
        return sums_of(priced, strategy, self._where[priced], microbatches)
