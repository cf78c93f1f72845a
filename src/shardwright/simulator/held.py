"""What the passes of a stage hold: bytes at rest, between the passes of a micro-batch, and inside each pass at the worst.

The storages of a stage's program (:mod:`shardwright.costs.memory`) are those of one micro-batch. In a pipeline several are
under way: what a forward pass leaves for the backward pass is there once for each of them, and so are the values that came
from other stages. Gradients of parameters are added up from micro-batch to micro-batch, so they are there once, from the
first backward pass to the end of the step, and a new one only until it has been added. After the last pass they go home one
after the other: each is let go of when it has been scattered, packed or given to its parameter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.cluster import Device
from shardwright.costs.memory import Storage, lifetimes, memory
from shardwright.program import Kind, Program
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage on one rank.

    ``resting`` is there throughout, ``kept`` (the gradients) from the first backward pass on, ``held`` between a
    micro-batch's forward and backward pass, ``held_for_weights`` between the halves of its backward pass. ``peaks``
    are the most inside a pass of each kind, with what its micro-batch holds; ``closing`` is the most after the last pass
    beyond what rests and is kept.
    """

    resting: float
    kept: float
    held: float
    held_for_weights: float
    peaks: Mapping[str, float]
    closing: float

    @property
    def working(self) -> float:
        """The most that a pass needs beyond what its micro-batch holds anyway."""
        return max(self.closing, *(peak - self.held for peak in self.peaks.values()), 0.0)


def stage_bytes(
    program: Program,
    weights_from: int,
    device: Device,
    microbatches: int,
    received: Collection[str],
    home: Collection[int],
) -> StageBytes:
    """What a stage holds. ``received`` are tensors of other stages, ``home`` the instructions that run once a step."""
    use = memory(program, device)
    forward, count = program.forward.stop, len(program.instructions)
    arrivals = program.arrivals
    kept = sum(gradient_bytes(program, n) for n in arrivals)
    resting, inside = 0, np.zeros(count + 1)
    held = later = 0
    for storage in use.storages:
        came = storage.born < 0 and storage.what in received
        if storage.born < 0 and not came:
            resting += storage.bytes
            continue
        born, dies = max(storage.born, 0), storage.dies
        if storage.born in home:
            continue
        if born >= forward:
            dies = _added(storage, arrivals, home, count) if microbatches > 1 else _kept(storage, home, count)
        _count(inside, born, dies, storage)
        held += storage.bytes if born < forward <= dies else 0
        later += storage.bytes if born < weights_from <= dies and dies < count - 1 else 0
    slack = max(use.peak - max(use.curve, default=0), 0)  # what the device's allocator rounds up
    curve = np.cumsum(inside[:count]) + slack

    def most(numbers: Iterable[int]) -> float:
        return float(max((curve[n] for n in numbers if n not in home), default=0.0))

    peaks = {
        FORWARD: most(range(forward)),
        BACKWARD: most(range(forward, count)),
        INPUT: most(range(forward, weights_from)),
        WEIGHT: most(range(weights_from, count)),
    }
    closing = max(_most_going_home(program, device, home) - kept, 0.0)
    return StageBytes(resting, kept, held, min(later, held), peaks, closing)


def _count(change: np.ndarray, born: int, dies: int, storage: Storage) -> None:
    change[born] += storage.bytes
    change[dies + 1] -= storage.bytes


def _added(storage: Storage, arrivals: Sequence[int], home: Collection[int], count: int) -> int:
    """Where a gradient is let go of: when it has been added to those before it, if it is a parameter's."""
    if storage.dies not in home and storage.dies < count - 1:
        return storage.dies
    place = bisect_left(arrivals, storage.born)
    return arrivals[place] if place < len(arrivals) else storage.dies


def _kept(storage: Storage, home: Collection[int], count: int) -> int:
    """Until when a storage is there with one micro-batch: a gradient goes home after the last pass, wherever that stands."""
    return count - 1 if storage.dies in home else storage.dies


def _most_going_home(program: Program, device: Device, home: Collection[int]) -> float:
    """The most bytes of gradients, and of what is made of them on their way and by the optimizer, after the last pass."""
    instructions = [program.instructions[number] for number in sorted(home)]
    slots, waiting = list(program.slots), 0.0
    change = np.zeros(len(instructions) + 1)
    for place, (number, one) in enumerate(zip(sorted(home), instructions, strict=True)):
        if one.kind is Kind.ARRIVE:  # its gradient is there already, in memory of its own
            (slot,) = one.writes
            size = gradient_bytes(program, number)
            slots[slot] = slots[slot]._replace(alias=-1, bytes=size)
            waiting += size
            change[place] -= size
    here = replace(program, instructions=tuple(instructions), slots=tuple(slots), sections={FORWARD: ()})
    for storage in lifetimes(here, device):
        if storage.born >= 0:
            _count(change, storage.born, storage.dies, storage)
    return waiting + float(np.cumsum(change)[:-1].max(initial=0.0))


def gradient_bytes(program: Program, number: int) -> int:
    """Bytes of a gradient that is kept back: those of the parameter as it is read."""
    instruction = program.instructions[number]
    node = program.flow.nodes[instruction.node] if instruction.node >= 0 else None
    value = getattr(node, "result", None)
    return program.flow.values[program.flow.rest[instruction.name] if value is None else value].local.bytes
