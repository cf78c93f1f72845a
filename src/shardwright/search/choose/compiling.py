"""Seconds that numba has spent compiling: the first search on a machine should not pay for that with its time limit."""

from __future__ import annotations

import time

from numba.core import event


class _Compiling(event.Listener):
    """Adds up compilations; one inside another, or on another thread at the same time, is counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._began = 0.0, 0, 0.0

    def on_start(self, event: event.Event) -> None:
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def on_end(self, event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


_COMPILING = _Compiling()
event.register("numba:compile", _COMPILING)


def seconds() -> float:
    """So far, in this process."""
    return _COMPILING.seconds
