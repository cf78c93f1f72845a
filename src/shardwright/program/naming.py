"""What a profile calls the instructions and passes of a program, written by the runtime and read back by reports.

``instruction 65: backward weight linear_3`` is one line of a program; several of them that run as one compiled function
stand in one name. ``pass 1B3`` is a pass of a pipeline (stage 1, backward, micro-batch 3), ``closing of stage 1`` what
follows the last one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwright.errors import ProblemError
from shardwright.program.instructions import Instruction
from shardwright.schedules import Action

_INSTRUCTION = re.compile(r"^instructions? [\d–]+: (.+)$", re.DOTALL)
_BETWEEN = " + "


def meaning(instruction: Instruction) -> str:
    """An instruction without its number, which differs between programs that split a backward pass and those that do not."""
    return f"{instruction.phase} {instruction.kind} {instruction.name}"


def instruction_name(numbers: Sequence[int], instructions: Sequence[Instruction]) -> str:
    """The name of one instruction, or of several that are one function."""
    said = _BETWEEN.join(meaning(instructions[number]) for number in numbers)
    if len(numbers) == 1:
        return f"instruction {numbers[0]}: {said}"
    return f"instructions {min(numbers)}–{max(numbers)}: {said}"


def meanings(name: str) -> tuple[str, ...]:
    """What a name stands for; nothing where it is no instruction's.

    >>> meanings("instruction 7: forward operator linear_3")
    ('forward operator linear_3',)
    >>> meanings("aten::linear")
    ()
    """
    found = _INSTRUCTION.match(name)
    return tuple(found.group(1).split(_BETWEEN)) if found else ()


def pass_name(action: Action) -> str:
    return f"pass {action}"


def closing_name(stage: int) -> str:
    return f"closing of stage {stage}"


def action_of(name: str) -> Action | None:
    """The pass that a name stands for.

    >>> action_of("pass 1B3")
    Action(stage=1, kind='B', microbatch=3)
    """
    kind, _, rest = name.partition(" ")
    try:
        return Action.parse(rest) if kind == "pass" else None
    except ProblemError:
        return None
