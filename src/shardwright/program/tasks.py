"""All that one rank does in a step: an ordered list of passes, each a section of one of its programs.

The passes come in the order of the schedule; around each stand the parcels that it waits for and those that it sends. What
happens once a step ends it: the reduction of gradients, unless the backward pass reduces them as it goes, and the
optimizer. One mesh is the easy case: forward, backward, update. :meth:`StepProgram.lines` lists it instruction by
instruction; the executor performs these lines, the simulator times them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.graph.core import DTYPE_BYTES
from shardwright.program.instructions import Instruction, Kind, Phase, Program
from shardwright.program.transfers import BoundaryTensor, Parcel
from shardwright.schedules import FORWARD, Action


class Message(NamedTuple):
    """A parcel of one micro-batch between two ranks: of a value, or of its gradient."""

    boundary: BoundaryTensor
    gradient: bool
    microbatch: int
    parcel: Parcel
    source: int
    target: int

    def __str__(self) -> str:
        what = f"the gradient of {self.boundary.tensor}" if self.gradient else self.boundary.tensor
        return f"{what} of micro-batch {self.microbatch} from rank {self.source} to rank {self.target}"


class Task(NamedTuple):
    """A pass of a step, the size of its micro-batch, what it waits for and what it sends.

    The kind of its action is that of a section of the stage's program. What happens once for several micro-batches bears the
    number after the last of them.
    """

    action: Action
    size: int
    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()


class ListedLine(NamedTuple):
    """An instruction of a step, and the program that its node and its values' tensors are of (``None``: a parcel).

    Values of different micro-batches have different numbers: ``first`` is that of the program's first value.
    """

    instruction: Instruction
    program: Program | None
    first: int = 0


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What one rank does in one step; ``programs`` are those of its stages, by stage and size of micro-batch."""

    programs: Mapping[tuple[int, int], Program]
    tasks: tuple[Task, ...]

    def lines(self) -> tuple[ListedLine, ...]:
        """Every instruction, numbered from the first pass to the last.

        Example
        -------
        >>> [line.instruction.kind for line in cut.step(0, decisions).lines()][-1]               # doctest: +SKIP
        """
        return _Lines(self).written()


class _Lines:
    def __init__(self, step: StepProgram) -> None:
        self.step = step
        self.done: list[ListedLine] = []
        self.first: dict[tuple[int, int], int] = {}
        self.number: dict[tuple[int, int, int], int] = {}
        self.slots = 0

    def written(self) -> tuple[ListedLine, ...]:
        for (stage, kind, microbatch), size, receives, sends in self.step.tasks:
            program = self.step.programs[stage, size]
            phase = Phase.FORWARD if kind == FORWARD else Phase.BACKWARD
            came = {}
            for message in receives:
                slot = self._first(stage, microbatch, program) + _arrives(message, program)
                came[slot] = self._parcel(Kind.RECEIVE, phase, message, stage, slot, ())
            for local in program.sections[kind]:
                self._write(program, local, stage, microbatch, came)
            for message in sends:
                slot = self._first(stage, microbatch, program) + _leaves(message, program)
                self._parcel(Kind.SEND, phase, message, stage, slot, (len(self.done) - 1,))
        return tuple(self.done)

    def _first(self, stage: int, microbatch: int, program: Program) -> int:
        key = (stage, microbatch)
        if key not in self.first:
            self.first[key], self.slots = self.slots, self.slots + len(program.slots)
        return self.first[key]

    def _write(self, program: Program, local: int, stage: int, microbatch: int, came: Mapping[int, int]) -> None:
        first, one = self._first(stage, microbatch, program), program.instructions[local]
        reads = tuple(first + slot for slot in one.reads)
        waits = [self.number[stage, microbatch, n] for n in one.after if (stage, microbatch, n) in self.number]
        waits += [came[slot] for slot in reads if slot in came]
        self.number[stage, microbatch, local] = len(self.done)
        moved = one._replace(
            reads=reads,
            writes=tuple(first + slot for slot in one.writes),
            last=tuple(first + slot for slot in one.last),
            early=tuple(first + slot for slot in one.early),
            after=tuple(dict.fromkeys(waits)),
            stage=stage,
            microbatch=microbatch,
        )
        self.done.append(ListedLine(moved, program, first))

    def _parcel(self, kind: Kind, phase: Phase, message: Message, stage: int, slot: int, after: tuple[int, ...]) -> int:
        other = message.source if kind is Kind.RECEIVE else message.target
        size = math.prod(message.parcel.shape) * DTYPE_BYTES[message.boundary.dtype]
        what = f"gradient of {message.boundary.tensor}" if message.gradient else message.boundary.tensor
        reads, writes = ((), (slot,)) if kind is Kind.RECEIVE else ((slot,), ())
        made = Instruction(kind, phase, what, f"rank {other}", reads, writes, after)
        self.done.append(ListedLine(made._replace(bytes=size, stage=stage, microbatch=message.microbatch), None))
        return len(self.done) - 1


def _arrives(message: Message, program: Program) -> int:
    """The value that a parcel becomes: an input of the stage, or the gradient of one of its results."""
    name = message.boundary.tensor
    return program.roots[program.flow.result_of[name]] if message.gradient else program.flow.rest[name]


def _leaves(message: Message, program: Program) -> int:
    name = message.boundary.tensor
    if not message.gradient:
        return program.slot_of(program.flow.result_of[name])
    return program.gradients.get(program.flow.rest[name], program.flow.rest[name])
