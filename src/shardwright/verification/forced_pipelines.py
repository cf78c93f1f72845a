"""A pipeline that is forced on a model: two stages, two micro-batches, every block computed again lightly.

On a small model no pipeline pays, and then nothing of one is verified: that micro-batches add up, that a scaled loss scales
what they kept, that a value meets its gradient in the other stage. The stages are the two halves of the operators
with parameters, each on half of the processes and, where these are several, cut along the batch there.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.tensor import Replicate, Shard

from shardwright.cluster import Mesh, meshes, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan, Stage
from shardwright.program import FixedDecisions
from shardwright.program.microbatches import microbatches
from shardwright.program.stages import stage_graphs
from shardwright.schedules import known_schedule
from shardwright.verification.forced import blocks_of, forced_strategies

STAGES = MICROBATCHES = 2


def forced_pipeline(graph: Graph, devices: int, draws: int = 0) -> tuple[Plan | None, str]:
    """A plan with two stages for this many processes; or none, and why.

    ``draws``: so many of the graph's last results are random numbers, which must be those of rows.
    """
    if devices % STAGES:
        return None, f"{devices} processes are no two halves"
    names, middle = [op.name for op in graph.ops], _middle(graph)
    cuts = [names[:middle], names[middle:]]
    try:
        if not drawn_by_rows(graph, MICROBATCHES, draws):
            return None, "all rows share what it draws"
        micro = microbatches(graph, MICROBATCHES)
        parts = stage_graphs(micro.graphs[micro.sizes[-1]], cuts)
        held = [p.tensor for part in parts for p in part.graph.parameters]
        shared = frozenset(name for name in held if held.count(name) > 1)
        strategies = [_strategy(part.graph, devices // STAGES, shared) for part in parts]
    except ShardwrightError as error:
        return None, error.message
    each = devices // STAGES
    stages = tuple(
        Stage(tuple(cuts[n]), tuple(range(n * each, (n + 1) * each)), strategy, FixedDecisions())
        for n, strategy in enumerate(strategies)
    )
    return Plan.of(graph, stages, known_schedule("1f1b", STAGES, MICROBATCHES), search="two stages"), ""


def _middle(graph: Graph) -> int:
    """Where the second half of the operators with parameters begins, so that both stages have something to train."""
    reading = [n for n, op in enumerate(graph.ops) if not graph.parameter_of.keys().isdisjoint(op.inputs)]
    return reading[len(reading) // STAGES] if len(reading) >= STAGES else len(graph.ops) // STAGES


def drawn_by_rows(graph: Graph, count: int, draws: int) -> bool:
    """Whether so many last results are random numbers of rows: what a micro-batch draws for all rows, another draws anew."""
    joins = microbatches(graph, count).joins
    return count == 1 or all(isinstance(join, Shard) for join in joins[len(joins) - draws :])


def _strategy(graph: Graph, devices: int, shared: frozenset[str]) -> Strategy:
    """The batch cut between the devices of a stage; what several stages hold rests whole."""
    mesh: Mesh = meshes(parse_cluster(f"local:{devices}"), max_axes=1)[-1]
    strategy = next((found for _, found in forced_strategies(graph, mesh)), None) if devices > 1 else None
    if strategy is None:
        whole = (Replicate(),) * len(mesh.sizes)
        splits = {op.name: (None,) * len(mesh.sizes) for op in graph.ops}
        strategy = Strategy(mesh.names, splits, dict.fromkeys(graph.sources, whole))
    whole = (Replicate(),) * len(strategy.axes)
    resting = {name: whole if name in shared else layout for name, layout in strategy.resting.items()}
    again = blocks_of(graph)
    return replace(
        strategy,
        resting=resting,
        regathered=strategy.regathered - shared,
        recomputed=again,
        lightly=frozenset(again),
    )
