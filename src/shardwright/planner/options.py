"""How to plan: what a user may ask for, checked where it is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite

from shardwright.cluster import Cluster, Mesh, meshes, meshes_and_line
from shardwright.errors import ShardwrightError
from shardwright.plans import SearchSpace
from shardwright.plans.spaces import EVERY_STRATEGY, LIGHT, NOTHING, WHOLE
from shardwright.records import shown
from shardwright.search.conditions import FASTEST, LEAST_MEMORY, Conditions
from shardwright.search.constraints import meant_meshes
from shardwright.search.strategies import METHOD_NAMES, check_name

DEFAULT_BASELINES = ("data-parallel", "zero-1", "zero-2", "fsdp", "megatron")
"""The recipes in use; whichever other one is faster than these is shown too."""

Progress = Callable[[str], None]

MOST_AXES = 6
"""An operator with k loops has up to (k + 1) to the power of the axes splits."""


@dataclass(frozen=True)
class Options(Conditions):
    """How to plan, in a user's words: the conditions, and what makes a :class:`~shardwright.plans.SearchSpace` of a
    cluster's meshes. ``pins`` and ``forbidden`` are user constraints (:mod:`shardwright.search.constraints`)."""

    search: str = "auto"
    baselines: Sequence[str] = DEFAULT_BASELINES
    objective: str = field(default=FASTEST, init=False)
    """The least memory where that is what is searched for."""
    max_axes: int = 2
    one_axis: bool = True
    """Look at all devices of several nodes as one axis too."""
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
        super().__post_init__()
        object.__setattr__(self, "objective", LEAST_MEMORY if self.search == LEAST_MEMORY else FASTEST)
        if not 1 <= self.max_axes <= MOST_AXES:
            raise ShardwrightError(
                f"Meshes of up to {shown(self.max_axes)} axes are not searched.", f"Ask for 1 to {MOST_AXES} axes."
            )
        if self.recompute not in ("auto", NOTHING, LIGHT, WHOLE):
            known = ", ".join(("auto", NOTHING, LIGHT, WHOLE))
            raise ShardwrightError(f"There is no way to recompute {self.recompute!r}.", f"Known: {known}.")

    @property
    def conditions(self) -> Conditions:
        """The conditions alone."""
        return Conditions(**{one.name: getattr(self, one.name) for one in fields(Conditions)})

    @property
    def constrained(self) -> bool:
        """Whether a user has pinned or forbidden anything."""
        return bool(self.pins or self.forbidden)

    def meshes(self, cluster: Cluster) -> Sequence[Mesh]:
        """The meshes of a cluster that may be chosen.

        Raises
        ------
        ShardwrightError
            When no mesh has the axes that pins and prohibitions speak of.
        """
        every = (meshes_and_line if self.one_axis else meshes)(cluster, self.max_axes)
        return meant_meshes(every, self.pins, self.forbidden)

    def space(self, shapes: Sequence[Mesh], training: bool) -> SearchSpace:
        """What a search on one of these meshes chooses among, whatever its method."""
        room = self.room(shapes[0].device)
        return SearchSpace(
            search=EVERY_STRATEGY if self.search in METHOD_NAMES else self.search,
            meshes=tuple(mesh.names for mesh in shapes),
            recompute=(NOTHING, LIGHT, WHOLE) if self.recompute == "auto" else (self.recompute,),
            pins=tuple(self.pins),
            forbidden=tuple(self.forbidden),
            memory_limit=room if isfinite(room) else None,
            training=training,
        )
