"""How a model is read before it is cut into stages: as a run of alike blocks, as a general graph, or as both.

A long run is priced once per kind of stage, however many blocks it has. Where it makes up at least :data:`MOST` of the
model's computation there is little to gain from cutting elsewhere, and it is the only reading; where there is less of it (an
encoder and a decoder, stages of a convolutional network) both are searched, and the faster pipeline wins. A model without
repeated blocks, or with blocks that cannot be cut apart, is a general graph.
"""

from __future__ import annotations

import numpy as np

from shardwright.cluster import Cluster, Mesh, mesh_of, part_of
from shardwright.errors import ProblemError
from shardwright.graph import Graph
from shardwright.search.joint.blocks import BlockPricer
from shardwright.search.joint.pieces import PiecePricer

MOST = 2 / 3
"""Of a model's seconds on one device: a run that takes so many is where stages are cut."""

Pricer = BlockPricer | PiecePricer


def readings(graph: Graph, cluster: Cluster, optimizer: str, blocks: int | None = None) -> list[Pricer]:
    """The readings of a micro-batch's graph that are searched; a model of more ``blocks`` than the graph has is a run.

    Raises
    ------
    ProblemError
        When it cannot be cut at all.
    """
    alone = mesh_of(part_of(cluster, [0]))
    try:
        run = BlockPricer(graph, optimizer=optimizer)
    except ProblemError:
        if blocks is not None:
            raise
        return [PiecePricer(graph, alone, optimizer=optimizer)]
    if blocks is not None or share_of_run(run, alone) >= MOST:
        return [run]
    try:
        return [run, PiecePricer(graph, alone, optimizer=optimizer)]
    except ProblemError:
        return [run]


def share_of_run(run: BlockPricer, alone: Mesh, blocks: int | None = None) -> float:
    """Which part of a model's seconds on one device its longest run of blocks takes, were there so many of them."""
    seconds = run.prices(alone, 1)[0].seconds
    inside = (blocks or run.run.count) * seconds.block
    return inside / (seconds.head + inside + seconds.tail)


def mostly_blocks(graph: Graph, cluster: Cluster, optimizer: str, blocks: int) -> bool:
    """Whether a model of so many blocks, of which the graph of a micro-batch has some, is read as a run of them alone.

    >>> mostly_blocks(shortened(graph, 4), parse_cluster("8xH100"), "adamw", 80)  # doctest: +SKIP
    """
    try:
        run = BlockPricer(graph, optimizer=optimizer)
    except ProblemError:
        return False
    return share_of_run(run, mesh_of(part_of(cluster, [0])), blocks) >= MOST


def computing_all_the_time(pricer: Pricer, cluster: Cluster, blocks: int | None, microbatches: int) -> float:
    """Seconds that no pipeline's step undercuts: all devices compute, whole operators, and nothing else takes time.

    >>> computing_all_the_time(pricer, parse_cluster("8xH100"), None, 16)  # doctest: +SKIP
    """
    rate = 0.0
    for group in cluster.groups():
        mesh = mesh_of(part_of(group, [0]))
        if isinstance(pricer, BlockPricer):
            kind = np.array([blocks or pricer.run.count, 1, 1])
            whole = pricer.prices(mesh, microbatches)[0].seconds.of(*kind)
        else:
            whole = pricer.prices(mesh, microbatches)[0].seconds.of(np.array(0), np.array(-1))
        rate += group.size / float(whole * microbatches)
    return 1.0 / rate
