"""Runs the program of a rank, section by section: every instruction is a small function of the values so far, called in the
program's order.

Nothing is decided here. A forward pass leaves the values that the backward instructions read; whatever was read for the last
time is let go of at once. Gradients of parameters go home inside of the backward pass, or, where the program reduces them in
a section of its own, passes keep them back and add them up until :meth:`Executor.reduce`. A gradient that nobody brings (the
caller goes back from some results only) is ``None``, and what only depends on such gradients is passed over, on every rank
alike. ``log`` notes what was performed, for tests and clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import profiler_runs
from shardwright.program import Instruction, Kind, Phase, Program
from shardwright.program.instructions import REDUCE, UPDATE
from shardwright.program.naming import instruction_name
from shardwright.program.passes import reduced_apart
from shardwright.program.recording import performed_between
from shardwright.runtime.actions import Action, PassState
from shardwright.runtime.buckets import FlatBucket, SideStream
from shardwright.runtime.communication import Communication, nothing
from shardwright.runtime.computation import Computation
from shardwright.runtime.computed_again import settle
from shardwright.runtime.gradient_reduction import GradientReduction, KeptBack
from shardwright.runtime.rank import Rank
from shardwright.runtime.regions import Compiled, Row, numbers_of
from shardwright.schedules import BACKWARD, FORWARD, INPUT, WEIGHT

Instead = Callable[[PassState, int], bool]
"""May take over an instruction of a pass under way, by its number: whether it has."""

Looks = tuple[Any, ...]
"""What an action wrote, slot by slot: how a tensor lies (on the device ``meta``), or whether it was anything else."""
Between = Callable[[Action, PassState, Sequence[int], Sequence[int], Looks], None]
"""Takes an action out of a recording: the action, its pass, the slots that it reads and writes, and what it wrote last."""

TRACED_AFTER = 3
"""Passes after which operators and their backward are traced into plain functions (a second or two, once)."""


class Executor:
    """A program with everything it needs to run."""

    def __init__(self, program: Program, rank: Rank) -> None:
        self.program, self.flow, self.rank = program, program.flow, rank
        self.log: list[int] | None = None
        self.before: Callable[[], None] | None = None
        """Called before every row of a pass that is recorded."""
        self.between: Between | None = None
        """While a pass is recorded, performs what the host waits for between two parts of the recording."""
        self._waits = performed_between(program)
        self._wrote: dict[int, Looks] = {}
        self.passes = 0
        lines = [rank.line(self.flow.place.line(axis)) for axis in range(len(self.flow.place.axes))]
        aside = SideStream()
        self.flats = [FlatBucket(bucket, lines, aside, rank.held) for bucket in program.buckets]
        self.reduction = GradientReduction(program, rank, self.flats)
        self._computation = Computation(program, rank)
        self._kinds = {**Communication(program, rank, self.flats).kinds, **self.reduction.kinds}
        self.apart = REDUCE in program.sections
        """Whether passes keep gradients back, which :meth:`reduce` brings home."""
        rows = [(n, self._action(i, keep=True), i.last) for n, i in enumerate(program.instructions)]
        self._rows = {kind: [rows[n] for n in numbers] for kind, numbers in _performed(program).items()}
        inputs = (self.flow.rest[entry.tensor] for entry in self.flow.graph.inputs if entry.tensor is not None)
        self._of_inputs = [(value, program.gradients[value]) for value in inputs if value in program.gradients]
        self._plain: list[Row] | None = None
        self._compiled: Compiled | None = None
        self._sources = [self.flow.rest[name] for name in self.flow.graph.sources]

    def forward(self, sources: Sequence[Tensor], keep: bool) -> PassState:
        """A forward pass from this rank's part of every source; ``keep``: a backward pass may follow."""
        self.passes += keep
        if self.passes == TRACED_AFTER + 1 or (self.rank.compiled and 0 < self.passes <= TRACED_AFTER):
            self.settle()
        run = PassState([None] * len(self.program.slots))
        for slot, source in zip(self._sources, self._cast(sources), strict=True):
            run.slots[slot] = source
        with torch.no_grad():
            table = self._fused(FORWARD, run) if keep else self._without_backward()
            self._perform(table, run)
        return run

    def settle(self) -> None:
        """From the next pass on run what is traced: at once, where it is known that many passes will follow."""
        self.passes = max(self.passes, TRACED_AFTER + 1)
        self._computation.settle()

    def backward(
        self,
        run: PassState,
        gradients: Mapping[int, Tensor | None],
        kind: str = BACKWARD,
        instead: Instead | None = None,
    ) -> dict[int, Tensor | None]:
        """A backward pass from the gradients of results, or its first half; gives those of the inputs, by their values.
        ``instead`` may take over an instruction, by its number."""
        table = _unless(instead, self._fused(kind, run))
        for value, slot in self.program.roots.items():
            run.slots[slot] = gradients.get(value)
        self.reduction.hold = self.apart or self.rank.gradients.hold
        with torch.no_grad():
            self._perform(table, run)
        if kind == INPUT:
            return {value: run.slots[slot] for value, slot in self._of_inputs}
        run.spent, run.slots = True, []
        return run.found

    def weights(self, run: PassState) -> dict[int, Tensor | None]:
        """The second half of a backward pass."""
        self.reduction.hold = True
        with torch.no_grad():
            self._perform(self._fused(WEIGHT, run), run)
        run.spent, run.slots = True, []
        return run.found

    def reduce(self, kept_back: KeptBack, instead: Instead | None = None) -> None:
        """Gradients that were kept back are summed between replicas and given to the parameters."""
        if REDUCE not in self._rows:
            way = {*reduced_apart(self.program).sections[REDUCE]}
            self._rows[REDUCE] = [row for row in self._rows[BACKWARD] if row[0] in way]
        before, self.reduction.kept_back, self.reduction.hold = self.reduction.kept_back, kept_back, False
        try:
            with torch.no_grad():
                self._perform(_unless(instead, self._rows[REDUCE]), PassState([None] * len(self.program.slots)))
        finally:  # passes that are followed by a reduction say anew where they keep gradients
            self.reduction.kept_back = {} if self.apart else before

    def _fused(self, kind: str, run: PassState) -> list[Row]:
        """The rows of a section, compiled region by region where that is wanted and every one of them need not be seen."""
        if not self.rank.compiled or self.log is not None or self.passes <= TRACED_AFTER:
            if self.rank.compiled:
                settle(run.slots, range(len(run.slots)))
            return self._rows[kind]
        if self._compiled is None:
            passes = {kind: rows for kind, rows in self._rows.items() if kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}
            self._compiled = Compiled(self.program, passes, self._waits)
        return self._compiled.tables[kind]

    def _perform(self, table: list[Row], run: PassState) -> None:
        if profiler_runs():
            table = [(number, self._named(number, act), last) for number, act, last in table]
        if self._waits:
            table = [(n, self._awaited(n, act) if n in self._waits else act, last) for n, act, last in table]
        if self.before is not None:
            table = [(number, _preceded(self.before, act), last) for number, act, last in table]
        slots, log = run.slots, self.log
        for number, act, last in table:
            act(run)
            if log is not None:
                log.append(number)
            for slot in last:
                slots[slot] = None

    def _awaited(self, number: int, act: Action) -> Action:
        """An action that the host waits for: what it writes is noted, and a recording has it performed in between."""
        reads, writes = self.program.instructions[number].reads, self.program.instructions[number].writes

        def awaited(run: PassState) -> None:
            if self.between is not None:
                self.between(act, run, reads, writes, self._wrote[number])
            else:
                act(run)
                made = (run.slots[slot] for slot in writes)
                self._wrote[number] = tuple(looks_like(x) if isinstance(x, Tensor) else x is not None for x in made)

        return awaited

    def _named(self, number: int, act: Action) -> Action:
        """The same under the name that profiles show."""
        name = instruction_name(numbers_of(number, act), self.program.instructions)

        def shown(run: PassState) -> None:
            with torch.profiler.record_function(name):
                act(run)

        return shown

    def _cast(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Parameters in the dtype that is computed with."""
        dtype = self.rank.compute_dtype
        count = len(self.flow.graph.parameters)
        if dtype is None:
            return list(sources)
        cast = [x.to(dtype) if x.is_floating_point() else x for x in sources[:count]]
        return [*cast, *sources[count:]]

    def _without_backward(self) -> list[Row]:
        """The forward pass alone: nothing is kept for longer than it is read."""
        if self._plain is None:
            program = self.program
            seen = {*self._sources, *program.handed_out}
            table = []
            for number in reversed(program.forward):
                instruction = program.instructions[number]
                last = tuple(dict.fromkeys(s for s in (*instruction.reads, *instruction.writes) if s not in seen))
                seen.update(last)
                table.append((number, self._action(instruction, keep=False), last))
            self._plain = table[::-1]
        return self._plain

    def _action(self, instruction: Instruction, keep: bool) -> Action:
        kind = instruction.kind
        if kind is Kind.OPERATOR and instruction.phase is not Phase.BACKWARD:
            return self._computation.forward(instruction, keep)
        if kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
            return self._computation.gradients(instruction)
        return nothing if kind is Kind.EXCHANGE else self._kinds[kind](instruction)


def _performed(program: Program) -> dict[str, tuple[int, ...]]:
    """The instructions of every kind of pass as they are run: after the last of a pass back the gradients of the inputs are
    handed out."""
    last = program.sections[UPDATE]
    found = {
        kind: (*numbers, *last) if kind in (BACKWARD, WEIGHT) else numbers
        for kind, numbers in program.performed.items()
    }
    return {kind: tuple(sorted(numbers)) for kind, numbers in found.items()}


def _unless(instead: Instead | None, table: list[Row]) -> list[Row]:
    def act_or_not(instead: Instead, number: int, act: Action) -> Action:
        def chosen(run: PassState) -> None:
            if not instead(run, number):
                act(run)

        return chosen

    return table if instead is None else [(n, act_or_not(instead, n, act), last) for n, act, last in table]


def looks_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _preceded(before: Callable[[], None], act: Action) -> Action:
    def both(run: PassState) -> None:
        before()
        act(run)

    return both
