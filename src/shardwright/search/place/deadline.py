"""When a search must end, asked by Python and by compiled loops alike: those look at a flag that a timer sets."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import numpy as np

LONGEST = 1e6
"""Seconds that a timer is set for at most: eleven days, since threads refuse more than some centuries."""
NEVER = np.zeros(1, dtype=np.bool_)
"""The flag of a search without an end."""


class Deadline:
    """``flag[0]`` turns true after some seconds; compiled loops that look at it must not hold Python's lock.

    >>> with Deadline(60.0) as deadline:
    ...     deadline.passed, bool(deadline.flag[0])
    (False, False)
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.flag = np.zeros(1, dtype=np.bool_)
        self._timer = threading.Timer(min(max(seconds, 0.0), LONGEST), self.flag.fill, (True,))
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self.end - time.perf_counter()

    @property
    def passed(self) -> bool:
        return self.left <= 0

    def part(self, share: float) -> Deadline:
        """A deadline after a share of what is left."""
        return Deadline(share * self.left)
