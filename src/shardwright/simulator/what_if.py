"""What if links, devices or the host were faster or slower: the same events, their seconds stretched part by part.

An event on a link takes its ``latency`` (whatever the rate), its ``wire`` seconds (bytes over the link's rate) and
``local`` seconds on the device (copies beside the collective); an event on the compute stream is local throughout. A what-if
divides wire by the link's factor, local by the device's and the host's seconds by the host's. Nothing is decided anew: the
plan's collectives, their order and their algorithms stay, which is the question "what would *this* plan take there".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.costs.pricing import Event
from shardwright.errors import ShardwrightError
from shardwright.program import COMPUTE


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
class Parts:
    """An event's seconds by what they depend on."""

    latency: float
    wire: float
    local: float


def parts(event: Event, mesh: Mesh) -> Parts:
    """The parts of one event's seconds; they add up to ``event.seconds``."""
    axis = next((axis for axis in mesh.axes if axis.name == event.stream), None)
    if event.stream == COMPUTE or axis is None or not event.collective:
        return Parts(0.0, 0.0, event.seconds)
    price = collectives.SECONDS[event.collective]
    priced = min(float(price(event.bytes, axis)), event.seconds)
    wire = min(float(price(event.bytes, axis.without_latency())), priced)
    return Parts(priced - wire, wire, event.seconds - priced)


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
