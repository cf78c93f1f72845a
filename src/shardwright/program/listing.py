"""A step, read aloud: one line for every instruction, numbered as everything else numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.program.dataflow import Compute
from shardwright.program.instructions import COMPUTE, Instruction, Kind, Program
from shardwright.program.tasks import ListedLine


def listed(lines: Sequence[ListedLine]) -> list[dict[str, Any]]:
    """Every line as plain values: number, phase, stage, micro-batch, what it does, its stream, what it waits for, bytes
    communicated, and the values that nobody needs afterwards."""
    return [_row(number, *line) for number, line in enumerate(lines)]


def _row(number: int, instruction: Instruction, program: Program | None, first: int) -> dict[str, Any]:
    freed = [] if program is None else [program.slots[slot - first] for slot in instruction.last]
    return {
        "number": number,
        "phase": instruction.phase.value,
        "stage": instruction.stage,
        "microbatch": instruction.microbatch,
        "kind": instruction.kind.value,
        "what": instruction.name if program is None else _what(program, instruction),
        "stream": "compute" if instruction.stream == COMPUTE else f"link {instruction.stream}",
        "waits_for": list(instruction.after),
        "bytes": instruction.bytes,
        "module": instruction.module,
        "frees": [slot.tensor or slot.role for slot in freed],
    }


def _what(program: Program, instruction: Instruction) -> str:
    """The operator and how it is cut, or the tensors that travel."""
    if instruction.kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
        node = program.flow.nodes[instruction.node]
        assert isinstance(node, Compute)
        cuts = [f"{loop}/{size}" for loop, size in zip(node.split, program.flow.place.sizes, strict=True) if loop]
        return f"{program.operator_name(instruction)} {instruction.name}" + (f" [{', '.join(cuts)}]" if cuts else "")
    if len(instruction.steps) > 1:
        tensors = [program.flow.values[_result(program, t.node)].tensor for t in instruction.steps]
        return f"{len(tensors)} tensors: {', '.join(tensors[:3])}{', …' if len(tensors) > 3 else ''}"
    step = instruction.collective or (instruction.steps[0].step.kind if instruction.steps else "")
    return " ".join(filter(None, (step, instruction.name)))


def _result(program: Program, number: int) -> int:
    node = program.flow.nodes[number]
    assert not isinstance(node, Compute)  # bundles carry parameters
    return node.result
