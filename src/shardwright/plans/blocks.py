"""The same pipeline with its blocks dealt out otherwise: how many of the model's repeated blocks every stage has.

An operator keeps its split and a parameter its resting layout, whichever stage has it, so that the stages must have meshes
alike. What now crosses a border arrives as the stage that makes it leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch.distributed.tensor import Replicate

from shardwright.errors import PlanError
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.operators.rules import Layout
from shardwright.operators.strategy import Strategy
from shardwright.plans.plan import Plan
from shardwright.program.binding import completed
from shardwright.program.microbatches import microbatches
from shardwright.program.stages import StageGraph, stage_graphs
from shardwright.program.transfers import unreduced_layout
from shardwright.schedules import known_schedule


def blocks_of(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """How many of the model's repeated blocks every stage has: those whose first operator it has.

    Raises
    ------
    PlanError
        Where blocks cannot be dealt out otherwise: none repeat, or the stages' meshes differ.
    """
    starts = _starts(graph)
    if len(plan.stages) < 2 or len(starts) < len(plan.stages):
        raise PlanError(
            f"The plan has {len(plan.stages)} stages and the model {len(starts)} repeated blocks: none can be moved.",
            "Plan a pipeline of a model whose blocks repeat.",
        )
    if len({stage.strategy.axes for stage in plan.stages}) > 1:
        raise PlanError("The stages of this plan have unlike meshes.", "Plan stages with as many devices each.")
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.operators}
    owners = [stage_of[graph.ops[start].name] for start in starts]
    return tuple(owners.count(number) for number in range(len(plan.stages)))


def with_blocks(plan: Plan, graph: Graph, counts: Sequence[int]) -> Plan:
    """The plan with so many blocks in every stage, in their order; a stage with none, and its ranks, are left out.

    Examples
    --------
    >>> with_blocks(plan, plan.graph(), (6, 2))                                                  # doctest: +SKIP
    """
    now = blocks_of(plan, graph)
    if len(counts) != len(now) or sum(counts) != sum(now) or min(counts) < 0:
        raise PlanError(
            f"Blocks {list(counts)} do not share out {sum(now)} blocks between {len(now)} stages.",
            "Give all blocks to somebody; stages with none are left out.",
        )
    if tuple(counts) == now:
        return plan
    starts = _starts(graph)
    kept = [stage for stage, count in zip(plan.stages, counts, strict=True) if count]
    firsts = list(accumulate(count for count in counts if count))[:-1]
    borders = [0, *(starts[first] for first in firsts), len(graph.ops)]
    cuts = [[op.name for op in graph.ops[a:b]] for a, b in pairwise(borders)]
    micro = microbatches(graph, plan.microbatches, plan.batch_norm)
    parts = stage_graphs(micro.graphs[max(micro.graphs)], cuts)
    known = _united([stage.strategy for stage in plan.stages])
    strategies = [_strategy(part, parts, known) for part in parts]
    stages = tuple(
        replace(
            stage, operators=tuple(names), strategy=replace(strategy, shares=stage.strategy.shares), prediction=None
        )
        for stage, names, strategy in zip(kept, cuts, strategies, strict=True)
    )
    same = len(kept) == len(plan.stages)
    schedule = plan.schedule if same else known_schedule("1f1b", len(kept), plan.microbatches)
    return replace(plan, stages=stages, schedule=schedule)


def _starts(graph: Graph) -> list[int]:
    """Where the repeated blocks begin, in order."""
    return sorted(span_of(graph, path).start for path in block_paths(graph))


def _united(strategies: Sequence[Strategy]) -> Strategy:
    """What the stages say of their operators and tensors, together."""
    first = strategies[0]
    return replace(
        first,
        splits={name: split for s in strategies for name, split in s.splits.items()},
        resting={name: layout for s in strategies for name, layout in s.resting.items()},
        kept={name: layout for s in strategies for name, layout in s.kept.items()},
        regathered=frozenset().union(*(s.regathered for s in strategies)),
        whole_gradients=frozenset().union(*(s.whole_gradients for s in strategies)),
        recomputed=tuple(path for s in strategies for path in s.recomputed),
        lightly=frozenset().union(*(s.lightly for s in strategies)),
    )


def _strategy(part: StageGraph, parts: Sequence[StageGraph], known: Strategy) -> Strategy:
    whole = (Replicate(),) * len(known.axes)
    held = [p.tensor for other in parts for p in other.graph.parameters]
    own = {p.tensor for p in part.graph.parameters}

    def lies(name: str) -> Layout:
        if name in part.received:
            return completed(unreduced_layout(name, parts[part.received[name]].graph, known))
        return whole if held.count(name) > 1 else known.resting.get(name, whole)

    made = {name for op in part.graph.ops for name in op.outputs if name}
    blocks = {op.module for op in part.graph.ops}
    again = tuple(p for p in known.recomputed if any(b == p or b.startswith(f"{p}.") for b in blocks))
    return replace(
        known,
        splits={op.name: known.splits[op.name] for op in part.graph.ops},
        resting={name: lies(name) for name in part.graph.sources},
        kept={name: layout for name, layout in known.kept.items() if name in made},
        regathered=known.regathered & own,
        whole_gradients=known.whole_gradients & own,
        recomputed=again,
        lightly=known.lightly & {*again},
    )
