"""One simulated step as the pages need it: the only module of this room that knows where events come from.

Everything else here reads a :class:`RankStep`: the events of one kind of rank in issue order with their seconds split into
what sliders scale, the storages of its memory, and the streams they run on. When the source of events changes, this file
changes and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.cluster import Mesh
from shardwright.costs.memory import MemoryUse, Storage
from shardwright.costs.pricing import Event
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.program import COMPUTE
from shardwright.simulator import simulate_plan
from shardwright.simulator.engine import Processor, Schedule, run
from shardwright.simulator.stages import PricedStage, load_of, processor_of
from shardwright.simulator.what_if import Parts, parts

__all__ = ["COMPUTE", "Event", "RankStep", "Storage", "rank_steps"]

PARAMETERS, ACTIVATIONS, GRADIENTS, STATISTICS = "parameters", "activations", "gradients", "statistics"


@dataclass(frozen=True)
class RankStep:
    """One step of the ranks of one kind. ``title`` says which they are, ``ranks`` how many."""

    title: str
    ranks: int
    stage: PricedStage

    @property
    def mesh(self) -> Mesh:
        return self.stage.mesh

    @property
    def events(self) -> Sequence[Event]:
        return self.stage.events

    @cached_property
    def schedule(self) -> Schedule:
        """When every event runs where nothing has to be waited for."""
        return run(self.events, self.processor)

    @property
    def seconds(self) -> float:
        return self.schedule.seconds

    @property
    def memory(self) -> MemoryUse:
        return self.stage.memory

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The compute stream, then one per mesh axis that is cut, slowest link first."""
        return tuple(self.busy)

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds each stream works."""
        return load_of([(self.stage, range(len(self.events)))])

    @property
    def processor(self) -> Processor | None:
        return processor_of(self.mesh)

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The seconds of every event by what they depend on; equal events are taken apart once."""
        known: dict[tuple[str, str, int, float], Parts] = {}
        made = []
        for event in self.events:
            key = (event.stream, event.collective, event.bytes, event.seconds)
            if key not in known:
                known[key] = parts(event, self.mesh)
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

    @cached_property
    def communication(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """Per (collective, axis): how many one rank performs in a step, and their bytes."""
        return self.stage.priced.communication


def rank_steps(plan: Plan, graph: Graph) -> tuple[RankStep, ...]:
    """A simulated step for every kind of rank of a plan; all ranks of an operator-split plan are of one kind."""
    count = plan.devices
    title = "the one device" if count == 1 else f"each of the {count} ranks"
    return (RankStep(title, count, simulate_plan(plan, graph).stage()),)
