"""What passes hold: bytes at rest, between the passes of a microbatch, and inside each pass, instruction by instruction.

The storages of a program (:mod:`shardwright.costs.memory`) are those of one microbatch. Where several are under way, what a
forward pass leaves for the backward pass is there once for each of them, and so are the values that came from other stages.
Gradients of parameters are added up from microbatch to microbatch, so they are there once, from the first backward pass to
the end of the step, and a new one only until it has been added. After the last pass they are reduced one after the other:
each is let go of when it has been scattered, packed or given to its parameter. A step composes these profiles
(:func:`beside_passes`); of one microbatch whose backward pass reduces gradients as it goes, that is the own account of the
program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.cluster import Device
from shardwright.costs.memory import MemoryUse, Storage, lifetimes
from shardwright.program import Kind, Program
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action


@dataclass(frozen=True, eq=False)
class StageBytes:
    """Bytes of one stage on one rank.

    ``resting`` is there throughout, ``kept`` (the gradients) from the first backward pass on, ``held`` between a
    microbatch's forward and backward pass, ``held_for_weights`` between the halves of its backward pass. ``inside`` are the
    bytes during every instruction of a pass, with what its microbatch holds; ``closing`` is the most after the last pass
    beyond what rests and is kept.
    """

    resting: float
    kept: float
    held: float
    held_for_weights: float
    inside: np.ndarray
    passes: Mapping[str, tuple[int, ...]]
    """The instructions of every kind of pass."""
    closing: float

    @cached_property
    def peaks(self) -> Mapping[str, float]:
        """The most inside a pass of each kind."""
        return {kind: float(self.inside[list(own)].max(initial=0.0)) for kind, own in self.passes.items()}

    @property
    def working(self) -> float:
        """The most that a pass needs beyond what its microbatch holds anyway."""
        return max(self.closing, *(peak - self.held for peak in self.peaks.values()), 0.0)


def once_a_step(program: Program) -> frozenset[int]:
    """The instructions that follow the last pass: none where the backward pass reduces gradients as it goes, for the
    optimizer then belongs to it."""
    sections = program.sections
    return frozenset((*sections[REDUCE], *sections[UPDATE])) if REDUCE in sections else frozenset()


def stage_bytes(
    program: Program, use: MemoryUse, device: Device, microbatches: int, received: Collection[str]
) -> StageBytes:
    """What a stage holds whose program uses memory so. ``received`` are tensors of other stages."""
    forward, count, once = program.forward.stop, len(program.instructions), once_a_step(program)
    weights_from = forward + len(program.sections[INPUT]) if INPUT in program.sections else count
    arrivals = program.arrivals
    kept = sum(gradient_bytes(program, n) for n in arrivals) if once else 0
    resting = sum(storage.bytes for storage in use.storages if rests(storage, received))
    change, held, later = np.zeros(count + 1), 0, 0
    for storage, born, dies in lives(program, use, microbatches, received):
        _count(change, born, dies, storage)
        held += storage.bytes if born < forward <= dies else 0
        later += storage.bytes if born < weights_from <= dies and dies < count - 1 else 0
    slack = max(use.peak - max(use.curve, default=0), 0)  # what the device's allocator rounds up
    inside = np.cumsum(change[:count]) + slack
    ranges = {
        FORWARD: range(forward),
        BACKWARD: range(forward, count),
        INPUT: range(forward, weights_from),
        WEIGHT: range(weights_from, count),
    }
    passes = {kind: tuple(n for n in numbers if n not in once) for kind, numbers in ranges.items()}
    closing = max(_most_reduced(program, device, once) - kept, 0.0) if once else 0.0
    return StageBytes(resting, kept, held, later, inside, passes, closing)


def rests(storage: Storage, received: Collection[str]) -> bool:
    """Whether something is there throughout: it did not come from another stage."""
    return storage.born < 0 and storage.what not in received


def lives(
    program: Program, use: MemoryUse, microbatches: int, received: Collection[str]
) -> Iterator[tuple[Storage, int, int]]:
    """What comes and goes with a microbatch, and the first and the last instruction during which it is there."""
    forward, count, once, arrivals = (
        program.forward.stop,
        len(program.instructions),
        once_a_step(program),
        program.arrivals,
    )
    for storage in use.storages:
        if rests(storage, received) or storage.born in once:
            continue
        born, dies = max(storage.born, 0), storage.dies
        if born >= forward:
            dies = _added(storage, arrivals, once, count) if microbatches > 1 else _kept(storage, once, count)
        yield storage, born, dies


def beside_passes(
    order: Sequence[Action],
    of: Callable[[int, int], StageBytes],
    microbatches: int,
    received: Callable[[Action], float],
) -> tuple[list[float], float]:
    """Bytes on a rank beside what is inside each of its passes: what rests, gradients, what other microbatches hold, and the
    buffers that the next pass receives into; and the most after the last pass.

    ``of`` gives what a stage holds of a microbatch, ``received`` the bytes that a pass receives.
    """
    stages = {action.stage: of(action.stage, 0) for action in order}  # the first microbatch is as large as any
    there = sum(one.resting for one in stages.values())
    held: dict[tuple[int, int], float] = {}
    kept: dict[int, float] = {}
    found = []
    for number, (stage, kind, microbatch) in enumerate(order):
        here = of(stage, microbatch)
        if kind != FORWARD and microbatches > 1:
            kept[stage] = here.kept
        others = sum(size for key, size in held.items() if key != (stage, microbatch))
        posted = received(order[number + 1]) if number + 1 < len(order) else 0.0
        found.append(there + sum(kept.values()) + others + posted)
        held[stage, microbatch] = {FORWARD: here.held, INPUT: here.held_for_weights}.get(kind, 0.0)
    last = sum(one.kept for one in stages.values()) + max(one.closing for one in stages.values())
    return found, there + last


def _count(change: np.ndarray, born: int, dies: int, storage: Storage) -> None:
    change[born] += storage.bytes
    change[dies + 1] -= storage.bytes


def _added(storage: Storage, arrivals: Sequence[int], once: Collection[int], count: int) -> int:
    """Where a gradient is let go of: when it has been added to those before it, if it is a parameter's."""
    if storage.dies not in once and storage.dies < count - 1:
        return storage.dies
    place = bisect_left(arrivals, storage.born)
    return arrivals[place] if place < len(arrivals) else storage.dies


def _kept(storage: Storage, once: Collection[int], count: int) -> int:
    """Until when a storage is there with one micro-batch: a gradient goes home after the last pass, wherever that stands."""
    return count - 1 if storage.dies in once else storage.dies


def _most_reduced(program: Program, device: Device, once: Collection[int]) -> float:
    """The most bytes of gradients, and of what is made of them on their way and by the optimizer, after the last pass."""
    instructions = [program.instructions[number] for number in sorted(once)]
    slots, waiting = list(program.slots), 0.0
    change = np.zeros(len(instructions) + 1)
    for place, (number, one) in enumerate(zip(sorted(once), instructions, strict=True)):
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
    return program.flow.values[program.read_by(program.instructions[number])].local.bytes
