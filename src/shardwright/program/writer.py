"""Writes instructions down in the order in which the host issues them.

It keeps what CUDA's streams guarantee: a communication starts no earlier than the computation issued before it has ended,
and once the program waits for a communication, whatever it computes afterwards waits too. So the list alone says what may
overlap. Which instruction is the last to use a value is found at the end, for all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwright.program.dataflow import Dataflow
from shardwright.program.instructions import COMPUTE, Instruction, Kind, Phase, Slot, Traveller
from shardwright.program.steps import BoundStep, Step

UNMADE = Slot("", "value", 0)
ALL_REDUCE = "all_reduce"


class ProgramWriter:
    """The instructions and values so far."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow, self.axes = flow, flow.place.axes
        self.instructions: list[Instruction] = []
        self.slots: list[Slot] = [UNMADE] * len(flow.values)
        self._lies_in: dict[int, int] = {}  # a value → one in whose storage it lies, the nearer to the last the better
        self.maker: dict[int, int] = {}
        self._computing: tuple[int, ...] = ()
        for tensor, value in flow.rest.items():
            self.slots[value] = Slot(tensor, "resting", flow.values[value].local.bytes)

    def slot(self, tensor: str, role: str, size: int, alias: int = -1, at: int | None = None) -> int:
        """A new value (or the flow's own, ``at`` its number); ``alias`` is the value in whose storage it lies."""
        number, made = len(self.slots) if at is None else at, Slot(tensor, role, 0 if alias >= 0 else size, alias)
        if at is None:
            self.slots.append(made)
        else:
            self.slots[at] = made
        if alias >= 0:
            self._lies_in[number] = alias
        return number

    def root(self, slot: int) -> int:
        """The value in whose storage a value lies; what lies on the way is told at once the next time."""
        root = slot
        while root in self._lies_in:
            root = self._lies_in[root]
        while slot != root:
            self._lies_in[slot], slot = root, self._lies_in[slot]
        return root

    def compute(
        self,
        kind: Kind,
        phase: Phase,
        name: str,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        *,
        after: Iterable[int] = (),
        **fields: Any,
    ) -> int:
        """Write work on the compute stream; ``fields`` are further ones of the instruction."""
        line = Instruction(kind, phase, name, COMPUTE, tuple(reads), tuple(writes), **fields)
        number = self._write(line, (*self._made(line.reads), *after))
        self._computing = (number,)
        return number

    def communicate(
        self,
        kind: Kind,
        phase: Phase,
        name: str,
        collective: str,
        axis: int,
        size: int,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        *,
        after: Iterable[int] = (),
        aside: bool = False,
        **fields: Any,
    ) -> int:
        """Write a collective on the stream of its mesh axis; ``aside``: it waits for what is named and nothing else."""
        fields |= {"collective": collective, "bytes": size}
        line = Instruction(kind, phase, name, self.axes[axis][0], tuple(reads), tuple(writes), **fields)
        return self._write(line, (*after, *(() if aside else (*self._made(line.reads), *self._computing))))

    def _made(self, reads: tuple[int, ...]) -> list[int]:
        """The instructions that made these values."""
        return [self.maker[slot] for slot in reads if slot in self.maker]

    def _write(self, line: Instruction, waits: Iterable[int]) -> int:
        number = len(self.instructions)
        self.instructions.append(line._replace(after=tuple(dict.fromkeys(waits))))
        for slot in line.writes:
            self.maker[slot] = number
        return number

    def wait(
        self, started: int, phase: Phase, reads: Iterable[int] = (), writes: Sequence[int] = (), *, temporary: int = 0
    ) -> int:
        """Wait for a communication: whatever is computed from now on starts after it."""
        known = self.instructions[started]
        return self.compute(
            Kind.AWAIT,
            phase,
            known.name,
            reads,
            writes,
            after=(started,),
            module=known.module,
            node=known.node,
            steps=known.steps,
            bucket=known.bucket,
            temporary=temporary,
        )

    def step(
        self,
        step: Step,
        bound: BoundStep,
        phase: Phase,
        source: int,
        *,
        role: str = "value",
        tensor: str,
        module: str = "",
        node: int = -1,
    ) -> int:
        """Write one step of a change of layout, and wait for it. Gives the value it leads to."""
        result = self.slot(tensor, role, step.bytes_out, source if step.is_view else -1)
        travellers = (Traveller(node, step, bound),)
        if not step.communicates:
            self.compute(Kind.CHANGE, phase, tensor, (source,), (result,), module=module, node=node, steps=travellers)
            return result
        started = self.communicate(
            Kind.CHANGE,
            phase,
            tensor,
            step.kind,
            step.axis,
            step.wire_bytes,
            (source,),
            (result,),
            module=module,
            node=node,
            steps=travellers,
            temporary=step.buffer_bytes,
        )
        self.compute(Kind.AWAIT, phase, tensor, (), (), after=(started,), module=module, node=node)
        return result

    def finished(self, handed_out: Iterable[int]) -> tuple[tuple[Instruction, ...], tuple[Slot, ...]]:
        """Everything written, each value's last use marked; what rests or is handed out has none."""
        lasting = set(handed_out)
        self._sum_in_place(lasting)
        return last_uses(self.instructions, self.slots, lasting), tuple(self.slots)

    def _sum_in_place(self, lasting: set[int]) -> None:
        """A sum over ranks takes the place of what it adds up, where nothing that lies there is read again."""
        last_read: dict[int, int] = {}
        for number, instruction in enumerate(self.instructions):
            for slot in (*instruction.reads, *instruction.writes):
                last_read[self.root(slot)] = number
        kept = {self.root(slot) for slot in lasting}
        for number, instruction in enumerate(self.instructions):
            if instruction.kind is Kind.CHANGE and instruction.collective == ALL_REDUCE:
                (source,), (result,) = instruction.reads, instruction.writes
                root = self.root(source)
                own = self.slots[root].role != "resting" and self.slots[root].bytes > 0 and root not in kept
                if own and last_read[root] == number and self.slots[result].bytes == self.slots[root].bytes:
                    last_read[root] = last_read.pop(result)
                    self.slots[result] = self.slots[result]._replace(bytes=0, alias=source)
                    self._lies_in[result] = source
                    kept |= {root} if result in kept else set()


def last_uses(
    instructions: Sequence[Instruction], slots: Sequence[Slot], handed_out: Iterable[int]
) -> tuple[Instruction, ...]:
    """The same instructions, each value's last use marked; what rests or is handed out has none."""
    lasting = set(handed_out)
    seen: set[int] = set()
    done: list[Instruction] = []
    for instruction in reversed(instructions):
        last = [
            slot
            for slot in (*instruction.reads, *instruction.writes)
            if slot not in seen and slots[slot].role != "resting" and slot not in lasting
        ]
        seen.update(last)
        unique = tuple(dict.fromkeys(last))
        done.append(instruction if instruction.last == unique else instruction._replace(last=unique))
    return tuple(reversed(done))
