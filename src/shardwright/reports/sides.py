"""A plan ready to be compared: simulated on one mesh or as a pipeline, with what both have in common."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.reports.pipelined import Piped
from shardwright.reports.steps import RankStep, rank_steps
from shardwright.simulator.variants import order_name


@dataclass(frozen=True)
class Side:
    """One of the plans, simulated: on one mesh (``step``) or as a pipeline (``piped``)."""

    plan: Plan
    graph: Graph
    step: RankStep | None
    piped: Piped | None

    @staticmethod
    def of(plan: Plan, graph: Graph) -> Side:
        if not plan.whole:
            return Side(plan, graph, None, Piped.of(plan, graph))
        return Side(plan, graph, rank_steps(plan, graph)[0], None)

    @property
    def seconds(self) -> float:
        return self.step.seconds if self.step is not None else self._pipe.timeline.seconds

    @property
    def peak_bytes(self) -> float:
        if self.step is not None:
            return self.step.memory.peak
        return max(stage.memory_bytes for stage in self._pipe.timeline.stages)

    @property
    def _pipe(self) -> Piped:
        assert self.piped is not None
        return self.piped

    @property
    def shape(self) -> str:
        """The mesh, or the stages and micro-batches."""
        axes = " × ".join(f"{name} {size}" for name, size in self.plan.stages[0].strategy.axes)
        if self.plan.whole:
            return axes
        order = order_name(self._pipe.timeline.timing.schedule) or "an order that was searched for"
        return f"{len(self.plan.stages)} stages of {axes}, {self.plan.microbatches} micro-batches, {order}"

    def looked_at(self) -> tuple[Plan, Graph]:
        """The plan and graph whose splits are put into words: of a pipeline, those of the stage that ends the step."""
        return (
            (self.plan, self.graph) if self.piped is None else self.piped.stage(self.piped.stages(self.piped.last)[0])
        )
