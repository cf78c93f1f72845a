"""The worst moment of a rank's memory: when it is, and everything that is alive then.

A step's account is composed of its passes (:mod:`shardwright.costs.passes`): what rests, gradients that are kept, what other
micro-batches hold between their passes, and what is inside the pass of the moment, all of it listed here by what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.costs.memory import COMMUNICATION, GRADIENTS, TEMPORARIES, MemoryUse, Storage
from shardwright.costs.passes import lives, once_a_step, rests
from shardwright.costs.pricing import Event
from shardwright.schedules import FORWARD, INPUT, Action
from shardwright.schedules.picture import NAMES
from shardwright.simulator.stages import PricedStage
from shardwright.simulator.timeline import Timeline


@dataclass(frozen=True)
class Alive:
    """Something alive at the worst moment."""

    bytes: int
    kind: str
    what: str
    module: str


@dataclass(frozen=True)
class Peak:
    """``needed`` bytes must be there for a rank, ``handed`` of them are at the worst moment: during an ``event`` of a pass
    (``action``), or where there is none while gradients are reduced and the optimizer runs. ``alive`` is what they are, the
    largest first; the allocator's rounding is the rest."""

    needed: float
    handed: float
    action: Action | None
    event: Event | None
    alive: tuple[Alive, ...]
    use: MemoryUse | None
    """The account of a step whose passes are one forward and one backward."""

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes per kind of content."""
        found: dict[str, int] = {}
        for one in self.alive:
            found[one.kind] = found.get(one.kind, 0) + one.bytes
        return found

    @property
    def largest(self) -> tuple[Alive, ...]:
        return self.alive[:10]

    @property
    def during(self) -> str:
        """The moment, in words."""
        if self.event is None or self.action is None:
            return "the reduction of gradients and the update"
        if self.event.kind == "update":
            return f"the {self.event.name} update"
        where = f" ({self.event.module})" if self.event.module else ""
        found = f"{self.event.phase} of {self.event.name}{where}"
        if self.use is not None:
            return found
        stage, kind, microbatch = self.action
        return f"{found}, in the {NAMES[kind]} pass of micro-batch {microbatch}, stage {stage}"

    def told(self, shown: Callable[[float], str]) -> str:
        """What the allocator does with it, as far as that is known."""
        return self.use.told(shown) if self.use is not None else "what the allocator reserves beyond that is not known."


class Moment(NamedTuple):
    """An event of a pass, by their numbers in a group's order and in its stage, and the bytes that are there then; after
    the last pass (``place`` -1) gradients are reduced and the optimizer runs."""

    place: int
    event: int
    bytes: float


def moments(timeline: Timeline, group: int) -> Iterator[Moment]:
    """Every moment of a rank's step, in the order of issue.

    >>> max(moments(timeline, 0), key=lambda moment: moment.bytes).bytes == peak_of(timeline, 0).handed   # doctest: +SKIP
    True
    """
    order, sizes = timeline.pipeline.schedule.orders[group], timeline.pipeline.micro.sizes
    beside, last = timeline.beside(group)
    for place, (action, there) in enumerate(zip(order, beside, strict=True)):
        held = timeline.times[action.stage, sizes[action.microbatch]].bytes
        for event in held.passes[action.kind]:
            yield Moment(place, event, there + float(held.inside[event]))
    yield Moment(-1, -1, last)


def peak_of(timeline: Timeline, group: int) -> Peak:
    """The worst moment of a rank of a group.

    >>> peak_of(timeline, 0).during                                                              # doctest: +SKIP
    'backward of linear_3 (blocks.0.feed.up), in the backward pass of micro-batch 2, stage 0'
    """
    worst = max(moments(timeline, group), key=lambda moment: moment.bytes)
    order, sizes = timeline.pipeline.schedule.orders[group], timeline.pipeline.micro.sizes
    when = None if worst.place < 0 else order[worst.place]
    event = None if when is None else timeline.times[when.stage, sizes[when.microbatch]].events[worst.event]
    first = timeline.stage(min(action.stage for action in order))
    alone = first.memory if not once_a_step(first.program) else None
    return Peak(timeline.memory[group], worst.bytes, when, event, alive_at(timeline, group, worst), alone)


def alive_at(timeline: Timeline, group: int, moment: Moment) -> tuple[Alive, ...]:
    """Everything that is there at a moment, the largest first.

    >>> alive_at(timeline, 0, Moment(-1, -1, 0.0))[0].kind                                       # doctest: +SKIP
    'parameters'
    """
    place, number, _ = moment
    order, sizes = timeline.pipeline.schedule.orders[group], timeline.pipeline.micro.sizes
    stages = sorted({action.stage for action in order})
    name = {stage: f"stage {stage}" if len(stages) > 1 else "" for stage in stages}
    found = [one for stage in stages for one in _resting(timeline.stage(stage), name[stage])]
    several = len(sizes) > 1
    if place < 0:
        kept = [(stage, timeline.stage(stage).bytes) for stage in stages]
        found += [Alive(int(held.kept), GRADIENTS, _labelled("gradients", name[stage]), "") for stage, held in kept]
        closing = max(held.closing for _, held in kept)
        found.append(Alive(int(closing), TEMPORARIES, "gradients on their way, and the optimizer's", ""))
    else:
        action = order[place]
        if several:
            back = {one.stage for one in order[: place + 1] if one.kind != FORWARD}
            kept = [(stage, timeline.stage(stage).bytes) for stage in stages if stage in back]
            found += [
                Alive(int(held.kept), GRADIENTS, _labelled("gradients so far", name[stage]), "") for stage, held in kept
            ]
        for (stage, microbatch), kind in _under_way(order[:place], action).items():
            waiting = timeline.times[stage, sizes[microbatch]]
            program = (waiting.holding or waiting).program
            border = program.forward.stop + (len(program.sections[INPUT]) if kind == INPUT else 0)
            last = len(program.instructions) - 1
            found += [
                _alive(one, f"micro-batch {microbatch}")
                for one, born, dies in _lives(waiting)
                if born < border <= dies and (kind == FORWARD or dies < last)
            ]
        priced = timeline.times[action.stage, sizes[action.microbatch]]
        label = f"micro-batch {action.microbatch}" if several else ""
        found += [_alive(one, label) for one, born, dies in _lives(priced) if born <= number <= dies]
        posted = timeline.links.received(order[place + 1]) if place + 1 < len(order) else 0
        found.append(Alive(int(posted), COMMUNICATION, "what the next pass receives into", ""))
    return tuple(sorted((one for one in found if one.bytes), key=lambda one: -one.bytes))


def _resting(priced: PricedStage, label: str) -> Iterable[Alive]:
    return (_alive(one, label) for one in priced.memory.storages if rests(one, priced.received))


def _lives(priced: PricedStage) -> Iterable[tuple[Storage, int, int]]:
    held = priced.holding or priced
    return lives(held.program, held.memory, held.microbatches, held.received)


def _under_way(before: tuple[Action, ...], now: Action) -> dict[tuple[int, int], str]:
    """The micro-batches of a group that hold something between two passes, and after which kind of pass."""
    found: dict[tuple[int, int], str] = {}
    for stage, kind, microbatch in before:
        found[stage, microbatch] = kind
    found.pop((now.stage, now.microbatch), None)
    return {key: kind for key, kind in found.items() if kind in (FORWARD, INPUT)}


def _alive(one: Storage, label: str) -> Alive:
    return Alive(one.bytes, one.kind, _labelled(one.what, label), one.module)


def _labelled(what: str, label: str) -> str:
    return f"{what}, {label}" if label else what
