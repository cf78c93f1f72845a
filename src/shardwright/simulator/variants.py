"""What else may be asked of a step: orders for another number of micro-batches, and the links that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.errors import ProblemError, ShardwrightError
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.plans.transfer import carried
from shardwright.program.pipeline import Pipeline
from shardwright.schedules import RECIPES, Schedule, known_schedule

BETWEEN = "stages"
"""What a what-if calls the links between stages."""


def link_names(plan: Plan) -> list[str]:
    """What a what-if may say of a plan's links: the axes of its stages' meshes, and the links between stages."""
    axes = dict.fromkeys(name for stage in plan.stages for name, size in stage.strategy.axes if size > 1)
    return [*axes, *([BETWEEN] if len({stage.ranks for stage in plan.stages}) > 1 else [])]


def order_name(schedule: Schedule) -> str:
    """The name of a schedule, empty where it is none of the known ones; of several that are the same, 1F1B.

    >>> order_name(known_schedule("zb-h1", 4, 8))
    'zb-h1'
    """
    stages, count, devices = schedule.stages, schedule.microbatches, schedule.devices
    made = ((name, _known(name, stages, count, devices)) for name in sorted(RECIPES, key=lambda name: name != "1f1b"))
    return next((name for name, order in made if order is not None and schedule in (order, order.forwards_first())), "")


def _known(name: str, stages: int, count: int, devices: int) -> Schedule | None:
    try:
        return known_schedule(name, stages, count, devices)
    except ProblemError:
        return None  # that one does not exist for so many


def orders_like(schedule: Schedule, count: int) -> list[Schedule]:
    """Orders for another number of micro-batches: the same recipe, or where it is none, every one on the same devices. One
    stage takes them one by one, forward and back; without training there are forward passes alone.

    >>> [str(order) for order in orders_like(Schedule.parse("0F0 0B0"), 2)]
    ['0F0 0B0 0F1 0B1']
    """
    if not schedule.trains:
        passes = (tuple(own for own in order if own.microbatch == 0) for order in schedule.orders)
        return [
            Schedule(tuple(tuple(one._replace(microbatch=i) for i in range(count) for one in own) for own in passes))
        ]
    name = "1f1b" if schedule.stages == schedule.microbatches == 1 else order_name(schedule)
    made = (_known(one, schedule.stages, count, schedule.devices) for one in ([name] if name else RECIPES))
    found = [order for order in made if order is not None and order.device_of == schedule.device_of]
    if not found:
        raise ShardwrightError(
            f"There is no {name or 'known order'} of {schedule.stages} stages for {count} micro-batches.",
            f"Ask for a multiple of {schedule.devices}, or plan again with another --schedule.",
        )
    return found


def pipeline_like(plan: Plan, graph: Graph, count: int, schedule: Schedule) -> Pipeline:
    """The plan's stages with another number of micro-batches. What only several need (a loss divided by the count of the
    whole batch) is new to a plan of one, and split as moves least."""
    found = Pipeline.of(graph, plan.stages, count, schedule, plan.batch_norm)
    if count == plan.microbatches:
        return found
    known = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
    stages = list(plan.stages)
    for number, stage in enumerate(plan.stages):
        mine, theirs = (pipe.parts[max(pipe.parts)][number].graph for pipe in (known, found))
        strategy = stage.strategy
        if {op.name for op in theirs.ops} - strategy.splits.keys() or set(theirs.sources) - strategy.resting.keys():
            stages[number] = replace(stage, strategy=carried(mine, strategy, theirs))
    return replace(found, stages=tuple(stages))


def not_so_many(count: int, sizes: Sequence[int], why: str) -> ShardwrightError:
    """Why a pipeline cannot have so many micro-batches, in one sentence."""
    rows = " or ".join(map(str, dict.fromkeys(sizes)))
    return ShardwrightError(
        f"Micro-batches of {rows} rows cannot be split as the plan's stages are: {why}",
        f"Ask for fewer than {count}, or plan again with --microbatches {count}.",
    )
