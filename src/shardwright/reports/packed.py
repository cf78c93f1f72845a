"""The data that a page carries of a plan's step: the events of every stage once, and the order of passes for several numbers
of micro-batches, so that the page can run the whole step again at other speeds and with other micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import log
from time import perf_counter
from typing import Any

from shardwright.costs.passes import once_a_step
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program.microbatches import batch_of
from shardwright.program.transfers import Border
from shardwright.reports.packing import packed_step
from shardwright.reports.steps import SEARCHED, PlanStep, RankStep
from shardwright.simulator import Timeline, simulate_plan
from shardwright.simulator.links import way_of
from shardwright.simulator.variants import link_names, order_name

VARIANTS = 7
"""Numbers of micro-batches that a page can simulate, the plan's own among them."""

BETWEEN = "between stages"

BYTES = ("resting", "kept", "held", "held_for_weights", "peaks", "closing")
"""What the page is told of what passes hold."""


def packed_plan(step: PlanStep, seconds: float = 0.0) -> dict[str, Any]:
    """What the page's simulation needs; other numbers of micro-batches as far as ``seconds`` reach."""
    plan, graph, started = step.plan, step.graph, perf_counter()
    programs: list[dict[str, Any]] = []
    variants = [_variant(plan, step.timeline, programs)]
    for count in microbatch_counts(plan, graph)[1:]:
        if perf_counter() - started > seconds:
            break
        try:
            variants.append(_variant(plan, simulate_plan(plan, graph, microbatches=count), programs))
        except ShardwrightError:
            continue  # the splits, the schedule or an operator do not allow so many
    rows = zip(plan.stages, plan.schedule.device_of, strict=True)
    return {
        "microbatches": plan.microbatches,
        "links": link_names(plan),
        "stages": [{"group": g, "ranks": list(s.ranks), "axes": axes_of(s.strategy)} for s, g in rows],
        "programs": programs,
        "variants": sorted(variants, key=lambda variant: variant["microbatches"]),
    }


def microbatch_counts(plan: Plan, graph: Graph) -> list[int]:
    """Numbers of micro-batches to offer, the plan's own first, then those nearest to it that divide the batch."""
    batch, mine = batch_of(graph), plan.microbatches
    others = [count for count in range(1, batch + 1) if batch % count == 0 and count != mine]
    return [mine, *sorted(others, key=lambda count: abs(log(count / mine)))][:VARIANTS]


def _variant(plan: Plan, timeline: Timeline, programs: list[dict[str, Any]]) -> dict[str, Any]:
    """The step with one number of micro-batches; the programs it needs are added to those there are."""
    pipe, order = timeline.pipeline, timeline.pipeline.schedule
    rows = list(dict.fromkeys(pipe.micro.sizes))
    numbers = []
    for stage in range(len(pipe.stages)):
        numbers.append(list(range(len(programs), len(programs) + len(rows))))
        programs += [_program(timeline, stage, size) for size in rows]
    return {
        "microbatches": order.microbatches,
        "order": order_name(order) or SEARCHED,
        "rows": rows,
        "sizes": [rows.index(size) for size in pipe.micro.sizes],
        "programs": numbers,
        "borders": [[_border(plan, one) for one in pipe.borders[size]] for size in rows],
        "ties": [
            [list(groups), latency, wire]
            for groups, latency, wire in timeline.links.ties(lambda stage: timeline.stage(stage).program)
        ],
        "orders": [" ".join(map(str, actions)) for actions in order.orders],
    }


def _border(plan: Plan, one: Border) -> dict[str, Any]:
    """A tensor between two stages: how it goes there, how its gradient comes back, and what each is received into."""
    ends = [plan.stages[stage].ranks for stage in (one.source, one.target)]
    ways: list[Any] = []
    for back in (False, True):
        way, parcels = way_of(one, back, plan.cluster, *ends), one.parcels(back)
        into = sum(parcel.elements for parcel in parcels if parcel.target == 0) * DTYPE_BYTES[one.dtype]
        link = way.link and [
            way.latency,
            way.seconds - way.latency,
            way.link.processor_share,
            way.link.processor_seconds,
        ]
        ways.append({"link": link, "bytes": way.bytes, "into": into})
    return {"name": one.tensor, "source": one.source, "target": one.target, "grad": one.grad, "ways": ways}


def _program(timeline: Timeline, stage: int, size: int) -> dict[str, Any]:
    step = RankStep(timeline.times[stage, size])
    mine = step.stage
    return {
        **packed_step(step),
        "passes": {kind: runs(numbers) for kind, numbers in mine.passes.items()},
        "apart": bool(once_a_step(mine.program)),
        "received": list(mine.received),
        "held": {what: getattr(mine.bytes, what) for what in BYTES} | {"planned": mine.planned},
    }


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers that ascend as runs, each from its first to behind its last.

    >>> runs([3, 4, 5, 9])
    [[3, 6], [9, 10]]
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def axes_of(strategy: Strategy) -> list[dict[str, Any]]:
    """The axes of a strategy's mesh, as the scripts read them."""
    return [{"name": name, "size": size} for name, size in strategy.axes]


def packed_traffic(step: PlanStep) -> dict[str, Any]:
    """Who sends what to whom: collectives inside every stage, and parcels between stages."""
    plan, pairs = step.plan, [[*pair, size] for pair, size in sorted(step.parcels.items())]
    names = dict.fromkeys(name for stage in plan.stages for name, _ in stage.strategy.axes)
    blocks = [
        {
            "ranks": list(stage.ranks),
            "axes": axes_of(stage.strategy),
            "flows": [asdict(flow) for flow in step.flows(number)],
        }
        for number, stage in enumerate(plan.stages)
    ]
    return {
        "ranks": 1 + max(plan.ranks),
        "names": [*names, *([BETWEEN] if pairs else [])],
        "blocks": blocks,
        "pairs": pairs,
    }
