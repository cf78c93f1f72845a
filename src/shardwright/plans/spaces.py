"""Which plans a search may choose among, as data: what a bound speaks of, and whether a plan is one of them.

A space says what is decided how: on which meshes, recomputing what, in how many micro-batches and stages, by which recipe,
under which pins. Everything in it belongs to one model, one cluster and one optimizer: those of the plan beside it.
Words for people are made of it last (:mod:`shardwright.plans.proof_text`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, representatives
from shardwright.operators.strategy import Strategy
from shardwright.plans.stages import Stage, strategy_text
from shardwright.program import FixedDecisions

if TYPE_CHECKING:
    from shardwright.plans.plan import Plan

Axes = tuple[tuple[str, int], ...]

NOTHING, LIGHT, WHOLE, SOME = "none", "light", "blocks", "some"
"""What of the repeated blocks is computed again: nothing, what is cheap of all of them, all of them, or of some."""

EVERY_STRATEGY, PIPELINE = "auto", "pipeline"
"""Names of searches: over every strategy of one mesh, over pipelines."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Plans among which is chosen. Empty ``meshes`` and ``microbatches`` are any.

    ``search``: ``auto`` has every strategy, any other name the plans that are found by it. ``meshes`` are those of a stage.
    ``alike``: equal blocks are split alike. ``faster_share``: rows are dealt out in unequal shares, and devices of that
    kind never have fewer than in equal parts; in equal parts where it is empty. No device needs more than ``memory_limit``
    bytes. ``given_stages`` is the fingerprint (:func:`stages_fingerprint`) of stages that are settled, so that the order of
    their passes is what is chosen; ``cuts`` says between what stages are cut, ``orders`` in which orders passes run.
    ``summed``: a step is what the search sums it to, in which nothing overlaps, so that a simulated one may be shorter.
    """

    search: str = EVERY_STRATEGY
    meshes: tuple[Axes, ...] = ()
    alike: bool = True
    faster_share: str = ""
    recompute: tuple[str, ...] = (NOTHING,)
    pins: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    memory_limit: float | None = None
    training: bool = True
    most_stages: int = 1
    microbatches: tuple[int, ...] = (1,)
    cuts: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    given_stages: str = ""
    summed: bool = False

    def recomputing(self, way: str) -> SearchSpace:
        """The part of the space in which blocks recompute in one way.

        >>> SearchSpace(recompute=(NOTHING, WHOLE)).recomputing(WHOLE).recompute
        ('blocks',)
        """
        return replace(self, recompute=(way,))

    def contains(self, plan: Plan) -> bool:
        """Whether a plan of the same model, cluster and optimizer is in the space, as far as its data tells: one that was
        found by another name, or without the pins, counts as outside even where it comes to the same.

        >>> SearchSpace(microbatches=(4,)).contains(plan)                                        # doctest: +SKIP
        False
        """
        limit, asked = self.memory_limit, plan.asked
        return (
            (self.search == EVERY_STRATEGY or self.search == plan.search)
            and self.training == plan.signature.training
            and len(plan.stages) <= self.most_stages
            and (not self.microbatches or plan.microbatches in self.microbatches)
            and set(self.pins) <= set(asked.pins)
            and set(self.forbidden) <= set(asked.forbidden)
            and (limit is None or plan.prediction.memory_bytes <= limit)
            and (not self.given_stages or stages_fingerprint(plan.stages) == self.given_stages)
            and all(not self.meshes or stage.strategy.axes in self.meshes for stage in plan.stages)
            and (self.search == PIPELINE or self._dealt_out(plan))
            and self._graph_keeps(plan)
        )

    def _dealt_out(self, plan: Plan) -> bool:
        """Whether rows are in equal parts, or the faster devices have no fewer."""
        for stage, mesh in zip(plan.stages, plan.meshes, strict=True):
            shares = stage.strategy.shares
            if not self.faster_share and shares:
                return False
            for name, each in shares.items():
                if name != stage.strategy.axes[0][0] or len(mesh.kinds) != len(each):
                    return False  # only nodes are dealt to
                for kind, share in zip(mesh.kinds, each, strict=True):
                    if kind.name == self.faster_share and share * len(each) < 1:
                        return False
        return True

    def _graph_keeps(self, plan: Plan) -> bool:
        """What only the graph tells: that equal blocks are split alike, and how many of them recompute."""
        every_way = {NOTHING, LIGHT, WHOLE, SOME} <= set(self.recompute)
        if self.given_stages or self.search == PIPELINE or (every_way and not self.alike):
            return True
        try:
            graph = plan.graph(trusted=True)
        except ShardwrightError:  # the plan holds none
            return False
        return all(
            recomputed_of(graph, stage.strategy) in self.recompute
            and (not self.alike or blocks_alike(graph, stage.strategy))
            for stage in plan.stages
        )


def stages_fingerprint(stages: Sequence[Stage]) -> str:
    """What tells stages apart: operators, ranks and strategies."""
    told = [[stage.operators, stage.ranks, strategy_text(stage.strategy, FixedDecisions())] for stage in stages]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def recomputed_of(graph: Graph, strategy: Strategy) -> str:
    """What a strategy computes again of a graph's repeated blocks."""
    if not strategy.recomputed:
        return NOTHING
    again, light = set(strategy.recomputed), set(strategy.lightly)
    if again != set(block_paths(graph)) or (light and light != again):
        return SOME
    return LIGHT if light else WHOLE


def blocks_alike(graph: Graph, strategy: Strategy) -> bool:
    """Whether equal blocks are split alike, and what they read rests alike."""
    inputs = {op.name: op.inputs for op in graph.ops}
    return all(
        strategy.splits.get(name) == strategy.splits.get(first)
        and all(
            strategy.resting.get(mine) == strategy.resting.get(theirs)
            for mine, theirs in zip(inputs[name], inputs[first], strict=True)
            if mine in strategy.resting and theirs in strategy.resting
        )
        for name, first in representatives(graph).items()
    )
