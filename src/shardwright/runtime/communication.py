"""What instructions that move values between ranks do: changes of layout, gathered parameters, scattered gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

from torch import Tensor

from shardwright.lowering.collectives import in_place, ledger, run_step
from shardwright.program import Instruction, Kind, Program
from shardwright.program.dataflow import LayoutChange
from shardwright.program.steps import BoundStep
from shardwright.runtime.actions import Action, PassState
from shardwright.runtime.buckets import FlatBucket
from shardwright.runtime.bundles import Gathering, Packed, Scattering, packed_gradients, packed_shards
from shardwright.runtime.rank import Rank


class Communication:
    """Makes the actions of what travels."""

    def __init__(self, program: Program, rank: Rank, flats: Sequence[FlatBucket]) -> None:
        self.program, self.flow, self.rank, self.flats = program, program.flow, rank, flats
        self.kinds: dict[Kind, Callable[[Instruction], Action]] = {
            Kind.CHANGE: self._change,
            Kind.PACK: self._pack,
            Kind.GATHER: self._gather,
            Kind.AWAIT: self._await,
            Kind.UNPACK: self._unpack,
            Kind.SCATTER: self._scatter,
        }

    def _bound(self, step: BoundStep) -> BoundStep:
        return step._replace(line=self.rank.line(step.line))

    def _change(self, instruction: Instruction) -> Action:
        step, (source,), (result,) = self._bound(instruction.steps[0].bound), instruction.reads, instruction.writes
        if step.kind == "all_reduce" and self.program.slots[result].alias == source:

            def summed(run: PassState) -> None:
                x, run.slots[source] = run.slots[source], None
                own = (
                    x is not None and getrefcount(x) <= 2
                )  # x itself and the question; what was kept is held elsewhere too
                run.slots[result] = None if x is None else run_step(x, step, in_place=own)

            return summed

        def act(run: PassState) -> None:
            x = run.slots[source]
            run.slots[result] = None if x is None else run_step(x, step)

        return act

    def _pack(self, instruction: Instruction) -> Action:
        if instruction.bucket >= 0:
            return self._pack_bucket(instruction)
        steps = [self._bound(traveller.bound) for traveller in instruction.steps]
        given, (result,) = instruction.reads, instruction.writes
        if instruction.steps[0].step.kind == "all_gather":

            def shards(run: PassState) -> None:
                run.slots[result] = packed_shards([run.slots[s] for s in given], steps)

            return shards
        shapes = [self._shape_of(traveller.node) for traveller in instruction.steps]

        def gradients(run: PassState) -> None:
            run.slots[result] = _packed([run.slots[s] for s in given], shapes, steps)

        return gradients

    def _pack_bucket(self, instruction: Instruction) -> Action:
        flat, tensors = self.flats[instruction.bucket], self.program.buckets[instruction.bucket].tensors
        one = len(instruction.writes) == 1
        pairs = list(zip([instruction.name] if one else tensors, instruction.reads, strict=True))

        def act(run: PassState) -> None:
            for tensor, slot in pairs:
                if run.slots[slot] is not None:
                    flat.fill(tensor, run.slots[slot])

        return act

    def _gather(self, instruction: Instruction) -> Action:
        step, alone = self._bound(instruction.steps[0].bound), len(instruction.steps) == 1
        (given,), (result,) = instruction.reads, instruction.writes

        def act(run: PassState) -> None:
            packed = packed_shards([run.slots[given]], [step]) if alone else run.slots[given]
            run.slots[result] = Gathering.start(packed, step)

        return act

    def _await(self, instruction: Instruction) -> Action:
        if instruction.bucket >= 0:
            flat = self.flats[instruction.bucket]
            return (lambda run: flat.finish()) if instruction.reads else nothing
        if not instruction.writes:
            return nothing  # what carries several is awaited where it is unpacked, what is awaited at once was
        started, writes = instruction.reads[0], instruction.writes
        steps = [self._bound(traveller.bound) for traveller in instruction.steps]
        if instruction.steps[0].step.kind == "all_gather":
            return self._landing(started, steps, writes)

        def act(run: PassState) -> None:
            scattering = run.slots[started]
            parts = [None] * len(writes) if scattering is None else scattering.wait()
            for slot, part in zip(writes, parts, strict=True):
                run.slots[slot] = part

        return act

    def _unpack(self, instruction: Instruction) -> Action:
        steps = [self._bound(traveller.bound) for traveller in instruction.steps]
        return self._landing(instruction.reads[0], steps, instruction.writes)

    def _landing(self, started: int, steps: list[BoundStep], writes: Sequence[int]) -> Action:
        def act(run: PassState) -> None:
            arrived = run.slots[started].wait()
            record = ledger()
            if record is not None:
                record.add(steps[0], sum(_gathered_bytes(x, step) for x, step in zip(arrived, steps, strict=True)))
            for slot, x, step in zip(writes, arrived, steps, strict=True):
                run.slots[slot] = in_place(x, step.dim, step.extent, step.line)

        return act

    def _scatter(self, instruction: Instruction) -> Action:
        steps, alone = [self._bound(traveller.bound) for traveller in instruction.steps], len(instruction.steps) == 1
        (given,), (result,) = instruction.reads, instruction.writes
        size = sum(traveller.step.bytes_in for traveller in instruction.steps)

        def act(run: PassState) -> None:
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
        assert isinstance(node, LayoutChange)
        return self.flow.values[node.result].local.shape


def _packed(gradients: list[Tensor | None], shapes: Sequence[tuple[int, ...]], steps: list[BoundStep]) -> Packed | None:
    """Gradients in one; zeros stand for those that nobody brought."""
    like = next((gradient for gradient in gradients if gradient is not None), None)
    if like is None:
        return None
    whole = [like.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]
    return packed_gradients(whole, steps)._replace(missing=tuple(i for i, g in enumerate(gradients) if g is None))


def nothing(run: PassState) -> None:
    """Nothing to do: what the instruction stands for happens inside another."""


def _gathered_bytes(stacked: Tensor, step: BoundStep) -> int:
    """Of the shards that arrived, without what they were padded with."""
    return stacked.nbytes // (step.line.longest(step.extent) * step.line.size) * step.extent
