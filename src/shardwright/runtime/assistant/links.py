"""A link that has become slower: seen by what even the last rank of a step waits for, answered by a plan that needs it less.

Ranks that are early wait for the others; the one that is last waits for the link alone. When that time has settled at
another level and no rank has changed its speed, the link's rate is taken to have changed by as much, rank 0 plans for the
cluster as it is now, and the job goes over to what was found (:mod:`~shardwright.runtime.moving`) where the same simulator
expects it to be enough faster than staying. Which link it is nobody can tell from these times: between nodes it is taken to
be the network, on one node the links inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

import torch.distributed as dist

from shardwright.cluster import Cluster, mesh_of
from shardwright.cluster.hardware import Link
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.plans import Plan, from_json, to_json
from shardwright.runtime.replanning import planned_again

WINDOW = 8
"""Steps over which a level is looked at; as many after a start or a move say what is usual."""
LEAST = 2.0
"""A link is spoken of when its times have changed by this factor, in every step of a window by most of it."""
PART = 0.1
"""Of the step: communication that takes less is not worth another plan, whatever its link does."""
PLANNING_SECONDS = 10.0


@dataclass
class LinkWatch:
    """Seconds of communication, step by step."""

    usual: float | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: float) -> None:
        self._steps.append(seconds)

    def changed(self, step_seconds: float) -> float | None:
        """By which factor the link has become slower (below one: faster), once that has settled."""
        if len(self._steps) < WINDOW:
            return None
        now = max(median(self._steps), 1e-9)  # a step may wait for nothing
        if self.usual is None:
            self.usual = now
            return None
        ratio, most = now / self.usual, LEAST**0.5
        apart = [seconds / self.usual for seconds in self._steps]
        if ratio >= LEAST and min(apart) > most and now >= PART * step_seconds:
            return ratio
        return ratio if ratio <= 1 / LEAST and max(apart) < 1 / most else None

    def restart(self) -> None:
        """What is usual has to be learnt anew."""
        self.usual = None
        self._steps.clear()


def with_slower_link(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with a link at a fraction of its rate: the network, or on one node the link inside.

    >>> from shardwright.cluster import parse_cluster
    >>> cluster = parse_cluster("2x8xH100")
    >>> cluster.network.bandwidth / with_slower_link(cluster, 10).network.bandwidth
    10.0
    """
    if len(cluster.nodes) > 1:
        return replace(cluster, network=_slower(cluster.network, factor))
    return replace(cluster, nodes=tuple(replace(n, link=_slower(n.link, factor)) for n in cluster.nodes))


def _slower(link: Link, factor: float) -> Link:
    fits = tuple((kind, latency, bandwidth / factor) for kind, latency, bandwidth in link.fits)
    return replace(link, bandwidth=link.bandwidth / factor, fits=fits)


@dataclass(frozen=True)
class OtherPlan:
    """What was found for changed links or ranks: a plan, and by the simulator the seconds of staying and of going over."""

    plan: Plan
    staying: float
    expected: float
    spent: float


def answer_for(plan: Plan, graph: Graph, factor: float) -> OtherPlan | None:
    """The plan for the cluster with its link slower by ``factor``; rank 0 makes it, all ranks are told the same.

    Nothing where none can be made.
    """
    return told_to_all(lambda: _planned(plan, graph, with_slower_link(plan.cluster, factor)))


def told_to_all(made: Callable[[], OtherPlan | None]) -> OtherPlan | None:
    """What rank 0 makes, on every rank; nothing where it cannot: as it is, the job runs."""
    told: list[tuple[str, float, float, float] | None] = [None]
    if dist.get_rank() == 0:
        with suppress(ShardwrightError):
            answer = made()
            if answer is not None:
                told = [(to_json(answer.plan), answer.staying, answer.expected, answer.spent)]
    dist.broadcast_object_list(told)
    if told[0] is None:
        return None
    text, staying, expected, spent = told[0]
    return OtherPlan(from_json(text), staying, expected, spent)


def _planned(plan: Plan, graph: Graph, cluster: Cluster) -> OtherPlan:
    from shardwright.simulator import simulate

    began = perf_counter()
    found = planned_again(plan, graph, cluster, time_limit=PLANNING_SECONDS)
    mesh = mesh_of(cluster, plan.stages[0].strategy.sizes).with_shares(plan.stages[0].strategy.shares)
    staying = simulate(graph, plan.stages[0].strategy, mesh).seconds
    return OtherPlan(found, staying, found.prediction.step_seconds, perf_counter() - began)
