"""Plans with stages for tests: made by hand, from strategies that are whole, cut along the batch, or random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.tensor import Replicate, Shard

from lowering.strategies import chosen_strategy, mesh_with, random_strategy
from shardwright.cluster import Mesh
from shardwright.graph import Graph
from shardwright.operators import analyse
from shardwright.operators.rules import OWN, Layout, Split
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan, Stage
from shardwright.program import FixedDecisions
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
    each: int | Sequence[int] = 1,
    seed: int | None = None,
    devices: int | None = None,
    inside: str = "alone",
    batch_norm: str = "whole",
) -> Plan:
    """A plan with these stages on ``each`` ranks (a list: of every device of the schedule); with a ``seed``, their
    operators are split at random there; ``inside`` may also be ``data`` (along the batch) or ``tensor`` (along weights,
    wherever there are any)."""
    order = known_schedule(schedule, len(cuts), count, devices) if isinstance(schedule, str) else schedule
    micro = microbatches(graph, count, batch_norm)
    parts = stage_graphs(micro.graphs[micro.sizes[-1]], cuts)  # what cuts the smallest micro-batch cuts all
    sizes = [each] * order.devices if isinstance(each, int) else list(each)
    stages = []
    for number, part in enumerate(parts):
        device = order.device_of[number]
        first, size = sum(sizes[:device]), sizes[device]
        ranks = tuple(range(first, first + size))
        strategy = whole_strategy(part.graph, size)
        if size > 1 and (seed is not None or inside != "alone"):
            shared = _shared(parts)
            mesh = mesh_with((size,))
            strategy = (
                random_strategy(part.graph, mesh, seed + number) if seed is not None else cut(part.graph, mesh, inside)
            )
            resting = {n: (Replicate(),) if n in shared else layout for n, layout in strategy.resting.items()}
            strategy = replace(strategy, resting=resting, regathered=strategy.regathered - shared)
        stages.append(Stage(tuple(cuts[number]), ranks, strategy, FixedDecisions()))
    return Plan.of(graph, stages, order, optimizer="sgd", batch_norm=batch_norm)


def cut(graph: Graph, mesh: Mesh, along: str) -> Strategy:
    """Every operator cut along the batch (``data``) or along its weights (``tensor``), where it can be."""
    weights = {p.tensor for p in graph.parameters}

    def split(name: str, options: Sequence[Split]) -> Split:
        op = next(op for op in graph.ops if op.name == name)
        rules = {rule.name: rule for rule in analyse(op, graph.tensors).loops}

        def fits(option: Split) -> bool:
            if option[0] in (None, OWN):
                return option[0] == OWN and along == "data"
            needs = zip(op.inputs, rules[option[0]].inputs, strict=True)
            cuts = [isinstance(need, Shard) for name, need in needs if name in weights]
            return any(cuts) if along == "tensor" else rules[option[0]].outputs[0] == Shard(0) and not any(cuts)

        none = (None,) if (None,) in options else options[0]
        # Rows that are sorted and brought back: all operators in between alike, each rank its own.
        return next((option for option in sorted(options, key=lambda one: one[0] != OWN) if fits(option)), none)

    def layout(name: str, options: Sequence[Layout]) -> Layout:
        sharded = [option for option in options if isinstance(option[0], Shard)]
        return sharded[0] if along == "tensor" and name in weights and sharded else options[0]

    return chosen_strategy(graph, mesh, split, layout, kept=False)


def _shared(parts: Sequence) -> frozenset[str]:
    held = [p.tensor for part in parts for p in part.graph.parameters]
    return frozenset(name for name in held if held.count(name) > 1)
