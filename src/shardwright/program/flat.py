"""The program of a rank of a pipeline as one list of numbered instructions, with its stages and micro-batches.

Every pass of the schedule stands there with the instructions of its stage's program, after the parcels that it receives and
before those that it sends; values of different micro-batches have different numbers. What happens once a step (gradients on
their way home, the optimizer) ends it. The executor of a pipeline performs exactly these lines, pass by pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwright.graph.core import DTYPE_BYTES
from shardwright.program.instructions import REDUCE, UPDATE, Instruction, Kind, Phase, Program
from shardwright.program.pipeline import Message, Pipeline
from shardwright.schedules import FORWARD


class Line(NamedTuple):
    """An instruction, and the program that its node and its values' tensors are of (``None``: a parcel)."""

    instruction: Instruction
    program: Program | None


def flat(pipeline: Pipeline, rank: int, programs: Mapping[tuple[int, int], Program]) -> tuple[Line, ...]:
    """What a rank does in one step, from the programs of its stages by number and size of micro-batch.

    Example
    -------
    >>> [line.instruction.kind for line in flat(pipeline, 0, programs)][-1]                      # doctest: +SKIP
    """
    return _Flat(pipeline, rank, programs).lines()


class _Flat:
    def __init__(self, pipeline: Pipeline, rank: int, programs: Mapping[tuple[int, int], Program]) -> None:
        self.pipeline, self.rank, self.programs = pipeline, rank, programs
        self.done: list[Line] = []
        self.base: dict[tuple[int, int], int] = {}
        self.number: dict[tuple[int, int, int], int] = {}
        self.slots = 0

    def lines(self) -> tuple[Line, ...]:
        for step in self.pipeline.steps(self.rank):
            stage, kind, microbatch = step.action
            size = self.pipeline.micro.sizes[microbatch]
            program = self.programs[stage, size]
            phase = Phase.FORWARD if kind == FORWARD else Phase.BACKWARD
            came = {}
            for message in step.receives:
                slot = self._offset(stage, microbatch, program) + _arrives(message, program)
                came[slot] = self._parcel(Kind.RECEIVE, phase, message, stage, slot, ())
            for local in program.sections[kind]:
                self._write(program, local, stage, microbatch, came)
            for message in step.sends:
                slot = self._offset(stage, microbatch, program) + _leaves(message, program)
                self._parcel(Kind.SEND, phase, message, stage, slot, (len(self.done) - 1,))
        largest = max(self.pipeline.micro.sizes)
        for (stage, size), program in self.programs.items():
            if size == largest:
                for local in (*program.sections[REDUCE], *program.sections[UPDATE]):
                    self._write(program, local, stage, len(self.pipeline.micro.sizes), {})
        return tuple(self.done)

    def _offset(self, stage: int, microbatch: int, program: Program) -> int:
        key = (stage, microbatch)
        if key not in self.base:
            self.base[key], self.slots = self.slots, self.slots + len(program.slots)
        return self.base[key]

    def _write(self, program: Program, local: int, stage: int, microbatch: int, came: Mapping[int, int]) -> None:
        offset, one = self._offset(stage, microbatch, program), program.instructions[local]
        reads = tuple(offset + slot for slot in one.reads)
        waits = [self.number[stage, microbatch, n] for n in one.after if (stage, microbatch, n) in self.number]
        waits += [came[slot] for slot in reads if slot in came]
        self.number[stage, microbatch, local] = len(self.done)
        moved = one._replace(
            reads=reads,
            writes=tuple(offset + slot for slot in one.writes),
            last=tuple(offset + slot for slot in one.last),
            early=tuple(offset + slot for slot in one.early),
            after=tuple(dict.fromkeys(waits)),
            stage=stage,
            microbatch=microbatch,
        )
        self.done.append(Line(moved, program))

    def _parcel(self, kind: Kind, phase: Phase, message: Message, stage: int, slot: int, after: tuple[int, ...]) -> int:
        other = message.source if kind is Kind.RECEIVE else message.target
        size = message.parcel.elements * DTYPE_BYTES[message.border.dtype]
        what = f"gradient of {message.border.tensor}" if message.gradient else message.border.tensor
        reads, writes = ((), (slot,)) if kind is Kind.RECEIVE else ((slot,), ())
        made = Instruction(kind, phase, what, f"rank {other}", reads, writes, after)
        self.done.append(Line(made._replace(bytes=size, stage=stage, microbatch=message.microbatch), None))
        return len(self.done) - 1


def _results(program: Program) -> dict[str, int]:
    return {program.flow.values[value].tensor: value for value in program.flow.results}


def _arrives(message: Message, program: Program) -> int:
    """The value that a parcel becomes: an input of the stage, or the gradient of one of its results."""
    name = message.border.tensor
    return program.roots[_results(program)[name]] if message.gradient else program.flow.rest[name]


def _leaves(message: Message, program: Program) -> int:
    name = message.border.tensor
    if not message.gradient:
        value = _results(program)[name]
        return program.elsewhere.get(value, value)
    return program.gradients.get(program.flow.rest[name], program.flow.rest[name])
