"""What the runtime's own Python adds to the host's work on every rank of a parallelized module.

Beginning and ending a step, reading a parameter and handing its gradient on to the optimizer, a collective, every parameter
or gradient that travels in it, an exchange of statistics inside an operator: none of them is a kernel, all of them take the
host's time.
``bench/host_calibration.py`` measures them on tiny programs, in units of a view, which is Python and dispatch on any device;
a device whose profile says what a view takes there turns them into seconds. Nothing is fitted to the models of the accuracy
benchmark.

On CUDA both passes of a training step are replayed as graphs: the host launches two of them and then does what only Python
can do. What the latter takes was measured without graphs, so it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.cluster import Device
from shardwright.costs.pricing import Event


@dataclass(frozen=True)
class Runtime:
    """What one step of a parallelized module costs the host beyond its kernels, in views."""

    step: float
    parameter: float
    collective: float
    exchange: float
    traveller: float


RUNTIME = Runtime(step=356.1, parameter=11.0, collective=10.4, exchange=18.9, traveller=17.8)
"""From ``bench/host_calibration.py measure --device cuda`` on the H200's host; measure again when the runtime changes."""


def with_runtime(
    events: Sequence[Event], parameters: int, device: Device, runtime: Runtime, recorded: bool = False
) -> tuple[Event, ...]:
    """The events of a parallelized module's step with what the runtime's Python adds to issuing them; ``recorded``: where
    there are CUDA graphs, the passes are replayed."""
    view = device.profile.dispatch_of.get("view") if device.kind == "cuda" and device.profile is not None else None
    if view is None:
        return tuple(events)
    whole = runtime.step + runtime.parameter * parameters
    added = {"exchange": runtime.exchange * view[0], "update": whole * view[0]}
    if recorded:
        return tuple(e._replace(host=e.host + added["update"] if e.kind == "update" else 0.0) for e in events)
    collective, traveller = runtime.collective * view[0], runtime.traveller * view[0]
    more = (
        added.get(event.kind, collective + traveller * event.travellers if event.collective else 0.0)
        for event in events
    )
    return tuple(e._replace(host=e.host + m) if m else e for e, m in zip(events, more, strict=True))
