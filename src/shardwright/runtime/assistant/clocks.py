"""How long a rank works in a step, and how long it waits for others: clocks that cost next to nothing.

Every wait for a collective is told to the clock (:mod:`shardwright.waiting`); what is left of a step is work. On a processor
the host itself waits, and its own clock is read. On an accelerator the host runs ahead: events are left in the stream where
the computation stops for a collective and where it goes on, and are read steps later, when they have long passed; nothing is
synchronised.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

import torch

from shardwright.waiting import start_clock


class StepSeconds(NamedTuple):
    """Of one step of one rank; ``update`` is the part of the work after the backward pass, where that is known."""

    work: float
    waited: float
    update: float = 0.0


UNKNOWN = StepSeconds(float("nan"), float("nan"))


class HostClock:
    """For ranks whose host computes and waits."""

    lag = 0
    """Steps that are not known yet when the last one ends."""

    def __init__(self) -> None:
        self._turned: float | None = None
        self._waited = self._began = 0.0
        self._update: tuple[float, float] | None = None
        self._steps: deque[StepSeconds] = deque()

    def wait_begins(self) -> None:
        self._began = perf_counter()

    def wait_ended(self) -> None:
        self._waited += perf_counter() - self._began

    def update_begins(self) -> None:
        """The gradients are there."""
        self._update = (perf_counter(), self._waited)

    def turn(self, typical: bool = True) -> None:
        """A step ends and the next one begins; one that is not ``typical`` is not counted."""
        now = perf_counter()
        if self._turned is not None:
            began, waited = (now, self._waited) if self._update is None else self._update
            update = now - began - (self._waited - waited)
            own = StepSeconds(now - self._turned - self._waited, self._waited, update)
            self._steps.append(own if typical else UNKNOWN)
        self._turned, self._waited, self._update = now, 0.0, None

    def __len__(self) -> int:
        return len(self._steps)

    def take(self, count: int) -> list[StepSeconds]:
        """The oldest steps that were not taken yet."""
        return [self._steps.popleft() for _ in range(count)]


class DeviceClock:
    """For ranks whose device computes and waits while the host runs ahead."""

    lag = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._turned: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._update: Any = None
        self._steps: deque[tuple[Any, Any, Any, list[tuple[Any, Any]], bool]] = deque()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait_begins(self) -> None:
        # Sums that go on beside the computation wait in a stream of their own, which keeps nobody from working.
        here = self._stream is not None and torch.cuda.current_stream(self._device) == self._stream
        self._began = self._event() if here else None

    def wait_ended(self) -> None:
        if self._began is not None:
            self._waits.append((self._began, self._event()))

    def update_begins(self) -> None:
        """As of :class:`HostClock`."""
        self._update = self._event()

    def turn(self, typical: bool = True) -> None:
        """As of :class:`HostClock`."""
        self._stream = torch.cuda.current_stream(self._device)
        now = self._event()
        if self._turned is not None:
            self._steps.append((self._turned, self._update or now, now, self._waits, typical))
        self._turned, self._update, self._waits = now, None, []

    def __len__(self) -> int:
        return len(self._steps)

    def take(self, count: int) -> list[StepSeconds]:
        """The oldest steps that were not taken yet; what the device has not done by now is unknown."""
        found = []
        for began, update, ended, waits, typical in (self._steps.popleft() for _ in range(count)):
            if not typical or not ended.query():
                found.append(UNKNOWN)
                continue
            waited = sum(start.elapsed_time(stop) for start, stop in waits) / 1e3
            found.append(
                StepSeconds(began.elapsed_time(ended) / 1e3 - waited, waited, update.elapsed_time(ended) / 1e3)
            )
        return found


Clock = HostClock | DeviceClock


def clock_on(device: torch.device) -> Clock:
    """The clock for ranks on this device, told of every wait from now on."""
    clock = DeviceClock(device) if device.type == "cuda" else HostClock()
    start_clock(clock)
    return clock
