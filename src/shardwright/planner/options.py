"""How to plan: what a user may ask for, checked where it is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.errors import ShardwrightError
from shardwright.plans.spaces import LIGHT, NOTHING, WHOLE
from shardwright.records import shown
from shardwright.search.limits import check_limits
from shardwright.search.strategies import check_name

DEFAULT_BASELINES = ("data-parallel", "fsdp", "megatron")

Progress = Callable[[str], None]

MOST_AXES = 6
"""An operator with k loops has up to (k + 1) to the power of the axes splits."""


@dataclass(frozen=True)
class Options:
    """How to plan. ``pins`` and ``forbidden`` are user constraints (:mod:`shardwright.search.constraints`)."""

    search: str = "auto"
    baselines: Sequence[str] = DEFAULT_BASELINES
    optimizer: str = "adamw"
    max_axes: int = 2
    one_axis: bool = True
    """Look at all devices of several nodes as one axis too."""
    time_limit: float = 10.0
    gap: float = 0.01
    """A search under a memory limit may end once its answer is proved to lie above the best by no more than this share of
    its own sum."""
    memory_limit: float | None = None
    ignore_device_memory: bool = False
    """Plan as if devices had all the memory in the world (the papers' comparisons do)."""
    pins: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    fewer_devices: bool = True
    recompute: str = "auto"
    """Recompute repeated blocks' activations in backward: ``blocks`` always, ``none`` never, ``auto`` if nothing fits."""
    batch_norm: str = "whole"
    """Whose statistics batch norms take in pipelines that are searched: those of the whole batch, which refuses
    micro-batches, or ``per-piece``, those of every micro-batch."""

    def __post_init__(self) -> None:
        for name in (self.search, *self.baselines):
            check_name(name)
        check_limits(self.memory_limit, self.time_limit)
        if not 1 <= self.max_axes <= MOST_AXES:
            raise ShardwrightError(
                f"Meshes of up to {shown(self.max_axes)} axes are not searched.", f"Ask for 1 to {MOST_AXES} axes."
            )
        if self.recompute not in ("auto", NOTHING, LIGHT, WHOLE):
            known = ", ".join(("auto", NOTHING, LIGHT, WHOLE))
            raise ShardwrightError(f"There is no way to recompute {self.recompute!r}.", f"Known: {known}.")
