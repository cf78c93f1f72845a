"""Plans with stages for tests: made by hand, from strategies that are whole, cut along the batch, or random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import Replicate

from lowering.strategies import mesh_with, random_strategy
from shardwright.cluster import parse_cluster
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan, Prediction, Proof, Stage
from shardwright.plans.plan import Signature
from shardwright.program import Written
from shardwright.program.microbatches import microbatches
from shardwright.program.stages import stage_graphs
from shardwright.schedules import Schedule, known_schedule


def whole_strategy(graph: Graph, size: int = 1) -> Strategy:
    """Every rank does everything."""
    splits = {op.name: (None,) for op in graph.ops}
    return Strategy((("a", size),), splits, {name: (Replicate(),) for name in graph.sources})


def halves(graph: Graph, count: int) -> list[list[str]]:
    """As many runs of operators, about equally long."""
    names = [op.name for op in graph.ops]
    return [names[i * len(names) // count : (i + 1) * len(names) // count] for i in range(count)]


def pipeline_plan(
    graph: Graph,
    cuts: Sequence[Sequence[str]],
    count: int,
    schedule: str | Schedule,
    each: int = 1,
    seed: int | None = None,
    devices: int | None = None,
) -> Plan:
    """A plan with these stages on ``each`` ranks; with a ``seed``, their operators are split at random there."""
    order = known_schedule(schedule, len(cuts), count, devices) if isinstance(schedule, str) else schedule
    micro = microbatches(graph, count)
    parts = stage_graphs(micro.graphs[micro.sizes[-1]], cuts)  # what cuts the smallest micro-batch cuts all
    stages = []
    for number, part in enumerate(parts):
        device = order.device_of[number]
        ranks = tuple(range(device * each, (device + 1) * each))
        strategy = whole_strategy(part.graph, each)
        if seed is not None and each > 1:
            shared = _shared(parts)
            strategy = random_strategy(part.graph, mesh_with((each,)), seed + number)
            resting = {n: (Replicate(),) if n in shared else layout for n, layout in strategy.resting.items()}
            strategy = replace(strategy, resting=resting, regathered=strategy.regathered - shared)
        stages.append(Stage(tuple(cuts[number]), ranks, strategy, Written()))
    prediction, proof = Prediction(1.0, 1.0, 1.0, 1.0, 1.0, True), Proof(1.0, 1.0, True, 1.0, "")
    return Plan(
        "",
        Signature.of(graph),
        parse_cluster(f"local:{order.devices * each}"),
        stages[0].strategy,
        "by hand",
        "sgd",
        prediction,
        proof,
        "",
        stages=tuple(stages),
        microbatches=count,
        schedule=order,
    )


def _shared(parts: Sequence) -> frozenset[str]:
    held = [p.tensor for part in parts for p in part.graph.parameters]
    return frozenset(name for name in held if held.count(name) > 1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
