"""Where a model is cut into stages: by the user, before named modules, or where the slowest stage is fastest.

Operators stay in their order. Every one has the seconds of its piece on one device, every place between two the bytes that
cross there; a dynamic program over places finds the cut whose slowest stage, with what it sends and receives, is fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Replicate

from shardwright.cluster import Cluster, Mesh
from shardwright.costs.deciding import ByPrice
from shardwright.costs.pricing import price
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.program import Kind, build
from shardwright.program.dataflow import Compute
from shardwright.program.means import origin
from shardwright.search.joint.ideals import crossing, light, may_begin


def cut_at(graph: Graph, paths: Sequence[str]) -> list[list[str]]:
    """Operators in their order, a new stage before the first operator of each of these modules.

    Raises
    ------
    ShardwrightError
        When a module does not exist, or comes before the one that was named before it.
    """
    borders: list[int] = []
    for path in paths:
        inside = (i for i, op in enumerate(graph.ops) if op.module == path or op.module.startswith(f"{path}."))
        place = next(inside, None)
        if place is None:
            raise ShardwrightError(
                f"There is no module {path!r} to cut before.", "Name modules as in model.named_modules()."
            )
        if place <= (borders[-1] if borders else 0):
            raise ShardwrightError(f"The cut before {path!r} leaves an empty stage.", "Name cuts in the model's order.")
        borders.append(place)
    names = [op.name for op in graph.ops]
    edges = [0, *borders, len(names)]
    return [names[a:b] for a, b in itertools.pairwise(edges)]


def balanced(graph: Graph, device: Mesh, cluster: Cluster, count: int) -> list[list[str]]:
    """The cut of a graph's operators, in their order, whose slowest stage, with what it sends and receives, is fastest."""
    splits = {op.name: (None,) * len(device.axes) for op in graph.ops}
    resting = {name: (Replicate(),) * len(device.axes) for name in graph.sources}
    whole = Strategy(device.names, splits, resting)
    program = build(graph, whole, ByPrice(device), device=device.device.kind)
    seconds = np.zeros(len(graph.ops) + 1)
    place = {op.name: i for i, op in enumerate(graph.ops)}
    for event in price(program, device).events:
        node = program.flow.nodes[event.node] if event.node >= 0 else None
        if isinstance(node, Compute) and event.kind is not Kind.UPDATE:
            seconds[place[node.op.name] + 1] += max(event.seconds, event.host)
    done, crosses = np.cumsum(seconds), crossing(graph)
    link = cluster.network if len(cluster.nodes) > 1 else cluster.nodes[0].link
    hop = np.where(crosses > 0, 2 * (link.latency + crosses / link.bandwidth), 0.0)
    ends = len(graph.ops)
    if count > ends:
        raise ShardwrightError(f"{ends} operators cannot make {count} stages.", "Ask for fewer stages.")
    allowed = may_begin(graph)
    # What needs no parameter is computed wherever it is read: a stage of nothing else would be empty, and wins where
    # sending is dear.
    heavy = np.cumsum([0, *(not free for free in light(graph))])
    best = np.where(allowed & (heavy > 0), done + hop, np.inf)
    choices = []
    for _ in range(1, count):
        stage = done[None, :] - done[:, None] + hop[:, None] + hop[None, :]
        stage = np.where(heavy[None, :] > heavy[:, None], stage, np.inf)
        cost = np.maximum(np.where(allowed, best, np.inf)[:, None], stage)
        choices.append(cost.argmin(axis=0))
        best = np.where(allowed, cost.min(axis=0), np.inf)
    borders = [ends]
    for choice in reversed(choices):
        borders.append(int(choice[borders[-1]]))
    edges = [0, *reversed(borders)] if count > 1 else [0, ends]
    if not np.isfinite(best[ends]):
        raise ShardwrightError(f"This model cannot be cut into {count} stages.", "Ask for fewer stages.")
    names = [op.name for op in graph.ops]
    return [names[a:b] for a, b in itertools.pairwise(edges)]


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
