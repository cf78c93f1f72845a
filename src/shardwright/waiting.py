"""Every wait for other ranks passes through here, so that a clock can tell waiting from working.

A rank that is slow makes the others wait: their steps are as long as its own, and only the time outside of these waits says
who is slow. Without a clock a wait costs one look at an empty list.
"""

from __future__ import annotations

from typing import Any, Protocol


class Clock(Protocol):
    """Told where a wait begins and where it has ended."""

    def wait_begins(self) -> None: ...
    def wait_ended(self) -> None: ...


_CLOCKS: list[Clock] = []


def wait_for(work: Any) -> None:
    """Wait for a collective under way."""
    if not _CLOCKS:
        work.wait()
        return
    for clock in _CLOCKS:
        clock.wait_begins()
    work.wait()
    for clock in _CLOCKS:
        clock.wait_ended()


def start_clock(clock: Clock) -> None:
    """From now on tell ``clock`` of every wait."""
    _CLOCKS.append(clock)


def stop_clock(clock: Clock) -> None:
    """Tell ``clock`` nothing more."""
    _CLOCKS.remove(clock)
