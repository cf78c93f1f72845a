"""The backward pass of a program in two: the gradients that others wait for, and those of weights, which can wait.

What leads to the gradients of a stage's inputs comes first, in its order; all the rest follows (Qi et al., zero-bubble
pipeline parallelism, ICLR 2024). A gradient that the rest still reads must not be added to in place meanwhile, so such sums
get memory of their own; neither are sums over ranks made in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwright.program.instructions import Instruction, Kind, Program
from shardwright.program.writer import last_uses


def split_backward(program: Program, wanted: Iterable[int]) -> tuple[Program, int]:
    """The same program with everything first that leads to the gradients of these values; and where the rest begins."""
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
    order = [*range(start), *sorted(first), *(number for number, _ in backward if number not in first)]
    place = {number: here for here, number in enumerate(order)}
    moved = [_moved(program.instructions[number], here, place) for here, number in enumerate(order)]
    border = start + len(first)
    slots = list(program.slots)
    later = {program.root(slot) for instruction in moved[border:] for slot in instruction.reads}
    for instruction in moved[start:border]:
        if instruction.kind is Kind.ACCUMULATE or (instruction.kind is Kind.CHANGE and instruction.collective):
            (total,) = instruction.writes
            if slots[total].alias >= 0 and program.root(total) in later:
                size = program.slots[program.root(total)].bytes
                slots[total] = slots[total]._replace(alias=-1, bytes=size)
    handed_out = {*program.elsewhere.values(), *(v for v in program.flow.results if v not in program.elsewhere)}
    handed_out |= {program.elsewhere.get(v, v) for _, v in program.flow.mutations}
    instructions = last_uses(moved, slots, handed_out)
    changed = replace(program, instructions=instructions, slots=tuple(slots), backward=range(start, len(instructions)))
    return changed, border


def homeward(program: Program) -> tuple[int, ...]:
    """The instructions that bring gradients of parameters home once they are known: from arrival to deposit."""
    reached: set[int] = set()
    chosen: list[int] = []
    started: set[int] = set()
    for number in program.backward:
        instruction = program.instructions[number]
        kind = instruction.kind
        ends = kind in (Kind.ARRIVE, Kind.REDUCE, Kind.DEPOSIT)
        awaits = kind is Kind.AWAIT and not started.isdisjoint(instruction.after)
        reads = kind is not Kind.UPDATE and not reached.isdisjoint(instruction.reads)
        if ends or awaits or reads:
            chosen.append(number)
            started.add(number)
            reached.update(instruction.writes)
    return tuple(chosen)


def _moved(instruction: Instruction, here: int, place: dict[int, int]) -> Instruction:
    """What it makes use of stays before it; work that happened to be issued before it may come later now."""
    return instruction._replace(after=tuple(place[number] for number in instruction.after if place[number] < here))
