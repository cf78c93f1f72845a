"""What PyTorch's allocator takes from the device for a step that is not recorded, and what another engine holds of one.

The storages of a step's passes are served, in the order of its schedule, by a model of the allocator
(:mod:`shardwright.costs.memory_allocator`): a segment that once was taken stays, and what is freed in it fits only what is
as small, so more is reserved than is ever in use. Two steps are served, for the second finds the segments of the first.
Programs that publish how much memory a step took mostly publish these bytes (``max_memory_reserved``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.costs.memory import ACTIVATIONS, GATHERED, PARAMETERS
from shardwright.costs.memory_allocator import Allocator, MemoryBlock
from shardwright.costs.passes import lives, once_a_step, rests
from shardwright.exchange import Configuration
from shardwright.fitting.engines import keeps_whole, kept_whole, rests_in_float32
from shardwright.program import Kind
from shardwright.schedules import BACKWARD, FORWARD, WEIGHT
from shardwright.simulator import Timeline
from shardwright.simulator.stages import PricedStage


@dataclass(frozen=True)
class Life:
    """Bytes between two instructions of a micro-batch's passes, both of them among these."""

    bytes: int
    born: int
    dies: int


def reserved(
    timeline: Timeline, group: int, c: Configuration, again: frozenset[str] = frozenset(), beside: float = 0.0
) -> int:
    """Bytes that a rank of a group reserves. The products of the modules in ``again`` are computed again; bytes ``beside``
    are taken and given back in every pass."""
    order, sizes = timeline.pipeline.schedule.orders[group], timeline.pipeline.micro.sizes
    stages = sorted({action.stage for action in order})
    several = len(sizes) > 1
    allocator = Allocator()
    for stage in stages:
        for size in _resting(timeline.stage(stage), c):
            allocator.take(size)
    lived = {key: [*_lives(priced, c, again)] for key, priced in timeline.times.items() if key[0] in stages}
    for _ in range(2):
        blocks: dict[tuple[int, int, int], MemoryBlock | None] = {}
        gradients: dict[int, MemoryBlock | None] = {}
        for action in order:
            key = action.stage, sizes[action.microbatch]
            held = timeline.times[key].bytes
            if action.kind != FORWARD and several and action.stage not in gradients:
                more = kept_whole(timeline.stage(action.stage).program).gradients if keeps_whole(c) else 0
                gradients[action.stage] = allocator.take(int(held.kept) + more)
            allocator.give(allocator.take(int(beside)))
            births, deaths = _by_instruction(lived[key])
            for number in held.passes[action.kind]:
                for place in births.get(number, ()):
                    blocks[action.stage, action.microbatch, place] = allocator.take(lived[key][place].bytes)
                for place in deaths.get(number, ()):
                    allocator.give(blocks.pop((action.stage, action.microbatch, place), None))
            if action.kind in (BACKWARD, WEIGHT):  # what dies in the closing of a step belongs to the last one's
                for one in [one for one in blocks if one[:2] == (action.stage, action.microbatch)]:
                    allocator.give(blocks.pop(one))
        allocator.give(allocator.take(int(max(timeline.stage(stage).bytes.closing for stage in stages))))
        for block in (*blocks.values(), *gradients.values()):
            allocator.give(block)
    return allocator.peak_reserved


def _by_instruction(lived: list[Life]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    births: dict[int, list[int]] = {}
    deaths: dict[int, list[int]] = {}
    for place, one in enumerate(lived):
        births.setdefault(one.born, []).append(place)
        deaths.setdefault(one.dies, []).append(place)
    return births, deaths


def _resting(priced: PricedStage, c: Configuration) -> Iterator[int]:
    """What is there throughout."""
    whole = kept_whole(priced.program).gathered if keeps_whole(c) else 0
    alone = rests_in_float32(c)
    for one in priced.memory.storages:
        if rests(one, priced.received):
            doubled = alone and one.kind == PARAMETERS and one.what == "parameter"
            yield 0 if doubled else one.bytes
    yield whole


def _lives(priced: PricedStage, c: Configuration, again: frozenset[str]) -> Iterator[Life]:
    """What comes and goes with a micro-batch, less what the engine does not hold; a fused update makes nothing."""
    held = priced.holding or priced
    program, once = held.program, once_a_step(held.program)
    forward, whole = program.forward.stop, keeps_whole(c)
    for one, born, dies in lives(program, held.memory, held.microbatches, held.received):
        if born in once or program.instructions[born].kind is Kind.UPDATE or (whole and one.kind == GATHERED):
            continue
        if one.kind == ACTIVATIONS and one.module in again and born < forward <= dies:
            dies = born
        yield Life(one.bytes, born, dies)
