"""Pipelines of our own priced blocks: cuts, devices and mesh per stage, strategy, micro-batch size, recomputing,
together.

Per micro-batch size every sub-mesh's strategies are priced once; a stage is a run of alike blocks (the first with what comes
before them, the last with what comes after: :mod:`~shardwright.search.joint.blocks`) or what lies between two ideals of a
general graph (:mod:`~shardwright.search.joint.pieces`; :mod:`~shardwright.search.joint.readings` says which) on one of the
meshes with one of the strategies, and as many of its blocks recompute as its memory asks for. Stages stand in a line of
devices; one across the border of unlike nodes deals its rows out by speed (:mod:`~shardwright.search.joint.shares`; runs of
blocks only); transfers between stages cost more where that border is between nodes. The best composition is found exactly
and timed as 1F1B by event simulation; from there the other orders of passes are searched
(:mod:`~shardwright.search.joint.orders`), those of two stages per group of devices for runs of blocks only.

The bound is on the step, over this space at these prices: no order of the passes of any of its pipelines (that holds what
1F1B holds or more, as all that are tried do) is faster than its busiest stage's micro-batches and closing, after filling the
stages before it and before the gradients of its last inputs are back through them; where groups of devices run two stages
each, after filling the first of each, and in interleaved 1F1B draining them. Where a model is read in two ways, the bound is
the smaller of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from math import inf
from typing import TypeVar

from shardwright.cluster import Cluster
from shardwright.errors import Infeasible, ProblemError
from shardwright.search.conditions import ANY, Conditions
from shardwright.search.joint.found import JointPlan, JointStage, Model
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.readings import computing_all_the_time, readings
from shardwright.search.joint.recipes import BASELINES, recipe
from shardwright.search.joint.space import Space
from shardwright.search.joint.timed import Timed
from shardwright.units import seconds_text

__all__ = ["BASELINES", "JointPlan", "JointStage", "Model", "NothingToGain", "Pipelines", "search_pipelines"]


def search_pipelines(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    microbatch_sizes: Sequence[int],
    conditions: Conditions = ANY,
    baselines: Sequence[str] = (),
    max_axes: int = 2,
    most_stages: int = 64,
) -> tuple[JointPlan, dict[str, JointPlan | str]]:
    """The fastest pipeline in any order, and each baseline's (or why it has none), all by the same prices.

    Parameters
    ----------
    batch
        Samples per step; every micro-batch size must divide it.

    Examples
    --------
    >>> model = Model(lambda size: capture(*zoo_model(batch=size)))  # doctest: +SKIP
    >>> cluster = parse_cluster("8xH100")  # doctest: +SKIP
    >>> best, _ = search_pipelines(model, cluster, batch=64, microbatch_sizes=(1, 2))  # doctest: +SKIP
    """
    started = time.perf_counter()
    space = Pipelines(
        model,
        cluster,
        batch=batch,
        microbatch_sizes=microbatch_sizes,
        conditions=conditions,
        max_axes=max_axes,
        most_stages=most_stages,
    )
    best, found, others = space.compared(baselines)
    for other in others.values():
        faster = _faster(best, other)
        assert faster is not None
        best = replace(faster, bound_seconds=best.bound_seconds)
    return replace(best, search_seconds=time.perf_counter() - started), found


Answer = TypeVar("Answer")


class NothingToGain(Infeasible):
    """No pipeline can be as fast as is asked: computation alone takes longer."""


class Pipelines:
    """All pipelines of a model on a cluster, its blocks priced once for whatever is asked then.

    Micro-batches are left out whose steps cannot take less than ``below`` seconds; where all are, that is
    :class:`NothingToGain`.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        *,
        batch: int,
        microbatch_sizes: Sequence[int],
        conditions: Conditions = ANY,
        max_axes: int = 2,
        most_stages: int = 64,
        below: float = inf,
    ) -> None:
        for size in microbatch_sizes:
            if batch % size:
                raise ProblemError(f"micro-batches of {size} do not divide a batch of {batch}.", "Choose a divisor.")
        self.cluster = cluster
        found = [
            (size, pricer)
            for size in microbatch_sizes
            for pricer in readings(model.graph_at(size), cluster, conditions.optimizer, model.blocks)
        ]
        least = {pricer: computing_all_the_time(pricer, cluster, model.blocks, batch // size) for size, pricer in found}
        if min(least.values()) >= below:
            raise NothingToGain(
                f"no pipeline is searched: were all devices computing all the time, a step would still take "
                f"{seconds_text(min(least.values()))}.",
                "--stages auto searches them all the same.",
            )
        self.spaces = [
            Space(model, cluster, batch, size, conditions, max_axes, most_stages, pricer)
            for size, pricer in found
            if least[pricer] < below
        ]

    def best(self, memory_limit: float | None = None) -> JointPlan:
        """The fastest in 1F1B, within fewer bytes per device where that is asked.

        Raises
        ------
        Infeasible
            When none fits.
        """
        return self._searched(memory_limit)[0]

    def best_or_none(self) -> JointPlan | None:
        """The fastest in 1F1B; nothing where none fits."""
        try:
            return self.best()
        except Infeasible:
            return None

    def ordered(self, order: str) -> JointPlan | None:
        """The fastest in another order of passes that is found from even compositions; nothing where none fits."""
        plans = [space.ordered(order, []) for space in self.spaces]
        return min(filter(None, plans), key=lambda plan: plan.step_seconds, default=None)

    def _searched(self, memory_limit: float | None = None) -> tuple[JointPlan, list[tuple[Space, float, JointPlan]]]:
        """The fastest, and of every micro-batch size that was searched: the space, its bound, its own fastest."""
        spaces = [space.within(memory_limit) for space in self.spaces]
        known = min(space.even() for space in spaces)
        starts = _each(lambda space: space.composed(known=known), spaces)
        composed = [space.seconds_of(runs) for space, some in zip(spaces, starts, strict=True) for runs in some]
        known = min([known, *composed, *(space.even(order) for space in spaces for order in OTHERS)])
        limits = _each(lambda space: space.bound(known), spaces)
        best: JointPlan | None = None
        each = []
        for space, bound, some in sorted(zip(spaces, limits, starts, strict=True), key=lambda one: one[1]):
            if best is None or bound < best.step_seconds:
                found = space.improved(some)
                if found is not None:
                    each.append((space, bound, found))
                best = _faster(best, found)
        if best is None:
            raise Infeasible(
                f"no pipeline of this model fits {self.cluster.name}.",
                "Give it more devices, or smaller micro-batches.",
            )
        return replace(best, bound_seconds=min(limits)), each

    def corrected(self, bytes_of: Mapping[int, tuple[float, float]]) -> Pipelines:
        """The same with other bytes for blocks of some strategies (:meth:`Space.corrected`)."""
        other = copy(self)
        other.spaces = [space.corrected(bytes_of) for space in self.spaces]
        return other

    def compared(self, baselines: Sequence[str]) -> tuple[JointPlan, dict[str, JointPlan | str], dict[str, JointPlan]]:
        """The fastest in 1F1B, each baseline's (or why it has none): a baseline that is faster is the answer itself; and the
        fastest in every other order of passes that is found from them."""
        best, each = self._searched()
        found: dict[str, JointPlan | str] = {}
        for name in baselines:
            plans = [plan for space in self.spaces if (plan := recipe(space, name)) is not None]
            found[name] = min(plans, key=lambda p: p.step_seconds) if plans else "nothing of this kind fits"
            faster = _faster(best, found[name])
            assert faster is not None
            best = replace(faster, bound_seconds=best.bound_seconds)
        others: dict[str, JointPlan] = {}
        for name in OTHERS:
            other: JointPlan | None = None
            for space, bound, own in each:
                if other is None or bound < other.step_seconds:
                    other = _faster(other, space.ordered(name, [own]))
            if other is not None:
                others[name] = other
        return best, found, others

    def same_in(self, order: str, plan: JointPlan) -> JointPlan | None:
        """A plan with one stage per group of devices in another order of passes, each group with the strategy it has;
        nothing where that does not fit or a group has several."""
        if len(plan.groups) != len(plan.stages):
            return None
        mine = {id(stage.strategy) for stage in plan.stages}
        space = next(space for space in self.spaces if mine <= {id(row.price.strategy) for row in space.rows})
        return Timed(space, [row for row in space.rows if id(row.price.strategy) in mine], order).plan(space.runs(plan))


def _each(ask: Callable[[Space], Answer], spaces: Sequence[Space]) -> list[Answer]:
    """What every space answers, several at once: most of the time goes into compiled recurrences."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(ask, spaces))


def _faster(one: JointPlan | None, other: JointPlan | str | None) -> JointPlan | None:
    if not isinstance(other, JointPlan):
        return one
    return other if one is None or other.step_seconds < one.step_seconds else one
