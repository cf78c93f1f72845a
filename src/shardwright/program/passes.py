"""The sections of a program: which of its instructions every kind of pass performs.

A program is built with gradients reduced inside its backward pass, as they become known. Where those of several
microbatches are added up first, their reduction is a section of its own (:func:`reduced_apart`). A backward pass may be in
two (:func:`split_backward`): what leads to the gradients of a stage's inputs comes first, in its order; all the rest follows
(Qi et al., zero-bubble pipeline parallelism, ICLR 2024). A gradient that the rest still reads must not be added to in place
meanwhile, so such sums get memory of their own; neither are sums over ranks made in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.program.instructions import REDUCE, UPDATE, Instruction, Kind, Program
from shardwright.program.writer import last_uses
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT

Sections = dict[str, tuple[int, ...]]


def built_sections(instructions: Sequence[Instruction], forward: int) -> Sections:
    """Those of a program as it is built; its first instructions, so many, are the forward pass."""
    update = tuple(n for n, i in enumerate(instructions) if i.kind is Kind.UPDATE)
    backward = tuple(n for n in range(forward, len(instructions)) if n not in update)
    return {FORWARD: tuple(range(forward)), BACKWARD: backward, UPDATE: update}


def reduced_apart(program: Program) -> Program:
    """The same program with the reduction of gradients as a section of its own. It starts from :attr:`Program.arrivals`."""
    if REDUCE in program.sections:
        return program
    apart = _reduction(program)
    sections = {kind: tuple(n for n in numbers if n not in apart) for kind, numbers in program.sections.items()}
    return replace(program, sections={**sections, REDUCE: tuple(sorted(apart))})


def split_backward(program: Program, wanted: Iterable[int]) -> Program:
    """The same program with its backward pass in two, everything first that leads to the gradients of these values; and
    with the reduction of gradients apart."""
    start = program.backward.start
    backward = list(enumerate(program.instructions))[start:]
    needed = {program.gradients[value] for value in wanted if value in program.gradients}
    first: set[int] = set()
    for number, instruction in reversed(backward):
        if instruction.kind is not Kind.UPDATE and not needed.isdisjoint(instruction.writes):
            first.add(number)
            needed.update(instruction.reads)
    nodes = {program.instructions[number].node for number in first}
    first |= {n for n, i in backward if i.kind is Kind.EXCHANGE and i.node in nodes}
    first |= {n for n, i in backward if i.kind is Kind.AWAIT and not i.writes and first.intersection(i.after)}
    late = [number for number, _ in backward if number not in first]
    order = [*range(start), *sorted(first), *late]
    place = {number: here for here, number in enumerate(order)}
    # What an instruction makes use of stays before it; work that happened to be issued before it may come later now.
    found = ((program.instructions[number], here) for here, number in enumerate(order))
    moved = [one._replace(after=tuple(place[n] for n in one.after if place[n] < here)) for one, here in found]
    border = start + len(first)
    slots = list(program.slots)
    later = {program.root(slot) for instruction in moved[border:] for slot in instruction.reads}
    for instruction in moved[start:border]:
        if instruction.kind is Kind.ACCUMULATE or (instruction.kind is Kind.CHANGE and instruction.collective):
            (total,) = instruction.writes
            if slots[total].alias >= 0 and program.root(total) in later:
                size = program.slots[program.root(total)].bytes
                slots[total] = slots[total]._replace(alias=-1, bytes=size)
    instructions = last_uses(moved, slots, program.handed_out)
    whole = built_sections(instructions, start)
    halves = {
        INPUT: tuple(n for n in whole[BACKWARD] if n < border),
        WEIGHT: tuple(n for n in whole[BACKWARD] if n >= border),
    }
    return reduced_apart(replace(program, instructions=instructions, slots=tuple(slots), sections={**whole, **halves}))


def _reduction(program: Program) -> frozenset[int]:
    """The instructions that bring gradients of parameters home once they are known: from arrival to deposit."""
    reached: set[int] = set()
    chosen: set[int] = set()
    started: set[int] = set()
    for number in program.backward:
        instruction = program.instructions[number]
        kind = instruction.kind
        ends = kind in (Kind.ARRIVE, Kind.REDUCE, Kind.DEPOSIT)
        awaits = kind is Kind.AWAIT and not started.isdisjoint(instruction.after)
        reads = kind is not Kind.UPDATE and not reached.isdisjoint(instruction.reads)
        if ends or awaits or reads:
            chosen.add(number)
            started.add(number)
            reached.update(instruction.writes)
    return frozenset(chosen)
