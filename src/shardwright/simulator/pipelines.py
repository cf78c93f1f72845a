"""A step of a pipeline, simulated on all ranks: every pass event by event, all passes in the order of the schedule.

The program of a stage is simulated by itself, which says how long its passes take (streams, host and exposed communication
inside) and what a micro-batch leaves in memory between them; the schedule is then run with these figures and with the
seconds that values and gradients are on their way between stages. What happens once a step, after the last backward pass
(sums between replicas, the optimizer), follows at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.cluster import Cluster, Link, Mesh
from shardwright.costs.deciding import ByPrice
from shardwright.costs.host_runtime import RUNTIME, with_runtime
from shardwright.costs.memory import memory
from shardwright.costs.pricing import Event, price
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.plans import Plan, StagePrediction
from shardwright.program import COMPUTE, Decisions, Kind, Program
from shardwright.program.passes import homeward
from shardwright.program.pipeline import Pipeline, Stage
from shardwright.program.transfers import Border
from shardwright.schedules import Edge, Schedule, Timing, pipeline, run
from shardwright.schedules import Pipeline as Work
from shardwright.simulator.engine import run as run_events
from shardwright.simulator.timeline import processor_of


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the passes of one micro-batch through a stage on its slowest rank, and what it holds in between (bytes).

    ``closing`` are the seconds of what follows the last backward pass, ``exposed`` those in which a micro-batch's passes
    wait for communication inside the stage. ``resting`` is there throughout, ``working`` only inside a pass.
    """

    forward: float
    inputs: float
    weights: float
    closing: float
    exposed: float
    held: float
    held_for_weights: float
    resting: float
    working: float


@dataclass(frozen=True, eq=False)
class PipelineTimeline:
    """A simulated step of a pipeline."""

    pipeline: Pipeline
    timing: Timing
    times: Mapping[tuple[int, int], PassTimes]
    """By stage and size of micro-batch."""

    @cached_property
    def closing(self) -> tuple[float, ...]:
        """Per device, the seconds after its last pass."""
        largest = max(self.pipeline.micro.sizes)
        count = [0.0] * self.timing.schedule.devices
        for stage, device in enumerate(self.timing.schedule.device_of):
            count[device] += self.times[stage, largest].closing
        return tuple(count)

    @property
    def seconds(self) -> float:
        """From the start of everything to the end of everything."""
        return max(float(ends[-1]) + more for ends, more in zip(self.timing.ends, self.closing, strict=True))

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they neither compute nor communicate inside a stage."""
        busy = sum(self.timing.pipeline.work) + sum(self.closing)
        return 1.0 - busy / (self.seconds * self.timing.schedule.devices)

    def device_memory(self, device: int) -> float:
        """Bytes on a rank of a device at the worst moment."""
        largest = max(self.pipeline.micro.sizes)
        mine = [self.times[stage, largest] for stage in self.timing.pipeline.stages_of(device)]
        return sum(t.resting for t in mine) + max(t.working for t in mine) + self.timing.peak_memory[device]

    @cached_property
    def stages(self) -> tuple[StagePrediction, ...]:
        """What is predicted of every stage."""
        found = []
        for stage, device in enumerate(self.timing.schedule.device_of):
            passes = [self.times[stage, size] for size in self.pipeline.micro.sizes]
            busy = sum(t.forward + t.inputs + t.weights for t in passes) + passes[0].closing
            whole = self.timing.pipeline.work[device] + self.closing[device]
            exposed = sum(t.exposed for t in passes)
            found.append(
                StagePrediction(busy, max(0.0, 1.0 - whole / self.seconds), exposed, self.device_memory(device))
            )
        return tuple(found)

    @property
    def communication_bytes(self) -> float:
        """Bytes that the busiest rank sends to other stages in a step."""
        sent = [0] * self.pipeline.ranks
        for rank in range(self.pipeline.ranks):
            for step in self.pipeline.steps(rank):
                sent[rank] += sum(
                    m.parcel.elements * DTYPE_BYTES[m.border.dtype] for m in step.sends if m.target != rank
                )
        return float(max(sent))


def pass_times(program: Program, weights_from: int, mesh: Mesh, microbatches: int) -> PassTimes:
    """What the passes of a stage take on one rank, and hold."""
    priced = price(program, mesh)
    events = list(with_runtime(priced.events, len(program.graph.parameters), mesh.device, RUNTIME))
    home = {*homeward(program), *(n for n, i in enumerate(program.instructions) if i.kind is Kind.UPDATE)}
    passes = [n for n in range(len(events)) if n not in home]
    place = {number: here for here, number in enumerate(passes)}
    inside = [_moved(events[number], place) for number in passes]
    processor = processor_of(mesh)
    simulated, whole = run_events(inside, processor), run_events(events, processor)

    def end(border: int) -> float:
        return max((simulated.ends[place[n]] for n in passes if n < border), default=0.0)

    forward, inputs, total = end(program.forward.stop), end(weights_from), simulated.seconds
    compute = sum(event.seconds for event in inside if event.stream == COMPUTE)
    use = memory(program, mesh.device)
    start = program.forward.stop
    held = sum(s.bytes for s in use.storages if 0 <= s.born < start <= s.dies)
    later = sum(s.bytes for s in use.storages if 0 <= s.born < weights_from <= s.dies and s.dies < len(events) - 1)
    resting = sum(s.bytes for s in use.storages if s.born < 0)
    kept = sum(_read_bytes(program, n) for n in home if program.instructions[n].kind is Kind.ARRIVE)
    return PassTimes(
        forward,
        inputs - forward,
        max(total - inputs, 0.0),
        max(whole.seconds - total, 0.0),
        max(total - compute, 0.0) if mesh.devices > 1 else 0.0,
        held,
        min(later, held),
        resting + (kept if microbatches > 1 else 0),
        max(use.peak - resting - held, 0),
    )


def _read_bytes(program: Program, number: int) -> int:
    """Bytes of a gradient that is kept back: those of the parameter as it is read."""
    instruction = program.instructions[number]
    node = program.flow.nodes[instruction.node] if instruction.node >= 0 else None
    value = getattr(node, "result", None)
    return program.flow.values[program.flow.rest[instruction.name] if value is None else value].local.bytes


def _moved(event: Event, place: Mapping[int, int]) -> Event:
    after = tuple(place[number] for number in event.after if number in place)
    return event._replace(instruction=event.instruction._replace(after=after))


def hop_seconds(border: Border, cluster: Cluster, sources: Sequence[int], targets: Sequence[int]) -> float:
    """How long a value is on its way between two stages: the largest of its parcels along the link between them."""
    size = max((p.elements for p in border.values), default=0) * DTYPE_BYTES[border.dtype]
    link = _link(cluster, sources, targets)
    return link.latency + size / link.bandwidth


def _link(cluster: Cluster, sources: Sequence[int], targets: Sequence[int]) -> Link:
    """What joins two groups of ranks: the network as soon as they lie on several nodes."""
    nodes, first = set(), 0
    for number, node in enumerate(cluster.nodes):
        if any(first <= rank < first + node.devices for rank in (*sources, *targets)):
            nodes.add(number)
        first += node.devices
    alone = cluster.nodes[min(nodes)]
    return alone.link if len(nodes) == 1 else cluster.network.per_device(min(len(sources), alone.devices))


def work_of(
    pipe: Pipeline, times: Mapping[tuple[int, int], PassTimes], cluster: Cluster, limits: Sequence[float] | None = None
) -> Work:
    """The pipeline as the schedulers see it: seconds and bytes per stage and micro-batch."""

    def table(what: str) -> list[list[float]]:
        return [[getattr(times[stage, size], what) for size in pipe.micro.sizes] for stage in range(len(pipe.stages))]

    held, later = table("held"), table("held_for_weights")
    freed = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(held, later, strict=True)]
    hops: dict[tuple[int, int], float] = {}
    for border in pipe.borders[max(pipe.micro.sizes)]:
        key = (border.source, border.target)
        seconds = hop_seconds(border, cluster, *(pipe.stages[stage].ranks for stage in key))
        hops[key] = hops.get(key, 0.0) + seconds
    return pipeline(
        pipe.schedule.device_of,
        len(pipe.micro.sizes),
        table("forward"),
        table("inputs"),
        table("weights"),
        forward_memory=held,
        inputs_memory=freed,
        edges=[Edge(source, target, seconds) for (source, target), seconds in sorted(hops.items())],
        **({} if limits is None else {"limits": tuple(limits)}),
    )


def stage_times(
    pipe: Pipeline, meshes: Sequence[Mesh], decisions: Sequence[Decisions], optimiser: str
) -> dict[tuple[int, int], PassTimes]:
    """What the passes of all stages take, for every size of micro-batch."""
    found = {}
    for number, stage in enumerate(pipe.stages):
        for size in pipe.parts:
            mesh = meshes[number]
            rank, kind = stage.ranks[0], mesh.device.kind
            built = pipe.program(number, size, rank, decisions[number], device=kind, split=True, optimizer=optimiser)
            assert built.weights is not None
            found[number, size] = pass_times(built.program, built.weights, mesh, len(pipe.micro.sizes))
    return found


def simulate_pipeline(
    graph: Graph,
    stages: Sequence[Stage],
    microbatches: int,
    schedule: Schedule,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    decisions: Sequence[Decisions],
    optimiser: str = "adamw",
) -> PipelineTimeline:
    """Simulate one step of a pipeline on all of its devices."""
    pipe = Pipeline.of(graph, stages, microbatches, schedule)
    times = stage_times(pipe, meshes, decisions, optimiser)
    return PipelineTimeline(pipe, run(schedule, work_of(pipe, times, cluster)), times)


def simulate_plan_pipeline(plan: Plan, graph: Graph) -> PipelineTimeline:
    """Simulate one step of a plan with stages.

    Example
    -------
    >>> simulate_plan_pipeline(plan, plan.graph()).bubble                                        # doctest: +SKIP
    """
    assert plan.schedule is not None  # a plan with stages has one
    meshes = [plan.stage_mesh(number) for number in range(len(plan.stages))]
    decided = [replace(s.decisions, otherwise=ByPrice(m)) for s, m in zip(plan.stages, meshes, strict=True)]
    return simulate_pipeline(
        graph, plan.stages, plan.microbatches, plan.schedule, plan.cluster, meshes, decided, plan.optimiser
    )
