"""Where a model is cut into as many stages as were asked for, and its batch into micro-batches.

Operators stay in their order: stages begin before modules that the user names, or where the slowest stage, with what it
sends and receives, is fastest, which a dynamic program over the places between operators finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Replicate

from shardwright.cluster import Cluster, Mesh
from shardwright.costs.priced_decisions import PricedDecisions
from shardwright.costs.pricing import price
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.program import Kind, build
from shardwright.program.dataflow import Compute
from shardwright.program.mean_losses import origin
from shardwright.search.joint.ideals import crossing, light, may_begin
from shardwright.search.joint.problem import Floats


def microbatch_counts(batch: int, most: Sequence[int]) -> list[int]:
    """Numbers of equal micro-batches to try: for each number the largest divisor of the batch that is no larger, and no
    single one where several may be asked for; none where the batch has no such divisor.

    >>> microbatch_counts(12, (4, 8, 16)), microbatch_counts(8, (1, 2, 4)), microbatch_counts(7, (4, 6))
    ([4, 6, 12], [1, 2, 4], [])
    """
    every = [
        [count for count in range(min(2, number), min(number, batch) + 1) if batch % count == 0] for number in most
    ]
    return sorted({counts[-1] for counts in every if counts})


@dataclass(frozen=True, eq=False)
class Named:
    """The cuts of a graph's operators, in their order, before the first operator of each of some modules."""

    graph: Graph
    places: tuple[int, ...]

    @staticmethod
    def of(graph: Graph, paths: Sequence[str]) -> Named:
        """A new stage before each of these modules.

        Raises
        ------
        ShardwrightError
            When a module does not exist, or comes before the one that was named before it.
        """
        places = [0]
        for path in paths:
            inside = (i for i, op in enumerate(graph.ops) if op.module == path or op.module.startswith(f"{path}."))
            place = next(inside, None)
            if place is None:
                raise ShardwrightError(
                    f"There is no module {path!r} to cut before.", "Name modules as in model.named_modules()."
                )
            if place <= places[-1]:
                raise ShardwrightError(
                    f"The cut before {path!r} leaves an empty stage.", "Name cuts in the model's order."
                )
            places.append(place)
        return Named(graph, (*places, len(graph.ops)))

    @property
    def count(self) -> int:
        return len(self.places)

    def even(self, stages: int) -> Sequence[int] | None:
        """All of them, where they make so many stages."""
        return range(self.count) if stages == self.count - 1 else None

    def operators(self, start: int, end: int) -> tuple[str, ...]:
        return tuple(op.name for op in self.graph.ops[self.places[start] : self.places[end]])


@dataclass(frozen=True, eq=False)
class Line:
    """The cuts between any two of a graph's operators, in their order: ``done`` are the seconds of what comes before each,
    ``hop`` those of sending what crosses it and its gradient back; at some no stage may begin."""

    graph: Graph
    count: int
    done: Floats
    hop: Floats

    @staticmethod
    def of(graph: Graph, device: Mesh, cluster: Cluster) -> Line:
        """Every operator with the seconds of its piece on one device of a cluster."""
        splits = {op.name: (None,) * len(device.axes) for op in graph.ops}
        resting = {name: (Replicate(),) * len(device.axes) for name in graph.sources}
        whole = Strategy(device.names, splits, resting)
        program = build(graph, whole, PricedDecisions(device), device=device.device.kind)
        seconds = np.zeros(len(graph.ops) + 1)
        place = {op.name: i for i, op in enumerate(graph.ops)}
        for event in price(program, device).events:
            node = program.flow.nodes[event.node] if event.node >= 0 else None
            if isinstance(node, Compute) and event.kind is not Kind.UPDATE:
                seconds[place[node.op.name] + 1] += max(event.seconds, event.host)
        crosses = crossing(graph)
        link = cluster.network if len(cluster.nodes) > 1 else cluster.nodes[0].link
        hop = np.where(crosses > 0, 2 * (link.latency + crosses / link.bandwidth), 0.0)
        return Line(graph, len(seconds), np.cumsum(seconds), hop)

    def even(self, stages: int) -> Sequence[int] | None:
        """The cuts whose slowest stage, with what it sends and receives, is fastest."""
        if stages >= self.count:
            return None
        done, hop, allowed = self.done, self.hop, may_begin(self.graph)
        # What needs no parameter is computed wherever it is read: a stage of nothing else would be empty, and wins where
        # sending is dear.
        heavy = np.cumsum([0, *(not free for free in light(self.graph))])
        best = np.where(allowed & (heavy > 0), done + hop, np.inf)
        choices = []
        for _ in range(1, stages):
            stage = done[None, :] - done[:, None] + hop[:, None] + hop[None, :]
            stage = np.where(heavy[None, :] > heavy[:, None], stage, np.inf)
            cost = np.maximum(np.where(allowed, best, np.inf)[:, None], stage)
            choices.append(cost.argmin(axis=0))
            best = np.where(allowed, cost.min(axis=0), np.inf)
        if not np.isfinite(best[-1]):
            return None
        cuts = [self.count - 1]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return [0, *reversed(cuts)]

    def operators(self, start: int, end: int) -> tuple[str, ...]:
        return tuple(op.name for op in self.graph.ops[start:end])


def complete(graph: Graph, names: Sequence[Sequence[str]]) -> list[list[str]]:
    """The same cut of the whole graph's operators: those that a micro-batch lacks go with the first that reads them."""
    stage_of = {origin(name): number for number, own in enumerate(names) for name in own}
    found: list[list[str]] = [[] for _ in names]
    at = len(names) - 1
    for op in reversed(graph.ops):
        readers = (stage_of[reader.name] for out in op.outputs if out for reader in graph.consumers[out])
        at = stage_of.setdefault(op.name, min(readers, default=at))
        found[at].append(op.name)
    return [own[::-1] for own in found]
