"""Runs the program of a rank: every instruction is a small function of the values so far, called in the program's order.

Nothing is decided here. A forward pass leaves the values that the backward instructions read; whatever was read for the last
time is let go of at once. The backward pass is driven by autograd from outside (``loss.backward()``) and runs our own
instructions inside. A gradient that nobody brings (the caller goes back from some results only) is ``None``, and what only
depends on such gradients is passed over, on every rank alike. ``log`` notes what was performed, for tests and clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright._torch_compat import owns_storage, profiler_runs
from shardwright.lowering.calls import local_call
from shardwright.lowering.collectives import in_place, ledger, run_step
from shardwright.lowering.derivatives import Lazy, derivative
from shardwright.lowering.randomness import draws, random_state, set_random_state
from shardwright.program import Instruction, Kind, Phase, Program
from shardwright.program.build import kept_outputs, wanted
from shardwright.program.dataflow import Change, Compute
from shardwright.program.naming import instruction_name
from shardwright.program.steps import BoundStep, Line
from shardwright.runtime.actions import Accumulate, Action, Backward, Forward, Plain, Run
from shardwright.runtime.buckets import Flat, deposit
from shardwright.runtime.bundles import Gathering, Packed, Scattering, packed_gradients, packed_shards
from shardwright.runtime.regions import Compiled, Row, numbers_of
from shardwright.runtime.summing import Aside

TRACED_AFTER = 3
"""Passes after which operators and their backward are traced into plain functions (a second or two, once)."""


class Surroundings(Protocol):
    """What a program runs among: this rank's device, its process groups, its parameters."""

    @property
    def device(self) -> torch.device: ...
    @property
    def compute_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def compiled(self) -> bool:
        """Whether runs of instructions are compiled into one function each."""

    @property
    def hold(self) -> bool:
        """Whether gradients are kept back, as the first passes of an accumulation want it."""

    def line(self, line: Line) -> Line: ...
    def held(self, tensor: str) -> Any: ...
    def complete(self, tensor: str) -> None:
        """The gradient of a parameter is complete."""


class Executor:
    """A program with everything it needs to run."""

    def __init__(self, program: Program, rank: Surroundings) -> None:
        self.program, self.flow, self.rank = program, program.flow, rank
        self.kept_back: dict[tuple[str, int], Tensor] = {}
        self.log: list[int] | None = None
        self.passes = 0
        lines = [rank.line(self.flow.place.line(axis)) for axis in range(len(self.flow.place.axes))]
        aside = Aside()
        self.flats = [Flat(bucket, lines, aside, rank.held) for bucket in program.buckets]
        self._derivatives: dict[Any, Lazy] = {}
        self._calls: dict[int, Callable[..., tuple[Any, ...]]] = {}
        self._shared = self._shared_storages()
        self._landed = {slot for i in program.instructions if i.kind is Kind.AWAIT for slot in i.writes}
        self._again = {n.result for n in self.flow.nodes if isinstance(n, Change) and n.again}
        """Gathered parameters that are freed after their forward use and gathered again."""
        every = list(enumerate(program.instructions))
        self._forward = [(n, self._action(n, i, keep=True), i.last) for n, i in every[: program.forward.stop]]
        self._backward = [(n, self._action(n, i, keep=True), i.last) for n, i in every[program.forward.stop :]]
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
        for found in self._derivatives.values():
            found.settle()

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
        self._found: dict[int, Tensor | None] = {}
        with torch.no_grad():
            self._perform(table, run)
        run.spent, run.slots = True, []
        return self._found

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
                table.append((number, self._action(number, instruction, keep=False), last))
            self._plain = table[::-1]
        return self._plain

    def _shared_storages(self) -> set[int]:
        """Gradients that lie in the storage of others and must not be handed out as they are."""
        owner: dict[int, int] = {}
        slots = self.program.slots
        copies = {i.writes[0] for i in self.program.instructions if i.kind is Kind.ARRIVE}

        def root(slot: int) -> int:
            while slots[slot].alias >= 0:
                slot = slots[slot].alias
            return slot

        count: dict[int, int] = {}
        for slot, known in enumerate(slots):
            if known.role == "gradient" and slot not in copies:
                owner[slot] = root(slot)
                count[owner[slot]] = count.get(owner[slot], 0) + 1
        return {slot for slot, known in enumerate(slots) if known.role == "gradient" and count.get(root(slot), 0) > 1}

    def _action(self, number: int, instruction: Instruction, keep: bool) -> Action:
        kind = instruction.kind
        if kind is Kind.OPERATOR and instruction.phase is not Phase.BACKWARD:
            return self._operator(instruction, keep)
        if kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
            return self._gradients(number, instruction)
        return getattr(self, f"_{kind.value}")(instruction)

    # -- operators --------------------------------------------------------------------------------------------------

    def _node(self, instruction: Instruction) -> Compute:
        node = self.flow.nodes[instruction.node]
        assert isinstance(node, Compute)
        return node

    def _derivative(self, number: int, node: Compute) -> Lazy:
        """How a node is run forward and backward; nodes that call alike share it."""
        like = tuple(self.flow.values[v].local for v in node.inputs)
        returning = tuple(i for i, v in enumerate(node.inputs) if self.flow.roots_of[v] in self._again)
        arriving = tuple(i for i, o in enumerate(node.outputs) if o is not None and o in self.program.gradients)
        place = node.split if draws(node.local, node.rules.kind) else None  # equal pieces elsewhere draw other numbers
        key = (node.call, like, returning, arriving, tuple(sorted(node.lines.items())), place)
        if key not in self._derivatives:
            call = local_call(node, self.flow, self.rank.line, self.rank.device)
            self._derivatives[key] = derivative(node, call, like, arriving, returning, self.rank.device)
        return self._derivatives[key]

    def _operator(self, instruction: Instruction, keep: bool) -> Action:
        node, reads = self._node(instruction), instruction.reads
        saved = self.program.saved.get(instruction.node)
        writes_saved = saved is not None and saved in instruction.writes
        outputs = instruction.writes[:-1] if writes_saved else instruction.writes
        places = tuple(i for i, o in enumerate(node.outputs) if o is not None)
        pairs = tuple(zip(outputs, places, strict=True))
        act: Action
        if keep and saved is not None and writes_saved:
            found = self._derivative(instruction.node, node)
            act = Forward(found, reads, pairs, saved, self._views_to_return(node))
        else:
            if instruction.node not in self._calls:
                self._calls[instruction.node] = local_call(node, self.flow, self.rank.line, self.rank.device)
            same = node.kernel is None and not draws(node.local, node.rules.kind) and not self._exchanges(node)
            like = (node.call, tuple(self.flow.values[v].local for v in node.inputs)) if same else None
            act = Plain(self._calls[instruction.node], like, reads, pairs)
        block = self.program.blocks.get(instruction.node)
        if block is None or not draws(node.local, node.rules.kind):
            return act
        return self._drawing(instruction, act)

    def _drawing(self, instruction: Instruction, act: Action) -> Action:
        """A random operator of a block that is computed again draws the same numbers there."""
        number, device = instruction.node, self.rank.device

        def first(run: Run) -> None:
            run.random[number] = random_state(device)
            act(run)

        def again(run: Run) -> None:
            now = random_state(device)
            set_random_state(run.random.pop(number), device)
            try:
                act(run)
            finally:
                set_random_state(now, device)

        return again if instruction.phase is Phase.RECOMPUTE else first

    def _gradients(self, number: int, instruction: Instruction) -> Action:
        node, program = self._node(instruction), self.program
        given = [program.gradients.get(o) if o is not None else None for o in node.outputs]
        there = set(instruction.reads)
        arrived = tuple(g if g in there else None for g in given)
        count = sum(g is not None for g in arrived)
        saved = program.saved.get(instruction.node)
        kept = instruction.reads[count : len(instruction.reads) - (saved is not None)]
        known = tuple(dict.fromkeys((*(node.inputs[i] for i in node.footprint.saved_inputs), *kept_outputs(node))))
        where = dict(zip(known, kept, strict=True))
        inputs = tuple(where.get(v) for v in node.inputs)
        results = tuple(None if o is None else where.get(o) for o in node.outputs)
        values, weights = wanted(self.flow, node)
        chosen = weights if instruction.kind is Kind.WEIGHT else values
        last = instruction.kind is not Kind.INPUT
        pairs = self._written(instruction, chosen)
        places = tuple(node.inputs.index(v) for v, _ in pairs)
        writes = tuple(slot for _, slot in pairs)
        found = self._derivative(instruction.node, node)
        views = tuple(p for p in self._views_to_return(node) if inputs[p] is not None and saved is not None)
        trained, held = self._trained(chosen), self.rank.held

        def idle() -> bool:
            return bool(trained) and not any(held(t).requires_grad for t in trained)

        return Backward(found, arrived, (*inputs, *results), saved, places, writes, views, last, idle)

    def _exchanges(self, node: Compute) -> bool:
        return any(node.rules.by_name[loop].exchanges for loop in node.lines)

    def _views_to_return(self, node: Compute) -> tuple[int, ...]:
        """The inputs that are views of parameters which are freed after their use and gathered again."""
        roots = self.flow.roots_of
        return tuple(i for i, v in enumerate(node.inputs) if roots[v] in self._again and roots[v] != v)

    def _trained(self, chosen: Sequence[int]) -> tuple[str, ...]:
        """The parameters whose gradients an instruction computes, if it computes nothing else."""
        tensors = tuple(self.flow.values[v].tensor for v in chosen)
        return tensors if all(t in self.flow.graph.parameter_of for t in tensors) else ()

    def _written(self, instruction: Instruction, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Values and the slots that their gradients are written to; some have no gradient."""
        slots = iter(instruction.writes)
        found, slot = [], next(slots, None)
        for value in chosen:
            if slot is not None and self.program.slots[slot].tensor == self.flow.values[value].tensor:
                found.append((value, slot))
                slot = next(slots, None)
        assert slot is None, "a gradient without a value"
        return found

    def _exchange(self, instruction: Instruction) -> Action:
        return _nothing  # performed inside the operator's call

    # -- layouts and parameters ---------------------------------------------------------------------------------------

    def _bound(self, step: BoundStep) -> BoundStep:
        return step._replace(line=self.rank.line(step.line))

    def _change(self, instruction: Instruction) -> Action:
        step, (source,), (result,) = self._bound(instruction.steps[0].bound), instruction.reads, instruction.writes

        def act(run: Run) -> None:
            x = run.slots[source]
            run.slots[result] = None if x is None else run_step(x, step)

        return act

    def _pack(self, instruction: Instruction) -> Action:
        if instruction.bucket >= 0:
            return self._pack_bucket(instruction)
        steps = [self._bound(traveller.bound) for traveller in instruction.steps]
        given, (result,) = instruction.reads, instruction.writes
        if instruction.steps[0].step.kind == "all_gather":

            def shards(run: Run) -> None:
                run.slots[result] = packed_shards([run.slots[s] for s in given], steps)

            return shards
        shapes = [self._shape_of(traveller.node) for traveller in instruction.steps]

        def gradients(run: Run) -> None:
            run.slots[result] = _packed([run.slots[s] for s in given], shapes, steps)

        return gradients

    def _pack_bucket(self, instruction: Instruction) -> Action:
        flat, tensors = self.flats[instruction.bucket], self.program.buckets[instruction.bucket].tensors
        one = len(instruction.writes) == 1
        pairs = list(zip([instruction.name] if one else tensors, instruction.reads, strict=True))

        def act(run: Run) -> None:
            for tensor, slot in pairs:
                if run.slots[slot] is not None:
                    flat.fill(tensor, run.slots[slot])

        return act

    def _gather(self, instruction: Instruction) -> Action:
        step, alone = self._bound(instruction.steps[0].bound), len(instruction.steps) == 1
        (given,), (result,) = instruction.reads, instruction.writes

        def act(run: Run) -> None:
            packed = packed_shards([run.slots[given]], [step]) if alone else run.slots[given]
            run.slots[result] = Gathering.start(packed, step)

        return act

    def _await(self, instruction: Instruction) -> Action:
        if instruction.bucket >= 0:
            flat = self.flats[instruction.bucket]
            return (lambda run: flat.finish()) if instruction.reads else _nothing
        if not instruction.writes:
            return _nothing  # what carries several is awaited where it is unpacked, what is awaited at once was
        started, writes = instruction.reads[0], instruction.writes
        steps = [self._bound(traveller.bound) for traveller in instruction.steps]
        if instruction.steps[0].step.kind == "all_gather":
            return self._landing(instruction.steps[0].step.kind, started, steps, writes)

        def act(run: Run) -> None:
            scattering = run.slots[started]
            parts = [None] * len(writes) if scattering is None else scattering.wait()
            for slot, part in zip(writes, parts, strict=True):
                run.slots[slot] = part

        return act

    def _unpack(self, instruction: Instruction) -> Action:
        steps = [self._bound(traveller.bound) for traveller in instruction.steps]
        return self._landing("all_gather", instruction.reads[0], steps, instruction.writes)

    def _landing(self, kind: str, started: int, steps: list[BoundStep], writes: Sequence[int]) -> Action:
        def act(run: Run) -> None:
            arrived = run.slots[started].wait()
            record = ledger()
            if record is not None:
                record.add(steps[0], sum(_gathered_bytes(x, step) for x, step in zip(arrived, steps, strict=True)))
            for slot, x, step in zip(writes, arrived, steps, strict=True):
                run.slots[slot] = in_place(x, step.dim, step.extent, step.line)

        return act

    # -- gradients on their way home ------------------------------------------------------------------------------------

    def _accumulate(self, instruction: Instruction) -> Action:
        (one, other), (result,) = instruction.reads, instruction.writes
        return Accumulate(one, other, result, self.program.slots[result].alias >= 0)

    def _arrive(self, instruction: Instruction) -> Action:
        (source,), (result,), key = instruction.reads, instruction.writes, (instruction.name, instruction.node)
        shape = self._read_shape(instruction)
        dtype = self.rank.reduce_dtype
        own = source not in self._shared  # nobody else's gradient lies there, so the next can be added to it in place

        def act(run: Run) -> None:
            gradient = run.slots[source]
            if gradient is not None and not self.rank.held(key[0]).requires_grad:
                gradient = None
            before = self.kept_back.pop(key, None)
            if before is not None and gradient is not None:
                alike = own and before.dtype == gradient.dtype and before.shape == gradient.shape
                gradient = before.add_(gradient) if alike and owns_storage(before) else gradient + before
            elif before is not None:
                gradient = before
            if gradient is not None and tuple(gradient.shape) != shape:
                gradient = gradient.expand(shape)
            if self.rank.hold and gradient is not None:
                self.kept_back[key], gradient = gradient, None
            run.slots[result] = gradient if dtype is None or gradient is None else gradient.to(dtype)

        return act

    def _read_shape(self, instruction: Instruction) -> tuple[int, ...]:
        node = self.flow.nodes[instruction.node] if instruction.node >= 0 else None
        value = node.result if isinstance(node, Change) else self.flow.rest[instruction.name]
        return self.flow.values[value].local.shape

    def _scatter(self, instruction: Instruction) -> Action:
        steps, alone = [self._bound(traveller.bound) for traveller in instruction.steps], len(instruction.steps) == 1
        (given,), (result,) = instruction.reads, instruction.writes
        size = sum(traveller.step.bytes_in for traveller in instruction.steps)

        def act(run: Run) -> None:
            packed, run.slots[given] = run.slots[given], None  # the work keeps what it needs of it
            if packed is None:
                run.slots[result] = None
                return
            run.slots[result] = Scattering.start(packed_gradients([packed], steps) if alone else packed, steps)
            record = ledger()
            if record is not None:
                record.add(steps[0], size)

        return act

    def _shape_of(self, number: int) -> tuple[int, ...]:
        node = self.flow.nodes[number]
        assert isinstance(node, Change)
        return self.flow.values[node.result].local.shape

    def _reduce(self, instruction: Instruction) -> Action:
        flat = self.flats[instruction.bucket]
        return lambda run: flat.advance()

    def _deposit(self, instruction: Instruction) -> Action:
        name, (slot,), rank = instruction.name, instruction.reads, self.rank
        if instruction.bucket >= 0:
            flat = self.flats[instruction.bucket]

            def hand_out(run: Run) -> None:
                if flat.hand_out(name):
                    rank.complete(name)

            return hand_out

        def act(run: Run) -> None:
            gradient = self.own_gradient(run, slot)
            if gradient is not None:
                deposit(rank.held(name), gradient)
                rank.complete(name)

        return act

    def own_gradient(self, run: Run, slot: int) -> Tensor | None:
        """A finished gradient, which from now on belongs to its parameter alone."""
        gradient, run.slots[slot] = run.slots[slot], None
        if (
            gradient is None or slot in self._landed
        ):  # what was scattered is this rank's own; its parts lie side by side
            return gradient
        return gradient.clone() if slot in self._shared or not owns_storage(gradient) else gradient

    def _update(self, instruction: Instruction) -> Action:
        """The optimizer is the caller's; gradients of inputs are handed back."""
        sources = {self.flow.rest[i.tensor] for i in self.flow.graph.inputs if i.tensor is not None}
        pairs = [(v, s) for v, s in self.program.gradients.items() if v in sources]

        def act(run: Run) -> None:
            self._found = {value: run.slots[slot] for value, slot in pairs}

        return act


def _packed(gradients: list[Tensor | None], shapes: Sequence[tuple[int, ...]], steps: list[BoundStep]) -> Packed | None:
    """Gradients in one; zeros stand for those that nobody brought."""
    like = next((gradient for gradient in gradients if gradient is not None), None)
    if like is None:
        return None
    whole = [like.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]
    return packed_gradients(whole, steps)._replace(missing=tuple(i for i, g in enumerate(gradients) if g is None))


def _unless(instead: Callable[[int], bool], number: int, act: Action) -> Action:
    def chosen(run: Run) -> None:
        if not instead(number):
            act(run)

    return chosen


def _nothing(run: Run) -> None:
    """Nothing to do: what the instruction stands for happens inside another."""


def _gathered_bytes(stacked: Tensor, step: BoundStep) -> int:
    """Of the shards that arrived, without what they were padded with."""
    return stacked.nbytes // (step.line.longest(step.extent) * step.line.size) * step.extent
