"""Memory over time: the peak of one training step, when it is reached and what makes it up.

Lifetimes of all storages (:mod:`~shardwright.costs.memory_lifetimes`) are summed over the events of the walk; on CUDA they
pass through a model of PyTorch's caching allocator, whose rounding counts. What is predicted is what
``torch.cuda.max_memory_allocated`` reports in a steady training loop that sets gradients to ``None`` after each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.cluster import Mesh
from shardwright.costs.memory_allocator import Allocator
from shardwright.costs.memory_ledger import Storage
from shardwright.costs.memory_lifetimes import lifetimes
from shardwright.costs.walk import Walk, walk
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy


@dataclass(frozen=True)
class Thing:
    """Something alive at the peak."""

    bytes: int
    kind: str
    what: str
    module: str


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device over one step.

    ``peak`` is what the allocator has handed out at the worst moment, ``reserved`` what it has taken from the device by
    then. ``at`` is the number of the event of the peak, ``curve`` the bytes alive during every event, ``alive`` everything
    alive at the peak, the largest first, and ``breakdown`` its sum per kind.
    """

    peak: int
    reserved: int
    at: int
    curve: tuple[int, ...]
    alive: tuple[Thing, ...]
    breakdown: dict[str, int]
    storages: tuple[Storage, ...]

    @property
    def largest(self) -> list[tuple[int, str, str]]:
        """The ten largest things alive at the peak: bytes, what it is, module path."""
        return [(thing.bytes, thing.what, thing.module) for thing in self.alive[:10]]


def memory(graph: Graph, strategy: Strategy, mesh: Mesh, optimiser: str = "adamw", training: bool = True) -> MemoryUse:
    """Bytes over time of one step of ``graph`` split by ``strategy``.

    Example
    -------
    >>> use = memory(graph, strategy, mesh)
    >>> use.peak <= mesh.device.usable_memory
    """
    return memory_of(walk(graph, strategy, mesh, training, optimiser))


def memory_of(events: Walk) -> MemoryUse:
    """Bytes over time of a walk."""
    storages = lifetimes(events)
    count = max(len(events.events), 1)
    change = np.zeros(count + 1, dtype=np.int64)
    for storage in storages:
        change[max(storage.born, 0)] += storage.bytes
        change[storage.dies + 1] -= storage.bytes
    curve = np.cumsum(change[:count])
    at = int(curve.argmax())
    peak = reserved = int(curve[at])
    if events.nodes.mesh.device.kind == "cuda":
        peak, reserved = _allocated(storages, count)
    alive = sorted((s for s in storages if s.born <= at <= s.dies and s.bytes), key=lambda s: -s.bytes)
    breakdown: dict[str, int] = {}
    for storage in alive:
        breakdown[storage.kind] = breakdown.get(storage.kind, 0) + storage.bytes
    things = tuple(Thing(s.bytes, s.kind, s.what, s.module) for s in alive)
    return MemoryUse(peak, reserved, at, tuple(int(b) for b in curve), things, breakdown, tuple(storages))


def _allocated(storages: list[Storage], count: int) -> tuple[int, int]:
    """Peaks of allocated and reserved bytes when the allocator serves these storages, twice: the second step finds its
    segments there and is the one a training loop repeats."""
    births: list[list[int]] = [[] for _ in range(count)]
    deaths: list[list[int]] = [[] for _ in range(count)]
    allocator = Allocator()
    blocks: dict[int, object] = {}
    lasting = []
    for number, storage in enumerate(storages):
        if storage.born < 0:
            lasting.append(number)
        else:
            births[storage.born].append(number)
            deaths[storage.dies].append(number)
    for number in lasting:
        allocator.take(storages[number].bytes)
    for _ in range(2):
        allocator.peak_allocated = allocator.allocated
        for event in range(count):
            for number in births[event]:
                blocks[number] = allocator.take(storages[number].bytes)
            for number in deaths[event]:
                allocator.give(blocks.pop(number))  # type: ignore[arg-type] # what take gave
    return allocator.peak_allocated, allocator.peak_reserved
