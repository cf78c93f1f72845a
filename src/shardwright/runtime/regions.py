"""Runs of instructions compiled into one function each: what a rank computes between two communications, block by block.

PyTorch's inductor fuses what is element by element and schedules it; where regions begin and end, what they keep for the
backward pass and when communication starts stays as the program says. A region ends where the module's repeated block ends
and where something is read that only arrives meanwhile. Instructions that do not compute (gathers, buckets) are done before
the region if they do not need it and after it otherwise, communications among them in the program's order. Regions that do
the same to other tensors share one function, so that compiling costs the same for any depth. What cannot be traced, passes
that are logged, and gradients that do not come as before are run one by one, with the same numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import compiled_function
from shardwright.program import Program
from shardwright.program.dataflow import Compute
from shardwright.runtime.actions import Action, Backward, Early, Forward, PassState

Row = tuple[int, Action, tuple[int, ...]]
"""The number of an instruction, what it does, and the slots that nobody reads afterwards."""

log = logging.getLogger("shardwright")
_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.|$)")


class Compiled:
    """The functions that the regions of one program share."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.functions: dict[Hashable, _Function | None] = {}

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """The same work in regions."""
        found: list[Row] = []
        group = _Group(self)
        for row in self._parted(rows):
            if not group.takes(row):
                found += group.rows()
                group = _Group(self)
                group.takes(row)
        return found + group.rows()

    def _parted(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Operators that draw or exchange something at their beginning in two rows."""
        for number, act, last in rows:
            parts = Early.parted(act)
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
        if getattr(row[1], "alike", None) is not None:
            if other or not self._written(self.after).isdisjoint(reads):
                return False
            self.block = self.block if block is None else block
            self.inside.append(row)
        elif isinstance(row[1], Early) and other:
            return False  # a block's own numbers are drawn with it
        elif isinstance(row[1], Early) and not row[1].given:
            self.before.append(row)
        elif self.after or not writes or not self._written(self.inside).isdisjoint(reads) or self._replaces(row):
            self.after.append(row)
        else:
            self.before.append(row)
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

    def __call__(self, run: PassState) -> None:
        given = [run.slots[slot] for slot in self.reads]
        leaves: list[Tensor] = []
        shapes = tuple([_opened(value, leaves) for value in given])
        key = (self.alike, shapes, tuple([idle() for idle in self.idle]))
        if key not in self.compiled.functions and not _recorded(leaves):
            self.compiled.functions[key] = self._function(given, leaves)
        function = self.compiled.functions.get(key)
        if function is None:
            self._one_by_one(run)
            return
        del given
        for slot in self.last:  # what nobody reads afterwards is freed inside, after its last use
            run.slots[slot] = None
        made = iter(function.call(leaves))
        for slot, template in zip(self.writes, function.results, strict=True):
            run.slots[slot] = _closed(template, made)
        for (saved, place), view in function.lies:
            run.lies[self.rows[saved][1].saved, place] = view

    def _one_by_one(self, run: PassState) -> None:
        for _, act, last in self.rows:
            act(run)
            for slot in last:
                if slot in self.last:
                    run.slots[slot] = None

    def _function(self, given: Sequence[Any], leaves: list[Tensor]) -> _Function | None:
        templates = [_template(value) for value in given]
        results: list[Any] = []
        lies: list[Any] = []

        def work(tensors: list[Tensor]) -> list[Tensor]:
            run, arrived = PassState([None] * self.slots, tracing=True), iter(tensors)
            for slot, template in zip(self.reads, templates, strict=True):
                run.slots[slot] = _closed(template, arrived)
            for _, act, _ in self.rows:
                act(run)
            made: list[Tensor] = []
            results[:] = [_template(run.slots[slot], made) for slot in self.writes]
            places = {getattr(act, "saved", None): n for n, (_, act, _) in enumerate(self.rows)}
            lies[:] = [((places[saved], place), view) for (saved, place), view in run.lies.items()]
            return made

        try:
            return _Function(compiled_function(work, leaves), results, lies)
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


class _Function:
    def __init__(self, call: Callable[[list[Tensor]], Sequence[Tensor]], results: list[Any], lies: list[Any]) -> None:
        self.call, self.results, self.lies = call, results, lies


class _Leaf:
    """Stands for a tensor."""


_TENSOR = _Leaf()


def _opened(value: Any, leaves: list[Tensor]) -> Hashable:
    """The tensors in a slot, and what else there is: nothing, a tensor, or a way back with what it keeps."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple([_opened(item, leaves) for item in value])
    return value


def _template(value: Any, leaves: list[Tensor] | None = None) -> Any:
    """The value with marks in place of its tensors."""
    if isinstance(value, Tensor):
        if leaves is not None:
            leaves.append(value)
        return _TENSOR
    if isinstance(value, tuple | list):
        return type(value)(_template(item, leaves) for item in value)
    return value


def _closed(template: Any, leaves: Any) -> Any:
    if template is _TENSOR:
        return next(leaves)
    if isinstance(template, tuple | list):
        return type(template)(_closed(item, leaves) for item in template)
    return template
