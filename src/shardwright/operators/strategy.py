"""A strategy: a split for every operator and a resting layout for every tensor that no operator makes.

Everything that searches returns one, every baseline is one, and pricing, simulation and lowering read nothing else about
how a model is split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.errors import PlanError
from shardwright.operators.rules import Cut, Layout, Split


@dataclass(frozen=True)
class Strategy:
    """How a graph is split over a mesh.

    ``axes`` are ``(name, size)`` pairs, slowest link first. ``splits`` maps operator names to splits, ``resting`` maps
    source tensors (parameters, buffers, constants, inputs) to layouts. ``kept`` maps a tensor with several readers to
    the layout it is brought into once, right after it is made; its readers start from there. ``regathered`` names the
    parameters whose gathered copy is freed after its forward use and gathered again for backward (FSDP's way).
    ``whole_gradients`` names gathered parameters whose gradient stays whole until the backward pass is over and is
    scattered then (ZeRO-1), not as soon as it is known (ZeRO-2 and 3).
    ``recomputed`` names blocks (module paths) whose activations are not kept but computed again in the backward pass; of
    those that are ``lightly`` too, only what is cheap to compute for its size (:mod:`shardwright.program.blocks`).
    ``shares`` maps an axis to the part of the work that each of its ranks takes (adding up to one); other axes cut evenly.
    """

    axes: tuple[tuple[str, int], ...]
    splits: Mapping[str, Split]
    resting: Mapping[str, Layout]
    kept: Mapping[str, Layout] = field(default_factory=dict)
    regathered: frozenset[str] = frozenset()
    recomputed: tuple[str, ...] = ()
    whole_gradients: frozenset[str] = frozenset()
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    lightly: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        for name, shares in self.shares.items():
            if len(shares) != sizes.get(name) or min(shares) <= 0 or abs(math.fsum(shares) - 1) > 1e-9:
                raise PlanError(
                    f"the shares {list(shares)} of mesh axis {name!r} do not fit the mesh {sizes}.",
                    "Give every rank of the axis a positive share, adding up to one.",
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """How each axis cuts: its size, or its shares."""
        return tuple(self.shares.get(name, size) for name, size in self.axes)

    @property
    def devices(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total
