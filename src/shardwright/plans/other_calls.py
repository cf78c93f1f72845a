"""A plan carried over to another call of the same model: its stages, their strategies, and the order of its passes.

Operators are recognised by where they come from (:mod:`shardwright.plans.transfer`) and stay in their stages; what is new
joins the latest stage that it reads from. A call with fewer rows than micro-batches has one for each row, in the order that
is left of the schedule; without gradients only its forward passes are.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import LoweringError
from shardwright.graph import Graph
from shardwright.plans.plan import Plan
from shardwright.plans.stages import Stage
from shardwright.plans.transfer import carried, matched_operators, replicated
from shardwright.program.microbatches import Microbatches, batch_of, microbatches
from shardwright.program.stages import StageGraph, stage_graphs
from shardwright.schedules import BACKWARD, FORWARD, Action, Schedule


def for_other_call(plan: Plan, graph: Graph, other: Graph, backward: bool, whole: bool = False) -> Plan:
    """The plan of ``graph`` for ``other``, another call of the same model; ``backward``: gradients are wanted of it;
    ``whole``: every rank of a stage computes all of it.

    Raises
    ------
    LoweringError
        Where the call cannot be cut into micro-batches, or a stage would need a parameter that it does not have.

    Examples
    --------
    >>> for_other_call(plan, plan.graph(), capture(model, (tokens[:, :64],)), backward=False)     # doctest: +SKIP
    """
    count = min(plan.microbatches, batch_of(other)) if plan.microbatches > 1 else 1
    known, new = (microbatches(g, n, plan.batch_norm) for g, n in ((graph, plan.microbatches), (other, count)))
    names = [stage.operators for stage in plan.stages]
    others = [tuple(own) for own in _placed(graph, names, other)]
    # What cuts the smallest micro-batch cuts all.
    mine, theirs = _parts(known, known.sizes[0], names), _parts(new, new.sizes[-1], others)
    alike = _names(known.graphs[known.sizes[0]], new.graphs[new.sizes[-1]])
    stages = []
    for stage, own, before, after in zip(plan.stages, others, mine, theirs, strict=True):
        _refuse_strangers(before, after)
        carry = replicated if whole else carried
        strategy = carry(before.graph, stage.strategy, after.graph, alike)
        stages.append(Stage(own, stage.ranks, strategy, stage.decisions))
    return replace(plan, stages=tuple(stages), schedule=_order(plan.schedule, count, backward))


def trained(plan: Plan) -> Plan:
    """The plan with passes back, where it has none: after all forward passes, in the opposite order."""
    return replace(plan, schedule=_order(plan.schedule, plan.microbatches, True))


def _order(schedule: Schedule, count: int, backward: bool) -> Schedule:
    orders = []
    for order in schedule.orders:
        left = tuple(a for a in order if a.microbatch < count and (backward or a.kind == FORWARD))
        back = tuple(Action(a.stage, BACKWARD, a.microbatch) for a in reversed(left))
        orders.append(left + back if backward and not schedule.trains else left)
    return Schedule(tuple(orders))


def _parts(micro: Microbatches, size: int, names: list[tuple[str, ...]]) -> tuple[StageGraph, ...]:
    return stage_graphs(micro.graphs[size], names)


def _placed(graph: Graph, names: list[tuple[str, ...]], other: Graph) -> list[list[str]]:
    """The operators of every stage of the other call."""
    stage_of = {name: number for number, own in enumerate(names) for name in own}
    holder: dict[str, int] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            holder.setdefault(tensor, stage_of[op.name])
    paths = {path: holder[p.tensor] for p in graph.parameters if p.tensor in holder for path in p.paths}
    made = {p.tensor: paths[p.paths[0]] for p in other.parameters if p.paths[0] in paths}
    same, found = matched_operators(graph, other), [list[str]() for _ in names]
    for op in other.ops:
        known = same.get(op.name)
        reads = [made[tensor] for tensor in op.inputs if tensor in made and tensor in other.producer]
        own = stage_of[known.name] if known is not None else max((made[t] for t in op.inputs if t in made), default=0)
        number = max([own, *reads])
        made |= {name: number for name in op.outputs if name}
        found[number].append(op.name)
    return found


def _names(graph: Graph, other: Graph) -> dict[str, str]:
    """What operators of the other call make → what the same ones make in the planned call."""
    same = matched_operators(graph, other)
    pairs = ((op.outputs, same[op.name].outputs) for op in other.ops if op.name in same)
    return {a: b for theirs, mine in pairs for a, b in zip(theirs, mine, strict=True) if a and b}


def _refuse_strangers(before: StageGraph, after: StageGraph) -> None:
    """A stage of the other call reads parameters that it has."""
    held = {path for p in before.graph.parameters for path in p.paths} | {
        buffer.path for buffer in before.graph.buffers
    }
    read = [p.paths[0] for p in after.graph.parameters] + [buffer.path for buffer in after.graph.buffers]
    for path in read:
        if path not in held:
            raise LoweringError(
                f"A stage reads {path} in this call, which another stage holds.",
                "Plan for this call (`also=[…]` prepares for it), or without stages.",
            )
