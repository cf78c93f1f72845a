"""One simulated step of a plan as the pages need it: the only module of this room that knows where events come from.

Everything else here reads a :class:`PlanStep`: the stages of a plan, its groups of ranks, and of every stage a
:class:`RankStep`: the events of one of its ranks in issue order with their seconds split into what sliders scale, the
storages of its memory, and the streams they run on. A plan on one mesh has one stage and one group of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.distributed.tensor import Replicate

from shardwright.cluster import part_of
from shardwright.costs.memory import Storage
from shardwright.costs.pricing import Event
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.plans import Plan, Stage
from shardwright.plans.stages import one_pass
from shardwright.program import COMPUTE
from shardwright.program.pipeline import Pipeline
from shardwright.reports.traffic import Flow, flows
from shardwright.simulator import Timeline, simulate_plan
from shardwright.simulator.stages import PricedStage, load_of
from shardwright.simulator.what_if import SecondsParts, order_name, parts

__all__ = ["COMPUTE", "Event", "PlanStep", "RankStep", "Storage", "stage_plans", "told_by"]

PARAMETERS, ACTIVATIONS, GRADIENTS, STATISTICS = "parameters", "activations", "gradients", "statistics"
SEARCHED = "an order that was searched for"


@dataclass(frozen=True, eq=False)
class PlanStep:
    """A plan, its graph and its simulated step."""

    plan: Plan
    graph: Graph
    timeline: Timeline

    @staticmethod
    def of(plan: Plan, graph: Graph) -> PlanStep:
        return PlanStep(plan, graph, simulate_plan(plan, graph))

    @property
    def groups(self) -> range:
        """The groups of ranks that do the same."""
        return range(self.timeline.groups)

    def stages(self, group: int) -> list[int]:
        """The stages of a group of ranks."""
        return [stage for stage, where in enumerate(self.plan.schedule.device_of) if where == group]

    def ranks(self, group: int) -> tuple[int, ...]:
        return self.plan.stages[self.stages(group)[0]].ranks

    def title(self, group: int) -> str:
        """``stage 1, ranks 8–15``; of one group, its ranks alone."""
        ranks, stages = rank_word(self.ranks(group)), ", ".join(map(str, self.stages(group)))
        return ranks if len(self.groups) == 1 else f"stage{'s' if ',' in stages else ''} {stages}, {ranks}"

    @property
    def last(self) -> int:
        """The group that ends the step."""
        closing = self.timeline.played.closing
        return max(self.groups, key=lambda group: closing[group].end)

    @property
    def shape(self) -> str:
        """Stages, micro-batches and meshes, and where there are several passes their order."""
        order = [order_name(self.plan.schedule) or SEARCHED] if several_passes(self.plan) else []
        return ", ".join([self.plan.shape, *order])

    @cached_property
    def steps(self) -> tuple[RankStep, ...]:
        """Per stage one micro-batch of it on one of its ranks."""
        return tuple(RankStep(self.timeline.stage(number)) for number in range(len(self.plan.stages)))

    @cached_property
    def parts(self) -> tuple[tuple[Plan, Graph], ...]:
        """Every stage as a plan of its own, and the graph of one micro-batch of it."""
        return _stage_plans(self.plan, self.timeline.pipeline)

    def communication(self, number: int) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Per (collective, axis): how many one rank of a stage performs in a whole step, their bytes and their seconds."""
        found: dict[tuple[str, str], tuple[int, int, float]] = {}
        sizes = self.timeline.pipeline.micro.sizes
        for size in dict.fromkeys(sizes):
            mine = self.timeline.times[number, size]
            for place, event in enumerate(mine.events):
                if not event.collective:
                    continue
                times = sizes.count(size) if place not in mine.once else int(size == self.timeline.largest)
                count, total, seconds = found.get((event.collective, event.stream), (0, 0, 0.0))
                found[event.collective, event.stream] = (
                    count + times,
                    total + times * event.bytes,
                    seconds + times * event.seconds,
                )
        return {key: value for key, value in found.items() if value[0]}

    def flows(self, number: int) -> list[Flow]:
        done = {key: (times, size) for key, (times, size, _) in self.communication(number).items()}
        return flows(done, self.plan.meshes[number])

    @cached_property
    def parcels(self) -> Mapping[tuple[int, int], float]:
        """Bytes from rank to rank of what stages send each other in one step."""
        pipe, found = self.timeline.pipeline, dict[tuple[int, int], float]()
        for size, boundaries in pipe.boundaries.items():
            times = pipe.micro.sizes.count(size)
            for boundary in boundaries:
                ends = pipe.stages[boundary.source].ranks, pipe.stages[boundary.target].ranks
                ways = [
                    (boundary.parcels(False), *ends),
                    *([(boundary.parcels(True), *ends[::-1])] if boundary.grad else []),
                ]
                for sent, sources, targets in ways:
                    for parcel in sent:
                        pair = sources[parcel.source], targets[parcel.target]
                        if pair[0] != pair[1]:
                            size_of = times * math.prod(parcel.shape) * DTYPE_BYTES[boundary.dtype]
                            found[pair] = found.get(pair, 0.0) + size_of
        return found


def rank_word(ranks: Sequence[int]) -> str:
    """``ranks 8–15``, or ``rank 0``."""
    return f"ranks {ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def several_passes(plan: Plan) -> bool:
    """Whether there is an order of passes to look at: several groups of ranks, or several micro-batches."""
    return plan.schedule.devices > 1 or plan.microbatches > 1


def stage_plans(plan: Plan, graph: Graph) -> tuple[tuple[Plan, Graph], ...]:
    """Every stage as a plan of its own, with the graph of one micro-batch of it."""
    pipe = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule, plan.batch_norm)
    return _stage_plans(plan, pipe)


def _stage_plans(plan: Plan, pipe: Pipeline) -> tuple[tuple[Plan, Graph], ...]:
    graphs = (part.graph for part in pipe.parts[max(pipe.parts)])
    return tuple((_stage_plan(plan, number, graph), graph) for number, graph in enumerate(graphs))


def _stage_plan(plan: Plan, number: int, graph: Graph) -> Plan:
    """One stage, whose graph is given: its devices, its strategy."""
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


def told_by(step: PlanStep, limit: float) -> Plan:
    """The plan with what the simulation of all its ranks says in place of what it was chosen by."""
    plan, timeline = step.plan, step.timeline
    told = replace(
        plan.prediction,
        step_seconds=timeline.seconds,
        memory_bytes=timeline.peak_bytes,
        communication_bytes=timeline.communication_bytes,
        exposed_seconds=timeline.exposed_seconds,
        fits=bool(timeline.peak_bytes <= limit),
    )
    stages = tuple(replace(stage, prediction=one) for stage, one in zip(plan.stages, timeline.stages, strict=True))
    return replace(plan, prediction=told, stages=stages)


@dataclass(frozen=True, eq=False)
class RankStep:
    """One micro-batch of a stage on one of its ranks, and what follows once a step."""

    stage: PricedStage

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The compute stream, then one per mesh axis that is cut, slowest link first."""
        return tuple(load_of([(self.stage, range(len(self.stage.events)))]))

    @cached_property
    def parts(self) -> tuple[SecondsParts, ...]:
        """The seconds of every event by what they depend on; equal events are taken apart once."""
        known: dict[tuple[str, str, int, float], SecondsParts] = {}
        made = []
        for event in self.stage.events:
            key = (event.stream, event.collective, event.bytes, event.seconds)
            if key not in known:
                known[key] = parts(event, self.stage.mesh)
            made.append(known[key])
        return tuple(made)

    @cached_property
    def parameter_tensors(self) -> frozenset[str]:
        return frozenset(self.stage.program.graph.parameter_of)

    def carries(self, event: Event) -> str:
        """What a collective carries: parameters to where they are used, gradients home, activations, or statistics."""
        if event.kind == "exchange":
            return STATISTICS
        if event.kind == "reduce":
            return GRADIENTS
        about_parameter = event.name in self.parameter_tensors or event.travellers > 0
        if not about_parameter:
            return ACTIVATIONS
        return GRADIENTS if event.collective == "reduce_scatter" or event.name.endswith("gradients") else PARAMETERS

    def serves(self, event: Event) -> str:
        """The module whose split makes a change of an activation necessary.

        A sum is completed because the operator that made the tensor left it open (then its gradient is one too); what is
        gathered, is gathered for the operator that reads it, and its gradient scattered for the same reason.
        """
        maker = self.stage.program.graph.producer.get(event.name)
        scatters = event.collective == "reduce_scatter"
        left_open = event.collective == "all_reduce" or (scatters if event.phase != "backward" else not scatters)
        return maker.module if maker is not None and left_open else event.module
