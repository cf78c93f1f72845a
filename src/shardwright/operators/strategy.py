"""A strategy: a split for every operator and a resting layout for every tensor that no operator makes.

Everything that searches returns one, every baseline is one, and pricing, simulation and lowering read nothing else about
how a model is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.operators.rules import Layout, Split


@dataclass(frozen=True)
class Strategy:
    """How a graph is split over a mesh.

    ``axes`` are ``(name, size)`` pairs, slowest link first. ``splits`` maps operator names to splits, ``resting`` maps
    source tensors (parameters, buffers, constants, inputs) to layouts. ``kept`` maps a tensor with several readers to
    the layout it is brought into once, right after it is made; its readers start from there. ``regathered`` names the
    parameters whose gathered copy is freed after its forward use and gathered again for backward (FSDP's way).
    ``whole_gradients`` names gathered parameters whose gradient stays whole until the backward pass is over and is
    scattered then (ZeRO-1), not as soon as it is known (ZeRO-2 and 3).
    ``recomputed`` names blocks (module paths) whose activations are not kept but computed again in the backward pass.
    """

    axes: tuple[tuple[str, int], ...]
    splits: Mapping[str, Split]
    resting: Mapping[str, Layout]
    kept: Mapping[str, Layout] = field(default_factory=dict)
    regathered: frozenset[str] = frozenset()
    recomputed: tuple[str, ...] = ()
    whole_gradients: frozenset[str] = frozenset()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total
