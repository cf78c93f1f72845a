"""Steps of a program timed on a host that other people share: on its quietest core, the yardstick before and after.

What is kept of every repeat is the wall seconds per step and the yardstick's seconds beside it
(:mod:`shardwright.cluster.pace`). A prediction is compared repeat by repeat: its host times are multiplied by how much
slower the yardstick was than when the profile was measured, and the error is the median of all repeats. Nothing is left
out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import fake_rank
from shardwright.cluster import Device
from shardwright.cluster.pace import Yardstick, on_quietest_core
from shardwright.costs.pricing import Event
from shardwright.simulator.engine import run

Repeat = Sequence[float]
"""Wall seconds per step, and the yardstick's beside it."""


def measure(step: Callable[[], None], device: str, *, repeats: int, seconds: float = 0.15) -> list[Repeat]:
    """Time a program again and again, in repeats of about so many seconds and at least three steps."""
    with on_quietest_core():
        yardstick = Yardstick(torch.device(device))
        once, _ = fake_rank.timed(step, device, 2)
        steps = max(3, round(seconds / once))
        return yardstick.beside(lambda: fake_rank.timed(step, device, steps)[0], repeats)


@dataclass(frozen=True)
class Compared:
    """Measured and predicted seconds of every repeat, and the host's pace in it (1: as when the profile was measured)."""

    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    paces: tuple[float, ...]
    unhurried: float
    """Predicted at the profile's own pace."""

    @property
    def error(self) -> float:
        """The median over the repeats.

        >>> Compared((1.0, 2.0, 4.0), (1.1, 2.0, 4.0), (1.0, 2.0, 4.0), 1.0).error
        0.0
        """
        return statistics.median(p / m for m, p in zip(self.measured, self.predicted, strict=True)) - 1

    @property
    def cells(self) -> str:
        """For a table: measured, the host's pace, predicted, error; and the error with the host's pace ignored."""
        middle = [statistics.median(values) for values in (self.measured, self.predicted)]
        low, *_, high = statistics.quantiles(self.paces, n=10)
        blind = self.unhurried / middle[0] - 1
        return (
            f"{1e3 * middle[0]:.2f} | {low:.2f} to {high:.2f} | {1e3 * middle[1]:.2f} | {100 * self.error:+.2f} % "
            f"| {100 * blind:+.2f} %"
        )


HEADINGS = "measured ms | host's pace | predicted ms | error | pace ignored"


def compare(repeats: Sequence[Repeat], events: Sequence[Event], device: Device) -> Compared:
    """The same events issued by a host as fast as it was in each repeat."""
    if device.profile is None or "yardstick" not in device.profile.dispatch_of:
        raise ValueError(f"the profile of {device.name} does not say how fast its host was")
    reference = sum(device.profile.dispatch_of["yardstick"])
    paces = tuple(stick / reference for _, stick in repeats)
    predicted = tuple(_seconds(events, pace) for pace in paces)
    return Compared(tuple(wall for wall, _ in repeats), predicted, paces, _seconds(events, 1.0))


def _seconds(events: Sequence[Event], pace: float) -> float:
    return run([event._replace(host=event.host * pace) for event in events]).seconds


def summary(times: Sequence[float], sizes: Sequence[float]) -> str:
    """The sentence under a table of errors of step time and peak memory."""

    def off(errors: Sequence[float]) -> str:
        found = [100 * abs(error) for error in errors]
        return f"{statistics.median(found):.1f} %, worst {max(found):.1f} %" if found else "not measured"

    lowest = f", lowest {100 * min(sizes):+.1f} %" if sizes else ""
    return f"Step time: median absolute error {off(times)}. Peak memory: median {off(sizes)}{lowest}."
