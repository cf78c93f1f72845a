"""Runs the program of a rank: every instruction is a small function of the values so far, called in the program's order.

Nothing is decided here. A forward pass leaves the values that the backward instructions read; whatever was read for the last
time is let go of at once. The backward pass is driven by autograd from outside (``loss.backward()``) and runs our own
instructions inside. A gradient that nobody brings (the caller goes back from some results only) is ``None``, and what only
depends on such gradients is passed over, on every rank alike. ``log`` notes what was performed, for tests and clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwright._torch_compat import profiler_runs
from shardwright.program import Instruction, Kind, Phase, Program
from shardwright.program.naming import instruction_name
from shardwright.runtime.actions import Action, Run
from shardwright.runtime.buckets import Flat
from shardwright.runtime.homeward import Homeward
from shardwright.runtime.operating import Operators
from shardwright.runtime.regions import Compiled, Row, numbers_of
from shardwright.runtime.summing import Aside
from shardwright.runtime.surroundings import Surroundings
from shardwright.runtime.travelling import Travels, nothing

TRACED_AFTER = 3
"""Passes after which operators and their backward are traced into plain functions (a second or two, once)."""


class Executor:
    """A program with everything it needs to run."""

    def __init__(self, program: Program, rank: Surroundings) -> None:
        self.program, self.flow, self.rank = program, program.flow, rank
        self.log: list[int] | None = None
        self.before: Callable[[], None] | None = None
        """Called before every row of a pass that is recorded."""
        self.passes = 0
        lines = [rank.line(self.flow.place.line(axis)) for axis in range(len(self.flow.place.axes))]
        aside = Aside()
        self.flats = [Flat(bucket, lines, aside, rank.held) for bucket in program.buckets]
        self.home = Homeward(program, rank, self.flats)
        self._operators = Operators(program, rank)
        self._kinds = {**Travels(program, rank, self.flats).kinds, **self.home.kinds}
        every = list(enumerate(program.instructions))
        self._forward = [(n, self._action(i, keep=True), i.last) for n, i in every[: program.forward.stop]]
        self._backward = [(n, self._action(i, keep=True), i.last) for n, i in every[program.forward.stop :]]
        self._plain: list[Row] | None = None
        self._compiled = Compiled(program)
        self._tables: dict[str, list[Row]] = {}
        self._sources = [self.flow.rest[name] for name in self.flow.graph.sources]

    def forward(self, sources: Sequence[Tensor], keep: bool) -> Run:
        """A forward pass from this rank's part of every source; ``keep``: a backward pass may follow."""
        self.passes += keep
        if self.passes == TRACED_AFTER + 1 or (self.rank.compiled and 0 < self.passes <= TRACED_AFTER):
            self.settle()
        run = Run([None] * len(self.program.slots))
        for slot, source in zip(self._sources, self._cast(sources), strict=True):
            run.slots[slot] = source
        with torch.no_grad():
            table = self._fused("forward", self._forward) if keep else self._without_backward()
            self._perform(table, run)
        return run

    def settle(self) -> None:
        """From the next pass on run what is traced: at once, where it is known that many passes will follow."""
        self.passes = max(self.passes, TRACED_AFTER + 1)
        self._operators.settle()

    def result(self, run: Run, value: int) -> Tensor:
        """A value that is handed out."""
        return run.slots[self.program.elsewhere.get(value, value)]

    def backward(
        self, run: Run, gradients: Mapping[int, Tensor | None], instead: Callable[[int], bool] | None = None
    ) -> dict[int, Tensor | None]:
        """A backward pass from the gradients of results; gives those of the inputs, by their values. ``instead`` may take
        over an instruction, by its number."""
        table = self._fused("backward", self._backward)
        if instead is not None:
            table = [(n, _unless(instead, n, act), last) for n, act, last in table]
        for value, slot in self.program.roots.items():
            run.slots[slot] = gradients.get(value)
        with torch.no_grad():
            self._perform(table, run)
        run.spent, run.slots = True, []
        return run.found

    def send_home(self) -> None:
        """What was held back, on its way without another pass: the instructions that follow the arrival of gradients."""
        gone: set[int] = set()
        table = []
        for entry in self._backward:
            instruction = self.program.instructions[entry[0]]
            home = instruction.kind is Kind.ARRIVE or instruction.bucket >= 0 or not gone.isdisjoint(instruction.reads)
            if home and instruction.kind is not Kind.UPDATE:
                gone.update(instruction.writes)
                table.append(entry)
        with torch.no_grad():
            self._perform(table, Run([None] * len(self.program.slots)))

    def _fused(self, name: str, rows: list[Row]) -> list[Row]:
        """The rows, compiled region by region where that is wanted and every one of them need not be seen."""
        if not self.rank.compiled or self.log is not None or self.passes <= TRACED_AFTER:
            return rows
        if name not in self._tables:
            self._tables[name] = self._compiled.table(rows)
        return self._tables[name]

    def _perform(self, table: list[Row], run: Run) -> None:
        if profiler_runs():
            table = [(number, self._named(number, act), last) for number, act, last in table]
        if self.before is not None:
            table = [(number, _preceded(self.before, act), last) for number, act, last in table]
        slots, log = run.slots, self.log
        for number, act, last in table:
            act(run)
            if log is not None:
                log.append(number)
            for slot in last:
                slots[slot] = None

    def _named(self, number: int, act: Action) -> Action:
        """The same under the name that profiles show."""
        name = instruction_name(numbers_of(number, act), self.program.instructions)

        def shown(run: Run) -> None:
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
            seen = {*self._sources, *(program.elsewhere.get(v, v) for v in self.flow.results)}
            seen |= {program.elsewhere.get(v, v) for _, v in self.flow.mutations}
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
            return self._operators.forward(instruction, keep)
        if kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
            return self._operators.gradients(instruction)
        return nothing if kind is Kind.EXCHANGE else self._kinds[kind](instruction)


def _unless(instead: Callable[[int], bool], number: int, act: Action) -> Action:
    def chosen(run: Run) -> None:
        if not instead(number):
            act(run)

    return chosen


def _preceded(before: Callable[[], None], act: Action) -> Action:
    def both(run: Run) -> None:
        before()
        act(run)

    return both
