"""What if links, devices or the host were faster or slower: the same events, their seconds stretched part by part.

An event on a link takes its ``latency`` (whatever the rate), its ``wire`` seconds (bytes over the link's rate) and ``local``
seconds on the device (copies beside the collective); an event on the compute stream is local throughout. A what-if divides
wire by the link's factor, local by the device's and the host's seconds by the host's. Nothing is decided anew: the plan's
collectives, their order and their algorithms stay, which is the question "what would *this* plan take there". Asked for
another number of micro-batches, the plan's stages stay, and the order of passes is the same recipe's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.costs.pricing import Event
from shardwright.errors import ProblemError, ShardwrightError
from shardwright.graph import Graph
from shardwright.plans import Plan
from shardwright.plans.transfer import carried
from shardwright.program import COMPUTE
from shardwright.program.pipeline import Pipeline
from shardwright.schedules import RECIPES, Schedule, known_schedule


@dataclass(frozen=True)
class WhatIf:
    """Factors of speed: ``link_rates`` by mesh axis, ``device_speed``, ``host_speed``; 2.0 is twice as fast.

    >>> WhatIf(device_speed=2.0).changes
    True
    """

    link_rates: Mapping[str, float] = field(default_factory=dict)
    device_speed: float = 1.0
    host_speed: float = 1.0

    def __post_init__(self) -> None:
        for what, factor in (
            *((f"the link rate of {axis!r}", rate) for axis, rate in self.link_rates.items()),
            ("the device's speed", self.device_speed),
            ("the host's speed", self.host_speed),
        ):
            if not 0.0 < factor < float("inf"):
                raise ShardwrightError(f"A factor of {factor:g} for {what} has no meaning.", "Give a positive factor.")

    @property
    def changes(self) -> bool:
        return any(factor != 1.0 for factor in (*self.link_rates.values(), self.device_speed, self.host_speed))

    def among(self, names: Collection[str]) -> WhatIf:
        """The same without rates of links that are none of these."""
        return replace(self, link_rates={name: rate for name, rate in self.link_rates.items() if name in names})

    def check(self, names: Collection[str]) -> None:
        """Refuse a rate of a link that is none of these."""
        for name in self.link_rates:
            if name not in names:
                raise ShardwrightError(f"The plan has no link {name!r}.", f"Its links: {', '.join(names)}.")


@dataclass(frozen=True)
class SecondsParts:
    """An event's seconds by what they depend on."""

    latency: float
    wire: float
    local: float


def parts(event: Event, mesh: Mesh) -> SecondsParts:
    """The parts of one event's seconds; they add up to ``event.seconds``."""
    axis = next((axis for axis in mesh.axes if axis.name == event.stream), None)
    if event.stream == COMPUTE or axis is None or not event.collective:
        return SecondsParts(0.0, 0.0, event.seconds)
    price = collectives.SECONDS[event.collective]
    priced = min(float(price(event.bytes, axis)), event.seconds)
    wire = min(float(price(event.bytes, axis.without_latency())), priced)
    return SecondsParts(priced - wire, wire, event.seconds - priced)


def scaled(events: Sequence[Event], mesh: Mesh, what_if: WhatIf) -> tuple[Event, ...]:
    """The same events under other speeds."""
    known: dict[tuple[str, str, int, float], float] = {}
    changed = []
    for event in events:
        key = (event.stream, event.collective, event.bytes, event.seconds)
        if key not in known:
            part, rate = parts(event, mesh), what_if.link_rates.get(event.stream, 1.0)
            known[key] = part.latency + part.wire / rate + part.local / what_if.device_speed
        changed.append(event._replace(seconds=known[key], host=event.host / what_if.host_speed))
    return tuple(changed)


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
