"""What a page carries of a plan's step, small: columns instead of rows, every string and float once, waits as distances.

The events of every stage stand there once, and the order of passes for several numbers of micro-batches, so that the page
can run the whole step again at other speeds and with other micro-batches. All of it is deflated.

The blocks of a deep model repeat every number and every distance, so that a hundred and sixty layers take little more room
than ten. Floats are written as the shortest text that reads back as the same float, so nothing is rounded on the way.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict
from math import log
from time import perf_counter
from typing import Any

from shardwright.costs.passes import once_a_step
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.program.microbatches import batch_of
from shardwright.reports.steps import COMPUTE, SEARCHED, PlanStep, RankStep
from shardwright.simulator import Timeline, simulate_plan
from shardwright.simulator.engine import Processor
from shardwright.simulator.stages import processor_of
from shardwright.simulator.what_if import link_names, order_name


class StringTable:
    """A table in which every entry stands once, and columns that say for each item how far back in it the entry stands.

    0 means: an entry never seen before, the next of the table. Blocks that repeat each other under new names so give
    columns that repeat too. Columns must be read in the order in which they were written.

    >>> words = StringTable()
    >>> words.column(["a", "b", "a"]), words.table
    ([0, 0, 2], ['a', 'b'])
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}

    def column(self, items: Iterable[Hashable]) -> list[int]:
        codes = []
        for item in items:
            known = len(self._places)
            codes.append(known - self._places.setdefault(item, known))
        return codes

    @property
    def table(self) -> list[Any]:
        return list(self._places)


def differences(values: Sequence[int]) -> list[int]:
    """Every value less the one before it.

    >>> differences([-1, -1, 3])
    [-1, 0, 4]
    """
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def packed_step(step: RankStep) -> dict[str, Any]:
    """One kind of rank: its events and storages as columns over three tables."""
    words, numbers = StringTable(), StringTable()
    events, apart = step.stage.events, step.parts
    streams = {name: number for number, name in enumerate(step.streams)}
    memory = step.stage.memory
    processor = processor_of(step.stage.mesh)
    return {
        "streams": list(step.streams),
        "processor": processor and packed_processor(processor, step.streams),
        "stream": [streams[e.stream] for e in events],
        "kind": words.column(e.kind for e in events),
        "phase": words.column(e.phase for e in events),
        "name": words.column(e.name for e in events),
        "module": words.column(e.module for e in events),
        "collective": words.column(e.collective for e in events),
        "carries": words.column("" if e.stream == COMPUTE else step.carries(e) for e in events),
        "bytes": numbers.column(e.bytes for e in events),
        "latency": numbers.column(p.latency for p in apart),
        "wire": numbers.column(p.wire for p in apart),
        "local": numbers.column(p.local for p in apart),
        "host": numbers.column(e.host for e in events),
        "waits": [[place - earlier for earlier in e.after] for place, e in enumerate(events)],
        "storages": {
            "bytes": numbers.column(s.bytes for s in memory.storages),
            "kind": words.column(s.kind for s in memory.storages),
            "what": words.column(s.what for s in memory.storages),
            "module": words.column(s.module for s in memory.storages),
            "born": differences([s.born for s in memory.storages]),
            "lives": [s.dies - s.born for s in memory.storages],
        },
        "words": words.table,
        "numbers": numbers.table,
    }


def packed_processor(processor: Processor, names: Sequence[str]) -> dict[str, Any]:
    """A processor that communicates for itself; streams by their places."""
    streams = {name: number for number, name in enumerate(names)}
    return {
        "stream": streams[str(processor.stream)],
        "shares": {streams[str(k)]: v for k, v in processor.shares.items() if k in streams},
        "seconds": {streams[str(k)]: v for k, v in processor.seconds.items() if k in streams},
    }


def deflated(document: Any) -> str:
    """A JSON document as base64 of its gzip, the same bytes for the same document."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


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
        "borders": [
            [
                {
                    "name": one.tensor,
                    "source": one.source,
                    "target": one.target,
                    "grad": one.grad,
                    "ways": [
                        {
                            "link": link and [way.latency, rest, link.processor_share, link.processor_seconds],
                            "bytes": way.bytes,
                            "into": way.into,
                        }
                        for way in (timeline.links.way(number, size, back) for back in (False, True))
                        for link, rest in [(way.link, way.seconds - way.latency)]
                    ],
                }
                for number, one in enumerate(pipe.boundaries[size])
            ]
            for size in rows
        ],
        "ties": [
            [list(groups), latency, wire]
            for groups, latency, wire in timeline.links.ties(lambda stage: timeline.stage(stage).program)
        ],
        "orders": [" ".join(map(str, actions)) for actions in order.orders],
    }


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
