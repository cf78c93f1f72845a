"""Runs of instructions compiled into one function each: what a rank computes between two communications, block by block.

PyTorch's inductor fuses what is element by element and schedules it; where regions begin and end, what they keep for the
backward pass and when communication starts stays as the program says. A region ends where the module's repeated block ends
and where something is read that only arrives meanwhile. Instructions that do not compute (gathers, buckets) are done before
the region if they do not need it and after it otherwise, communications among them in the program's order; waiting for
parameters does not end one. Regions that do the same to other tensors share one function, so that compiling costs the same
for any depth. Of what only passes back read, a region keeps what the rest is computed from again
(:mod:`~shardwright.runtime.computed_again`). What cannot be traced, and passes that are logged, are run one by one, with the
same numbers.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright._torch_compat import compiled_function, plain_operators
from shardwright.program import Kind, Program
from shardwright.program.dataflow import Compute
from shardwright.runtime.actions import Action, Backward, Early, Forward, PassState, Plain
from shardwright.runtime.computed_again import Arrived, Crossing, Leaves, closed, settle, settled
from shardwright.schedules import FORWARD

Row = tuple[int, Action, tuple[int, ...]]
"""The number of an instruction, what it does, and the slots that nobody reads afterwards."""

log = logging.getLogger("shardwright")
_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.|$)")


class Compiled:
    """The functions that the regions of one program share, and its passes in regions, by their kinds."""

    def __init__(
        self, program: Program, rows: Mapping[str, Sequence[Row]], alone: frozenset[int] = frozenset()
    ) -> None:
        """``alone``: instructions that no region takes in, because the host waits for them."""
        self.program, self.alone = program, alone
        self.functions: dict[Hashable, _Function | None] = {}
        self.tables = {kind: self._table(each) for kind, each in rows.items()}
        self._cross(self.tables[FORWARD], [row for kind in self.tables if kind != FORWARD for row in self.tables[kind]])

    def _table(self, rows: Sequence[Row]) -> list[Row]:
        """The same work in regions."""
        found: list[Row] = []
        group = _Group(self)
        for row in self._parted(rows):
            if not group.takes(row):
                found += group.rows()
                group = _Group(self)
                group.takes(row)
        return found + group.rows()

    def _cross(self, forward: Sequence[Row], back: Sequence[Row]) -> None:
        """What becomes of the values of every forward region until passes back read them."""
        program, root = self.program, self.program.root
        freed = {slot for _, _, last in forward for slot in last}
        plain = [row for row in forward if not isinstance(row[1], _Region)]
        mended = {root(slot) for row in plain for slot in self.reads(row)}  # by communication that works in place
        elsewhere = {slot for row in (*plain, *back) if not isinstance(row[1], _Region) for slot in self.reads(row)}
        elsewhere |= {*program.handed_out, *(program.flow.rest[name] for name in program.graph.sources)}
        later = [row for _, act, _ in back if isinstance(act, _Region) for row in act.rows]
        read = {s for row in later for s in (row[1].numbers if isinstance(row[1], Backward) else self.reads(row))}
        regions = [row[1] for row in forward if isinstance(row[1], _Region)]
        readers = Counter(slot for region in regions for slot in region.reads)
        inputs = {program.flow.rest[e.tensor] for e in program.graph.inputs if e.tensor is not None}
        changed = inputs | {program.flow.rest[name] for name, _ in program.flow.mutations}

        def cost(slot: int) -> int | None:
            if root(slot) in changed:
                return None if slot in freed or root(slot) not in inputs else 0
            if slot not in freed or program.slots[root(slot)].role == "resting":
                return 0
            return None if root(slot) in mended or program.slots[root(slot)].role == "gathered" else 1

        for region in regions:
            own = Counter(region.reads)
            region.crossing = Crossing(
                tuple(slot not in elsewhere and readers[slot] == own[slot] for slot in region.writes),
                tuple(slot not in read for slot in region.writes),
                tuple(cost(slot) == 0 for slot in region.writes),
                tuple(cost(slot) for slot in region.reads),
            )

    def _parted(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Operators that draw or exchange something at their beginning in two rows."""
        for number, act, last in rows:
            parts = None if number in self.alone else Early.parted(act)
            if parts is None:
                yield number, act, last
            else:
                yield number, parts[0], ()
                yield number, parts[1], last

    def reads(self, row: Row) -> tuple[int, ...]:
        """The slots that a row reads."""
        act, reads = row[1], self.program.instructions[row[0]].reads
        if isinstance(act, Early):
            return act.given
        return (*reads, act.saved) if isinstance(act, Forward) and act.begun else reads

    def writes(self, row: Row) -> tuple[int, ...]:
        """The slots that a row writes."""
        act = row[1]
        return (act.saved,) if isinstance(act, Early) else self.program.instructions[row[0]].writes

    def block(self, number: int) -> str | None:
        """The repeated block that the operator of an instruction belongs to."""
        instruction = self.program.instructions[number]
        node = self.program.flow.nodes[instruction.node] if instruction.node >= 0 else None
        if not isinstance(node, Compute):
            return None
        match = _BLOCK.match(node.op.module)
        return match.group() if match else ""


class _Group:
    """Instructions that follow one another: those that become one function, those before it and those after it."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.before: list[Row] = []
        self.inside: list[Row] = []
        self.after: list[Row] = []
        self.block: str | None = None

    def takes(self, row: Row) -> bool:
        reads, writes = self.compiled.reads(row), self.compiled.writes(row)
        block = self.compiled.block(row[0])
        other = block is not None and self.block is not None and block != self.block
        if getattr(row[1], "alike", None) is not None and row[0] not in self.compiled.alone:
            if other or not self._written(self.after).isdisjoint(reads):
                return False
            self.block = self.block if block is None else block
            self.inside.append(row)
        elif isinstance(row[1], Early) and other:
            return False  # a block's own numbers are drawn with it
        elif isinstance(row[1], Early) and self._brought_forward(reads):
            self.before.append(row)
        elif self.after or not (writes or self._waits(row)) or self._reads_inside(reads) or self._replaces(row):
            self.after.append(row)
        else:
            self.before.append(row)
        return True

    def _reads_inside(self, reads: Sequence[int]) -> bool:
        return not self._written(self.inside).isdisjoint(reads)

    def _waits(self, row: Row) -> bool:
        """Whether it waits for parameters, which the function reads: gradients that travel have time until the end."""
        instruction = self.compiled.program.instructions[row[0]]
        return instruction.kind is Kind.AWAIT and bool(instruction.reads) and instruction.bucket < 0

    def _brought_forward(self, wanted: Iterable[int]) -> bool:
        """Do before the function what these are made of, if it goes back nowhere: labels, which are counted over ranks."""
        wanted, found = set(wanted), []
        for row in reversed(self.inside):
            if not wanted.isdisjoint(self.compiled.writes(row)):
                if not isinstance(row[1], Plain):
                    return False
                found.append(row)
                wanted.update(self.compiled.reads(row))
        if not self._written(self.after).isdisjoint(wanted):
            return False
        self.inside = [row for row in self.inside if row not in found]
        self.before += reversed(found)
        return True

    def _replaces(self, row: Row) -> bool:
        """Whether it writes where the function reads."""
        root = self.compiled.program.root
        written = {root(slot) for slot in self.compiled.writes(row)}
        return not written.isdisjoint(root(slot) for inside in self.inside for slot in self.compiled.reads(inside))

    def _written(self, rows: Sequence[Row]) -> set[int]:
        return {slot for row in rows for slot in self.compiled.writes(row)}

    def rows(self) -> list[Row]:
        """Slots are let go of by the last row, in the new order, that has to do with them."""
        if len(self.inside) < 2 and not any(getattr(act, "several", False) for _, act, _ in self.inside):
            return sorted([*self.before, *self.inside, *self.after], key=lambda row: row[0])
        freed = {slot for row in (*self.before, *self.inside, *self.after) for slot in row[2]}
        free: list[tuple[int, ...]] = []
        order = [*([row] for row in self.before), self.inside, *([row] for row in self.after)]
        elsewhere = freed - self._touched([row for rows in order for row in rows])
        for rows in reversed(order):
            free.append(tuple(sorted(self._touched(rows) & freed)))
            freed -= self._touched(rows)
        free.reverse()
        free[-1] += tuple(sorted(elsewhere))
        made: list[Row] = []
        for rows, last in zip(order, free, strict=True):
            act = _Region(self.compiled, rows, last) if rows is self.inside else rows[0][1]
            made.append((rows[0][0], act, last))
        return made

    def _touched(self, rows: Sequence[Row]) -> set[int]:
        return {s for row in rows for s in (*self.compiled.reads(row), *self.compiled.writes(row))}


class _Region:
    """An action that stands for several."""

    def __init__(self, compiled: Compiled, rows: Sequence[Row], last: Sequence[int]) -> None:
        self.compiled, self.rows, self.slots = compiled, list(rows), len(compiled.program.slots)
        names: dict[int, int] = {}
        written: set[int] = set()
        self.reads: list[int] = []
        alike = []
        for row in rows:
            reads, writes = compiled.reads(row), compiled.writes(row)
            for slot in reads:
                if slot not in written and slot not in self.reads:
                    self.reads.append(slot)
            written.update(writes)
            used = tuple(names.setdefault(s, len(names)) for s in (*reads, *writes))
            alike.append((row[1].alike, used))  # type: ignore[attr-defined]  # only such actions come here
        gone = set(last)
        self.last = tuple(last)
        self.writes = sorted((slot for slot in written if slot not in gone), key=names.__getitem__)
        self.alike = tuple(alike), tuple(names[s] for s in self.writes), tuple(names[s] for s in self.reads)
        self.idle = [act.idle for _, act, _ in rows if isinstance(act, Backward)]
        self.crossing: Crossing | None = None

    def __call__(self, run: PassState) -> None:
        given = [run.slots[slot] for slot in self.reads]
        leaves = Leaves()
        shapes = tuple([leaves.opened(value) for value in given])
        key = (self.alike, self.crossing, shapes, tuple([idle() for idle in self.idle]))
        if key not in self.compiled.functions and not _recorded(leaves.tensors):
            self.compiled.functions[key] = self._function(given)
        function = self.compiled.functions.get(key)
        if function is None:
            self._one_by_one(run)
            return
        tensors = leaves.all
        del given, leaves
        for slot in self.last:  # what nobody reads afterwards is freed inside, after its last use
            run.slots[slot] = None
        made = function.call(tensors)
        arrived, call = Arrived(made, len(made) - function.kept), object()
        for slot, template in zip(self.writes, function.results, strict=True):
            run.slots[slot] = closed(template, arrived, call)
        for (saved, place), view in function.lies:
            run.lies[self.rows[saved][1].saved, place] = view

    def _one_by_one(self, run: PassState) -> None:
        settle(run.slots, self.reads)
        for _, act, last in self.rows:
            act(run)
            for slot in last:
                if slot in self.last:
                    run.slots[slot] = None

    def _function(self, given: Sequence[Any]) -> _Function | None:
        leaves = Leaves()
        templates = [leaves.template(value) for value in given]
        results: list[Any] = []
        lies: list[Any] = []

        def work(tensors: list[Tensor]) -> list[Tensor]:
            run, arrived = PassState([None] * self.slots, tracing=True), Arrived(tensors, len(leaves.tensors))
            for slot, template in zip(self.reads, templates, strict=True):
                run.slots[slot] = settled(closed(template, arrived), arrived.known)
            for _, act, _ in self.rows:
                act(run)
            made = Leaves()
            results[:] = [made.template(run.slots[slot]) for slot in self.writes]
            places = {getattr(act, "saved", None): n for n, (_, act, _) in enumerate(self.rows)}
            lies[:] = [((places[saved], place), view) for (saved, place), view in run.lies.items()]
            return made.tensors

        try:
            traced, kept = plain_operators(work, leaves.all), 0
            if self.crossing is not None:
                sizes = [[x.untyped_storage().nbytes() for x in Leaves.of(value).tensors] for value in given]
                traced, results, kept = self.crossing.cut(traced, results, sizes)
            code = compiled_function(traced)
            code([*leaves.all])  # its kernels are loaded and tuned the first time it runs, which may fail as well
            return _Function(code, results, lies, kept)
        except Exception as error:
            names = [self.compiled.program.instructions[number].name for number in (self.rows[0][0], self.rows[-1][0])]
            reason = " ".join(str(error).split())[:300]
            log.warning("From %s to %s the program runs uncompiled: %s", *names, reason)
            return None


def _recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether what is done is being captured into a CUDA graph: nothing is compiled then, for the compiler tries kernels out
    on the device, which ends the capture."""
    return any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()


def numbers_of(number: int, act: Action) -> list[int]:
    """The instructions that an action of a table stands for: its own, or those of a region."""
    return [inside for inside, _, _ in act.rows] if isinstance(act, _Region) else [number]


class _Function(NamedTuple):
    """``kept``: how many of the last results are what others are made of."""

    call: Callable[[list[Tensor]], Sequence[Tensor]]
    results: list[Any]
    lies: list[Any]
    kept: int
