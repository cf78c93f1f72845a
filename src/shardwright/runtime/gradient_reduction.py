"""What instructions do that bring gradients home: added up, kept back while accumulating, summed in buckets, deposited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from shardwright._torch_compat import owns_storage
from shardwright.program import Instruction, Kind, Program
from shardwright.runtime.actions import Accumulate, Action, PassState
from shardwright.runtime.buckets import FlatBucket, deposit
from shardwright.runtime.rank import Rank

KeptBack = dict[tuple[str, int], Tensor]
"""Gradients of the passes so far that wait for the next, by parameter and the node that read it."""


class GradientReduction:
    """Makes the actions of gradients on their way home."""

    def __init__(self, program: Program, rank: Rank, flats: Sequence[FlatBucket]) -> None:
        self.program, self.flow, self.rank, self.flats = program, program.flow, rank, flats
        self.kept_back: KeptBack = {}
        self.hold = False
        """Whether gradients that arrive are kept back."""
        self._shared = _shared_storages(program)
        self._landed = {slot for i in program.instructions if i.kind is Kind.AWAIT for slot in i.writes}
        self.kinds: dict[Kind, Callable[[Instruction], Action]] = {
            Kind.ACCUMULATE: self._accumulate,
            Kind.ARRIVE: self._arrive,
            Kind.REDUCE: self._reduce,
            Kind.DEPOSIT: self._deposit,
            Kind.UPDATE: self._update,
        }

    def _accumulate(self, instruction: Instruction) -> Action:
        (one, other), (result,) = instruction.reads, instruction.writes
        return Accumulate(one, other, result, self.program.slots[result].alias >= 0)

    def _arrive(self, instruction: Instruction) -> Action:
        (source,), (result,), key = instruction.reads, instruction.writes, (instruction.name, instruction.node)
        shape = self.flow.values[self.program.read_by(instruction)].local.shape
        dtype = self.rank.reduce_dtype
        own = source not in self._shared  # nobody else's gradient lies there, so the next can be added to it in place

        def act(run: PassState) -> None:
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
            if self.hold and gradient is not None:
                self.kept_back[key], gradient = gradient, None
            run.slots[result] = gradient if dtype is None or gradient is None else gradient.to(dtype)

        return act

    def _reduce(self, instruction: Instruction) -> Action:
        flat = self.flats[instruction.bucket]
        return lambda run: flat.advance()

    def _deposit(self, instruction: Instruction) -> Action:
        name, (slot,), rank = instruction.name, instruction.reads, self.rank
        if instruction.bucket >= 0:
            flat = self.flats[instruction.bucket]
            return lambda run: flat.hand_out(name)

        def act(run: PassState) -> None:
            gradient = self.own_gradient(run, slot)
            if gradient is not None:
                deposit(rank.held(name), gradient)

        return act

    def own_gradient(self, run: PassState, slot: int) -> Tensor | None:
        """A finished gradient, which from now on belongs to its parameter alone."""
        gradient, run.slots[slot] = run.slots[slot], None
        if gradient is None or slot in self._landed:  # scattered: this rank's own, and its parts lie side by side
            return gradient
        return gradient.clone() if slot in self._shared or not owns_storage(gradient) else gradient

    def _update(self, instruction: Instruction) -> Action:
        """The optimizer is the caller's; gradients of inputs are handed back."""
        sources = {self.flow.rest[i.tensor] for i in self.flow.graph.inputs if i.tensor is not None}
        pairs = [(v, s) for v, s in self.program.gradients.items() if v in sources]

        def act(run: PassState) -> None:
            run.found = {value: run.slots[slot] for value, slot in pairs}

        return act


def _shared_storages(program: Program) -> set[int]:
    """Gradients that lie in the storage of others and must not be handed out as they are."""
    copies = {i.writes[0] for i in program.instructions if i.kind is Kind.ARRIVE}
    gradients = [slot for slot, known in enumerate(program.slots) if known.role == "gradient"]
    count = Counter(program.root(slot) for slot in gradients if slot not in copies)
    return {slot for slot in gradients if count[program.root(slot)] > 1}
