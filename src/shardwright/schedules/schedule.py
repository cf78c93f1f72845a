"""A pipeline schedule as data: for every device, the order of its actions.

An action is one pass of one micro-batch through one stage: its forward ``F``, the gradient of its inputs ``I``, the
gradient of its weights ``W``, or both gradients in one go ``B`` (the letters of ``torch.distributed.pipelining``).
Splitting the backward pass is Qi et al.'s idea (zero-bubble pipeline parallelism, ICLR 2024). A schedule holds no
times: a device runs its actions one after the other, each as soon as what it needs is there (``timing.py`` says when
that is).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwright.errors import ProblemError
from shardwright.records import shown

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"
KINDS = (FORWARD, INPUT, WEIGHT, BACKWARD)
MOST_STAGES, MOST_MICROBATCHES = 256, 50_000
MOST_PASSES = 50_000
"""Stages times micro-batches. Bounds take a table of stages times passes, a schedule 100 bytes an action; the largest
jobs that were published have some 10,000 (Llama 3: 16 stages, hundreds of micro-batches)."""

MOST_DIGITS = 9
"""Of a stage's or micro-batch's number, as text."""


def check_size(stages: int, microbatches: int) -> None:
    """Refuse a schedule that nobody could mean, before anything is built that is as long as it.

    >>> check_size(16, 1024)
    """
    for count, most, what in ((stages, MOST_STAGES, "stages"), (microbatches, MOST_MICROBATCHES, "micro-batches")):
        if not 1 <= count <= most:
            raise ProblemError(f"{shown(count)} {what} make no schedule.", f"Ask for 1 to {most:,} {what}.")
    if stages * microbatches > MOST_PASSES:
        raise ProblemError(
            f"{stages} stages and {microbatches} micro-batches are {stages * microbatches:,} forward passes.",
            f"A schedule may have {MOST_PASSES:,}: ask for fewer micro-batches.",
        )


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    >>> str(Action(2, "F", 5)), Action.parse("2F5") == Action(2, "F", 5)
    ('2F5', True)
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        for kind in KINDS:
            stage, found, microbatch = text.strip().partition(kind)
            if found and all(part.isdecimal() and len(part) <= MOST_DIGITS for part in (stage, microbatch)):
                return cls(int(stage), kind, int(microbatch))
        raise ProblemError(
            f"{shown(text)} is not an action of a pipeline.",
            "Write stage, kind (F, I, W or B) and micro-batch, such as 2F5.",
        )


@dataclass(frozen=True)
class Schedule:
    """Per device the order of its actions, over all of which every stage does every micro-batch exactly once.

    A schedule that exists is complete: per stage and micro-batch one ``F``, and either one ``B`` or one ``I``
    followed by one ``W`` (on one device), or none of them on any stage (inference). Whether devices could wait for
    each other for ever depends on how the stages are wired, so that is said by ``timing.run``.

    >>> print(Schedule.parse("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"))
    0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1
    """

    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not any(self.orders):
            raise ProblemError("a schedule without any action.", "Give every device its order of actions.")
        check_size(len(self.device_of), self.microbatches)
        _check(self.orders, self.device_of, self.microbatches)

    @cached_property
    def device_of(self) -> tuple[int, ...]:
        """The device of every stage."""
        found: dict[int, int] = {}
        for device, order in enumerate(self.orders):
            for action in order:
                if found.setdefault(action.stage, device) != device:
                    raise ProblemError(
                        f"stage {action.stage} is on device {found[action.stage]}, yet {action} stands on device {device}.",
                        "Give a stage to one device; replicas of a stage are a matter of its own mesh.",
                    )
        missing = next((stage for stage in range(len(found)) if stage not in found), None)
        if missing is not None:
            raise ProblemError(f"stage {missing} of {max(found) + 1} has no action.", "Number the stages 0, 1, 2, ….")
        return tuple(found[stage] for stage in range(len(found)))

    @property
    def stages(self) -> int:
        return len(self.device_of)

    @property
    def devices(self) -> int:
        return len(self.orders)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.actions())

    @cached_property
    def trains(self) -> bool:
        """Whether there are backward passes at all."""
        return any(action.kind != FORWARD for action in self.actions())

    def actions(self) -> Iterator[Action]:
        return (action for order in self.orders for action in order)

    def in_flight(self, device: int) -> int:
        """The most forward passes (of all its stages) whose activations a device holds at once, wholly or for the
        weights.

        >>> Schedule.parse("0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2").in_flight(0)
        3
        """
        now = most = 0
        for action in self.orders[device]:
            now += {FORWARD: 1, INPUT: 0, WEIGHT: -1, BACKWARD: -1}[action.kind]
            most = max(most, now)
        return most

    def merged(self) -> Schedule:
        """The same orders with every ``I`` that is followed by its own ``W`` as one ``B``, which a runtime does faster.

        The gradient then leaves the stage only after the weights, so time the answer before taking it.

        >>> print(Schedule.parse("0F0 0F1 0I0 0W0 0I1 0W1 | 1F0 1I0 1F1 1W0 1I1 1W1").merged())
        0F0 0F1 0B0 0B1 | 1F0 1I0 1F1 1W0 1B1
        """
        orders = []
        for order in self.orders:
            merged: list[Action] = []
            for action in order:
                if action.kind == WEIGHT and merged and merged[-1] == action._replace(kind=INPUT):
                    merged[-1] = action._replace(kind=BACKWARD)
                else:
                    merged.append(action)
            orders.append(tuple(merged))
        return Schedule(tuple(orders))

    def forwards_first(self) -> Schedule:
        """The same orders with every backward pass after all forward passes of its device.

        >>> print(Schedule.parse("0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1").forwards_first())
        0F0 0F1 0B0 0B1 | 1F0 1F1 1B0 1B1
        """
        return Schedule(tuple(tuple(sorted(order, key=lambda action: action.kind != FORWARD)) for order in self.orders))

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, order)) for order in self.orders)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of ``str``: actions by blanks, devices by ``|`` or lines."""
        rows = text.strip().replace("|", "\n").splitlines()
        return cls(tuple(tuple(Action.parse(word) for word in row.split()) for row in rows))


def _check(orders: Sequence[Sequence[Action]], device_of: Sequence[int], microbatches: int) -> None:
    """Every pass once, a weight's gradient after that of the input, both halves or the whole."""
    place: dict[Action, int] = {}
    for order in orders:
        for position, action in enumerate(order):
            if action.kind not in KINDS:
                raise ProblemError(f"{action} has the kind {action.kind!r}.", "Kinds are F, I, W and B.")
            if action in place:
                raise ProblemError(f"{action} stands twice in the schedule.", "Every action is done once.")
            place[action] = position
    trains = any(action.kind != FORWARD for action in place)
    for stage in range(len(device_of)):
        for microbatch in range(microbatches):
            forward, inputs, weights, whole = (place.get(Action(stage, kind, microbatch), -1) for kind in KINDS)
            if forward < 0:
                raise ProblemError(
                    f"{stage}F{microbatch} is missing.", "Every stage needs a forward of every micro-batch."
                )
            halves = inputs >= 0 and weights >= 0 and whole < 0
            if trains and not halves and not (inputs < 0 and weights < 0 and whole >= 0):
                raise ProblemError(
                    f"stage {stage} does not do the backward pass of micro-batch {microbatch} exactly once.",
                    f"Give it either {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}.",
                )
            if halves and weights < inputs:
                raise ProblemError(
                    f"{stage}W{microbatch} stands before {stage}I{microbatch}.", "Weights come after inputs."
                )
