"""What every plan of a search must keep, and what the best of them is: one record for all who search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.cluster import Device
from shardwright.search.limits import check_limits, limit_of

FASTEST, LEAST_MEMORY = "fastest", "least-memory"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """``objective``: the fastest plan that fits, or the one that needs least memory. ``gap``: a search under a memory limit
    may end once its answer is proved to lie above the best by no more than this share of its own sum. ``memory_limit``
    counts beside the device's own memory, unless that is ignored (the papers' comparisons do). ``time_limit``: seconds for
    one problem."""

    optimizer: str = "adamw"
    memory_limit: float | None = None
    ignore_device_memory: bool = False
    objective: str = FASTEST
    time_limit: float = 10.0
    gap: float = 0.01

    def __post_init__(self) -> None:
        check_limits(self.memory_limit, self.time_limit)

    def room(self, device: Device) -> float:
        """Bytes that a plan may use of a device."""
        return limit_of(device, self.memory_limit, self.ignore_device_memory)

    def without_limit(self, objective: str = FASTEST) -> Conditions:
        """The same on devices with all the memory in the world."""
        return replace(self, memory_limit=None, ignore_device_memory=True, objective=objective)


ANY = Conditions()
