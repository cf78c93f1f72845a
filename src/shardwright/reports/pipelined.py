"""A pipeline as the pages need it: the events of every stage once, and for several numbers of micro-batches the order of
passes, so that the page can run the whole step again at other speeds and with other micro-batches.

Stages are plans of their own for a part of the model on a part of the cluster (:func:`stage_plan`), so whatever looks at a
plan without stages looks at one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import log
from time import perf_counter
from typing import Any

from torch.distributed.tensor import Replicate

from shardwright.cluster import part_of
from shardwright.costs.pricing import Event
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.plans import Plan, Stage
from shardwright.plans.stages import one_pass
from shardwright.program.instructions import UPDATE
from shardwright.program.microbatches import batch_of
from shardwright.program.pipeline import Pipeline
from shardwright.program.transfers import Border
from shardwright.reports.packing import axes_of, packed_processor, packed_step
from shardwright.reports.steps import RankStep
from shardwright.reports.traffic import Flow, flows
from shardwright.schedules import INPUT
from shardwright.simulator import Timeline, simulate_plan
from shardwright.simulator.links import way_of
from shardwright.simulator.stages import PricedStage
from shardwright.simulator.variants import link_names, order_name

VARIANTS = 7
"""Numbers of micro-batches that a page can simulate, the plan's own among them."""

BETWEEN = "between stages"

BYTES = ("resting", "kept", "held", "held_for_weights", "peaks", "closing")
"""What the page is told of what passes hold."""


@dataclass(frozen=True, eq=False)
class Piped:
    """A plan with stages, its graph and its simulated step."""

    plan: Plan
    graph: Graph
    timeline: Timeline

    @staticmethod
    def of(plan: Plan, graph: Graph) -> Piped:
        return Piped(plan, graph, simulate_plan(plan, graph))

    @property
    def device_of(self) -> tuple[int, ...]:
        return self.timeline.timing.schedule.device_of

    @property
    def largest(self) -> int:
        """Rows of the largest micro-batch: the one that stands for all where one is looked at."""
        return max(self.timeline.pipeline.micro.sizes)

    def ranks(self, device: int) -> tuple[int, ...]:
        return self.plan.stages[self.device_of.index(device)].ranks

    def stages(self, device: int) -> list[int]:
        return [stage for stage, where in enumerate(self.device_of) if where == device]

    def title(self, device: int) -> str:
        """``stage 1, ranks 8–15``."""
        ranks, stages = self.ranks(device), ", ".join(map(str, self.stages(device)))
        where = f"ranks {ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        return f"stage{'s' if ',' in stages else ''} {stages}, {where}"

    @property
    def last(self) -> int:
        """The device that ends the step."""
        closing = self.timeline.played.closing
        return max(range(len(closing)), key=lambda device: closing[device].end)

    def inside(self, stage: int, size: int) -> RankStep:
        """The passes of one micro-batch through a stage by themselves, without what follows once a step."""
        mine = self.timeline.times[stage, size]
        numbers = [n for n in range(len(mine.events)) if n not in mine.once]
        place = {number: here for here, number in enumerate(numbers)}
        events = tuple(_moved(mine.events[number], place) for number in numbers)
        alone = PricedStage(replace(mine.priced, events=events), mine.microbatches, mine.received)
        return RankStep(f"stage {stage}", len(self.plan.stages[stage].ranks), alone)

    @cached_property
    def steps(self) -> tuple[RankStep, ...]:
        """Per stage one micro-batch of it on one of its ranks."""
        return tuple(
            _rank_step(self.plan, self.timeline, stage, self.largest) for stage in range(len(self.plan.stages))
        )

    def stage(self, number: int) -> tuple[Plan, Graph]:
        """A stage as a plan of its own, and the graph of one micro-batch of it."""
        graph = self.timeline.pipeline.parts[self.largest][number].graph
        return stage_plan(self.plan, number, graph), graph

    def communication(self, number: int) -> dict[tuple[str, str], tuple[int, int]]:
        """Per (collective, axis): how many one rank of a stage performs in a whole step, and their bytes."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        sizes = self.timeline.pipeline.micro.sizes
        for size in dict.fromkeys(sizes):
            mine = self.timeline.times[number, size]
            for place, event in enumerate(mine.events):
                if not event.collective:
                    continue
                times = sizes.count(size) if place not in mine.once else int(size == self.largest)
                count, total = found.get((event.collective, event.stream), (0, 0))
                found[event.collective, event.stream] = (count + times, total + times * event.bytes)
        return {key: value for key, value in found.items() if value[0]}

    def flows(self, number: int) -> list[Flow]:
        return flows(self.communication(number), self.plan.meshes[number])

    @cached_property
    def parcels(self) -> Mapping[tuple[int, int], float]:
        """Bytes from rank to rank of what stages send each other in one step."""
        return parcels(self.timeline)


def stage_plan(plan: Plan, number: int, graph: Graph) -> Plan:
    """One stage, whose graph is given, as a plan without stages: its devices, its strategy."""
    stage = plan.stages[number]
    strategy = stage.strategy
    if strategy.devices == 1:  # nothing was decided there, and everything is whole
        strategy = replace(strategy, kept=dict.fromkeys(graph.tensors, (Replicate(),) * len(strategy.axes)))
    return replace(
        plan,
        cluster=part_of(plan.cluster, stage.ranks),
        stages=(Stage.of(graph, strategy, stage.decisions),),
        schedule=one_pass(graph.training),
    )


def stage_plans(plan: Plan, graph: Graph) -> list[tuple[Plan, Graph]]:
    """Every stage as a plan of its own, with the graph of one micro-batch of it."""
    parts = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm).parts
    return [(stage_plan(plan, number, part.graph), part.graph) for number, part in enumerate(parts[max(parts)])]


def simulated_prediction(plan: Plan, timeline: Timeline, limit: float) -> Plan:
    """The plan with what the simulation of all its ranks says in place of what it was chosen by."""
    told = replace(
        plan.prediction,
        step_seconds=timeline.seconds,
        memory_bytes=timeline.peak_bytes,
        communication_bytes=timeline.communication_bytes,
        exposed_seconds=timeline.exposed_seconds,
        fits=timeline.peak_bytes <= limit,
    )
    stages = tuple(replace(stage, prediction=one) for stage, one in zip(plan.stages, timeline.stages, strict=True))
    return replace(plan, prediction=told, stages=stages)


def parcels(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Bytes from rank to rank between stages, in one step."""
    pipe, found = timeline.pipeline, dict[tuple[int, int], float]()
    for size, borders in pipe.borders.items():
        times = pipe.micro.sizes.count(size)
        for border in borders:
            ends = pipe.stages[border.source].ranks, pipe.stages[border.target].ranks
            ways = [(border.values, *ends), *([(border.gradients, *ends[::-1])] if border.grad else [])]
            for sent, sources, targets in ways:
                for parcel in sent:
                    pair = sources[parcel.source], targets[parcel.target]
                    if pair[0] != pair[1]:
                        size_of = times * parcel.elements * DTYPE_BYTES[border.dtype]
                        found[pair] = found.get(pair, 0.0) + size_of
    return found


def microbatch_counts(plan: Plan, graph: Graph) -> list[int]:
    """Numbers of micro-batches to offer, the plan's own first, then those nearest to it that divide the batch."""
    batch, mine = batch_of(graph), plan.microbatches
    others = [count for count in range(1, batch + 1) if batch % count == 0 and count != mine]
    return [mine, *sorted(others, key=lambda count: abs(log(count / mine)))][:VARIANTS]


def packed_pipeline(piped: Piped, seconds: float = 0.0) -> dict[str, Any]:
    """What the page's simulation needs; other numbers of micro-batches as far as ``seconds`` reach."""
    plan, graph, started = piped.plan, piped.graph, perf_counter()
    programs: list[dict[str, Any]] = []
    variants = [_variant(plan, piped.timeline, programs)]
    for count in microbatch_counts(plan, graph)[1:]:
        if perf_counter() - started > seconds:
            break
        try:
            variants.append(_variant(plan, simulate_plan(plan, graph, microbatches=count), programs))
        except ShardwrightError:
            continue  # the splits, the schedule or an operator do not allow so many
    stages = [
        {
            "device": piped.device_of[number],
            "ranks": list(stage.ranks),
            "axes": axes_of(stage.strategy),
        }
        for number, stage in enumerate(plan.stages)
    ]
    return {
        "microbatches": plan.microbatches,
        "links": link_names(plan),
        "stages": stages,
        "programs": programs,
        "variants": sorted(variants, key=lambda variant: variant["microbatches"]),
    }


def _variant(plan: Plan, timeline: Timeline, programs: list[dict[str, Any]]) -> dict[str, Any]:
    """The pipeline with one number of micro-batches; the programs it needs are added to those there are."""
    pipe, order = timeline.pipeline, timeline.timing.schedule
    rows = list(dict.fromkeys(pipe.micro.sizes))
    numbers = []
    for stage in range(len(pipe.stages)):
        numbers.append(list(range(len(programs), len(programs) + len(rows))))
        programs += [_program(plan, timeline, stage, size) for size in rows]
    return {
        "microbatches": order.microbatches,
        "order": order_name(order) or "an order that was searched for",
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
        way, parcels = way_of(one, back, plan.cluster, *ends), one.gradients if back else one.values
        into = sum(parcel.elements for parcel in parcels if parcel.target == 0) * DTYPE_BYTES[one.dtype]
        link = way.link and [
            way.latency,
            way.seconds - way.latency,
            way.link.processor_share,
            way.link.processor_seconds,
        ]
        ways.append({"link": link, "bytes": way.bytes, "into": into})
    return {"name": one.tensor, "source": one.source, "target": one.target, "grad": one.grad, "ways": ways}


def _program(plan: Plan, timeline: Timeline, stage: int, size: int) -> dict[str, Any]:
    step = _rank_step(plan, timeline, stage, size)
    mine, forward = step.stage, step.stage.program.forward.stop
    return {
        **packed_step(step),
        "processor": step.processor and packed_processor(step.processor, step.streams),
        "passes": {
            "forward": forward,
            "weights": forward + len(mine.passes[INPUT]) if INPUT in mine.program.sections else len(mine.events),
            "home": sorted(mine.once),
            "updates": list(mine.passes[UPDATE]),
            "received": list(mine.received),
            "bytes": {what: getattr(mine.bytes, what) for what in BYTES},
        },
    }


def _rank_step(plan: Plan, timeline: Timeline, stage: int, size: int) -> RankStep:
    return RankStep(f"stage {stage}", len(plan.stages[stage].ranks), timeline.times[stage, size])


def _moved(event: Event, place: Mapping[int, int]) -> Event:
    """An event among others than before, at whose places those that it waits for now stand."""
    after = tuple(place[number] for number in event.after if number in place)
    return event._replace(instruction=event.instruction._replace(after=after))


def packed_traffic(piped: Piped) -> dict[str, Any]:
    """Who sends what to whom: collectives inside every stage, and parcels between stages."""
    plan = piped.plan
    names = dict.fromkeys(name for stage in plan.stages for name, _ in stage.strategy.axes)
    blocks = [
        {
            "ranks": list(stage.ranks),
            "axes": axes_of(stage.strategy),
            "flows": [asdict(flow) for flow in piped.flows(number)],
        }
        for number, stage in enumerate(plan.stages)
    ]
    pairs = [[*pair, size] for pair, size in sorted(piped.parcels.items())]
    return {"ranks": plan.devices, "names": [*names, BETWEEN], "blocks": blocks, "pairs": pairs}
