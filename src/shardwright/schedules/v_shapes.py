"""Schedules on a V (two stages per device, down and up again): ZB-V, V-Half, V-Min, DualPipe-V.

The first three repeat one building block (Qi et al. 2024, pipeline parallelism with controllable memory): a
micro-batch travels down, up, down, up through F, F, I, I with a fixed number of slots per device on each leg, and the
next follows six slots later. What a device holds is the life of the activations in slots over six, so slower legs
mean more memory and shorter bubbles: 1, 1, 1, 1 is V-Min (about a third of what 1F1B holds), 2, 1, 2, 1 V-Half (half)
and 4, 2, 4, 2 ZB-V (as much, and no bubble with equal times of F, I and W). DualPipe-V is the V form of DeepSeek's
DualPipe (2025).
"""

from __future__ import annotations

from itertools import product

from shardwright.errors import ProblemError
from shardwright.schedules.names import named
from shardwright.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from shardwright.schedules.shapes import stage_devices

PERIOD = 6
"""Slots per micro-batch on a device: F, I and W of two stages."""


@named("zb-v", stages_per_device=2, shape="v")
def zb_v(devices: int, microbatches: int) -> Schedule:
    """As much memory as 1F1B, no bubble with equal times."""
    return repeated(devices, microbatches, (4, 2, 4, 2), early=True)


@named("v-half", stages_per_device=2, shape="v")
def v_half(devices: int, microbatches: int) -> Schedule:
    """About half the memory of 1F1B."""
    return repeated(devices, microbatches, (2, 1, 2, 1))


@named("v-min", stages_per_device=2, shape="v")
def v_min(devices: int, microbatches: int) -> Schedule:
    """About a third of the memory of 1F1B.

    >>> print(v_min(1, 1))
    0F0 1F0 1I0 0I0 1W0 0W0
    """
    return repeated(devices, microbatches, (1, 1, 1, 1))


def repeated(devices: int, microbatches: int, legs: tuple[int, int, int, int], early: bool = False) -> Schedule:
    """The building block once per micro-batch, six slots apart; weights go where nothing else can run.

    ``legs`` are slots per device on the ways down, up, down and up. ``early`` lets forwards on the way down run
    before their turn while the pipeline fills and there is room for them.
    """
    blocks = _block(devices, legs)
    plans: list[list[Action]] = []
    for device, slots in enumerate(blocks):
        down, up = device, 2 * devices - 1 - device
        passes = ((down, FORWARD), (up, FORWARD), (up, INPUT), (down, INPUT))
        timed = [
            (slot + PERIOD * i, Action(stage, kind, i))
            for slot, (stage, kind) in zip(slots, passes, strict=True)
            for i in range(microbatches)
        ]
        plans.append([action for _, action in sorted(timed)])
    return _with_weights(plans, [_held(slots) for slots in blocks], early)


def _block(devices: int, legs: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Per device the slots of F down, F up, I down, I up, with the shortest rests at the turns that let no two
    collide.
    """
    last = devices - 1
    for rests in sorted(product(range(PERIOD), repeat=3), key=lambda r: (sum(r), r)):
        turn = legs[0] * last + 1 + rests[0]  # F up begins on the last device
        loss = turn + legs[1] * last + 1 + rests[1]  # I down begins on the first
        back = loss + legs[2] * last + 1 + rests[2]  # I up begins on the last
        slots = [
            (legs[0] * d, turn + legs[1] * (last - d), loss + legs[2] * d, back + legs[3] * (last - d))
            for d in range(devices)
        ]
        if all(len({slot % PERIOD for slot in mine}) == 4 for mine in slots):
            return slots
    raise ProblemError(f"legs of {legs} slots always collide.", "Take others, such as 4, 2, 4, 2.")


def _held(slots: tuple[int, int, int, int]) -> int:
    """Forward passes a device holds at most in the steady rhythm, each weight in the next free slot after its input."""
    taken = {slot % PERIOD for slot in slots}
    free = [slot for slot in range(PERIOD) if slot not in taken]
    _, _, up, down = slots
    weights = []
    for after in (up, down):
        slot = next(s for s in range(after + 1, after + 2 * PERIOD) if s % PERIOD in free)
        free.remove(slot % PERIOD)
        weights.append(slot)
    lives = ((slots[1], weights[0]), (slots[0], weights[1]))
    return max(
        sum((moment - begin) // PERIOD - (moment - end) // PERIOD for begin, end in lives) for moment in range(PERIOD)
    )


def _with_weights(plans: list[list[Action]], held: list[int], early: bool) -> Schedule:
    """Put weights into orders of F and I: where the next pass has not arrived or would hold too much (unit times)."""
    devices = len(plans)
    last = 2 * devices - 1
    where = stage_devices(devices, 2 * devices, "v")
    orders: list[list[Action]] = [[] for _ in plans]
    owed: list[list[Action]] = [[] for _ in plans]
    holding = [0] * devices
    done: set[tuple[int, str, int]] = set()

    def arrived(action: Action) -> bool:
        stage, kind, i = action
        if kind == FORWARD:
            return stage == 0 or (stage - 1, FORWARD, i) in done
        return (stage, FORWARD, i) in done and (stage == last or (stage + 1, INPUT, i) in done)

    while any(plans):
        now: list[Action] = []
        for device, plan in enumerate(plans):
            room = held[device] - holding[device]
            place = 0 if plan and arrived(plan[0]) and (room > 0 or plan[0].kind == INPUT or not owed[device]) else -1
            if early and place < 0 and not owed[device] and room > 1:  # one place is kept for the way up
                down = next((k for k, a in enumerate(plan) if a.kind == FORWARD and a.stage == device), -1)
                place = down if down >= 0 and arrived(plan[down]) else -1
            if place >= 0:
                action = plan.pop(place)
                holding[device] += action.kind == FORWARD
                orders[device].append(action)
                now.append(action)
            elif owed[device]:
                holding[device] -= 1
                orders[device].append(owed[device].pop(0))
        for action in now:
            done.add(action)
            if action.kind == INPUT:
                owed[where[action.stage]].append(Action(action.stage, WEIGHT, action.microbatch))
    return Schedule(tuple((*order, *rest) for order, rest in zip(orders, owed, strict=True)))


@named("dualpipe-v", stages_per_device=2, shape="v")
def dualpipe_v(devices: int, microbatches: int) -> Schedule:
    """Forward of one stage beside backward of the other in the steady part; weights apart only while filling and
    draining.

    The published schedule wants two micro-batches per device; missing ones are thought to be there and left out.
    """
    orders = []
    for device in range(devices):
        order = _dualpipe(device, devices, max(microbatches, 2 * devices))
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    return Schedule(tuple(orders))


def _dualpipe(device: int, devices: int, microbatches: int) -> list[Action]:
    below = devices - 1 - device
    words: list[str] = ["F0"] * 2 * below
    words += ["F0", "F1"] * (device + 1)
    words += ["I1", "W", "F1"] * below
    words += ["F0", "B1", "F1", "B0"] * (microbatches - 2 * devices + device + 1)
    words += ["B1", "F1", "B0"] * below
    drain = ["B1", "B0"] * (device + 1)
    words += drain[: device + 1] + [word.replace(BACKWARD, INPUT) for word in drain[device + 1 :]]
    words += ["W", "I0"] * below
    words += ["W"] * (device + 1)

    stages = (device, 2 * devices - 1 - device)
    counts = {"F0": 0, "F1": 0, "0": 0, "1": 0}
    owed: list[Action] = []
    order: list[Action] = []
    for word in words:
        if word == WEIGHT:
            order.append(owed.pop(0))
            continue
        kind, leg = word[0], word[1]
        key = word if kind == FORWARD else leg
        order.append(Action(stages[int(leg)], kind, counts[key]))
        counts[key] += 1
        if kind == INPUT:
            owed.append(Action(stages[int(leg)], WEIGHT, order[-1].microbatch))
    return order
