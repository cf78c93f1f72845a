"""Schedules with whole backward passes: GPipe, 1F1B, interleaved 1F1B, breadth-first.

GPipe (Huang et al. 2019) runs all forwards, then all backwards. 1F1B (PipeDream-Flush, Narayanan et al. 2021)
alternates them after a warm-up and holds fewer activations. Interleaving gives every device several stages and works
depth-first, ``devices`` micro-batches at a time; breadth-first (Lamy-Poirier 2023) takes all micro-batches through
one of its stages before the next.
"""

from __future__ import annotations

from shardwright.schedules.names import named
from shardwright.schedules.schedule import BACKWARD, FORWARD, Action, Schedule
from shardwright.schedules.shapes import stage_devices


@named("gpipe")
def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, the last micro-batch first."""
    return breadth_first(stages, microbatches, stages)


@named("1f1b")
def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """A warm-up as deep as the stages that follow, then one forward and one backward in turn.

    >>> print(one_f_one_b(2, 2))
    0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1
    """
    orders = []
    for stage in range(stages):
        forwards = [Action(stage, FORWARD, i) for i in range(microbatches)]
        backwards = [Action(stage, BACKWARD, i) for i in range(microbatches)]
        orders.append(_alternate(forwards, backwards, stages - stage - 1))
    return Schedule(tuple(orders))


@named("interleaved-1f1b", stages_per_device=None)
def interleaved_one_f_one_b(devices: int, microbatches: int, stages: int | None = None) -> Schedule:
    """1F1B over several stages per device, in rounds of as many micro-batches as there are devices.

    The published schedule wants stages and micro-batches to be multiples of the devices. What is missing is thought
    to be there and left out of the answer: no device can wait for ever in the whole, so none can in a part.

    >>> print(interleaved_one_f_one_b(1, 2, 2))
    0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1
    """
    stages = stages or 2 * devices
    depth, rounds = -(-stages // devices), -(-microbatches // devices)
    orders = []
    for device in range(devices):
        mine = [device + devices * leg for leg in range(depth)]
        below = devices - 1 - device
        order = _alternate(
            _depth_first(mine, FORWARD, devices, rounds),
            _depth_first(mine[::-1], BACKWARD, devices, rounds),
            below if depth == 1 else (depth - 1) * devices + 2 * below,
        )
        orders.append(tuple(a for a in order if a.stage < stages and a.microbatch < microbatches))
    return Schedule(tuple(orders))


@named("breadth-first", stages_per_device=None)
def breadth_first(devices: int, microbatches: int, stages: int | None = None) -> Schedule:
    """All micro-batches through a device's first stage, then through its next; backwards the other way round.

    >>> print(breadth_first(1, 2, 2))
    0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0
    """
    where = stage_devices(devices, stages or 2 * devices)
    orders = []
    for device in range(devices):
        mine = [stage for stage, place in enumerate(where) if place == device]
        down = [Action(stage, FORWARD, i) for stage in mine for i in range(microbatches)]
        up = [Action(action.stage, BACKWARD, action.microbatch) for action in reversed(down)]
        orders.append((*down, *up))
    return Schedule(tuple(orders))


def _depth_first(stages: list[int], kind: str, devices: int, rounds: int) -> list[Action]:
    return [
        Action(stage, kind, devices * number + i)
        for number in range(rounds)
        for stage in stages
        for i in range(devices)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], warm: int) -> tuple[Action, ...]:
    """``warm`` forwards, then forward and backward in turn, then what is left of the backwards."""
    warm = min(warm, len(forwards))
    order = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - warm :])
