"""A step of recorded passes: what each reads and leaves, and how all of them are recorded one after the other.

What a pass is given (inputs, parcels, the gradients that arrive) is copied into standing tensors outside of the graphs'
memory, which passes share that do not need theirs at the same time. Results up to 1 MiB are copied out, larger ones handed
out in place; parcels are copied. Which steps are replayed, :mod:`~shardwright.runtime.recorder` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright._torch_compat import copy_all, has_hooks, local_of, owns_storage
from shardwright.graph import refs
from shardwright.operators import record
from shardwright.program import Kind, Program
from shardwright.program.recording import random_nodes
from shardwright.runtime.actions import Action as Performed
from shardwright.runtime.actions import PassState
from shardwright.runtime.buckets import deposit, wrapped
from shardwright.runtime.cuda_graphs import Recorder, Recording
from shardwright.runtime.executor import Instead, Looks
from shardwright.runtime.performer import Eager
from shardwright.runtime.stage_program import StageProgram
from shardwright.schedules import INPUT, WEIGHT, Action

_COPIED_BYTES = 2**20
"""Results up to this size are copied out of the graphs' memory, larger ones are handed out as they lie there."""

Arriving = dict[Any, tuple[torch.Size, torch.dtype]]

_LEFT = object()
"""Stands for what is no tensor and is left for a later pass, beside the recording."""


class LeftGradient(NamedTuple):
    """A gradient that a replay leaves behind, always in the same place: where its parameter is looked up, this rank's part,
    and the same as the parameter takes it (nothing where it has another dtype). ``flat``: it lies in a bucket, into which
    only the pass that brings it home writes; otherwise in the pool, where any pass may write."""

    place: dict[str, Any]
    key: str
    gradient: Tensor
    given: Tensor | None
    flat: bool

    def let_go(self) -> None:
        """A gradient that nobody zeroed since the last step is about to be overwritten."""
        parameter = self.place[self.key]
        if self.given is not None and parameter.grad is self.given:
            parameter.grad = self.given.clone()

    def hand_over(self) -> None:
        parameter = self.place[self.key]
        if self.given is not None and parameter.grad is None and not has_hooks(parameter):
            parameter.grad = self.given
        else:
            deposit(parameter, self.gradient.clone())


class HandedOut(NamedTuple):
    """What a pass hands out, and the values that it is. ``stays``: it is not copied."""

    values: tuple[int, ...]
    x: Tensor | None
    stays: bool


class Given(NamedTuple):
    """What a pass reads that others write: its sources in the order in which they are computed with, of which those at
    ``copied`` are copied there first, and the gradients that arrive."""

    sources: list[Tensor]
    copied: Sequence[int]
    arriving: Mapping[int, Tensor]


_NOTHING = Given([], (), {})


class RecordedPass(NamedTuple):
    """A recorded pass and what it leaves."""

    given: Given
    recording: Recording
    leaving: Sequence[HandedOut] = ()
    left: Sequence[LeftGradient] = ()

    def replayed(self) -> dict[int, Any]:
        for one in self.left:
            if one.flat:
                one.let_go()
        self.recording.replay()
        for one in self.left:
            one.hand_over()
        handed = {}
        for values, x, stays in self.leaving:
            own = x if x is None else x.detach() if stays else x.clone()
            for value in values:
                handed[value] = own
        return handed


class Circumstances(NamedTuple):
    """What a recording takes for granted: which parameters are trained, whether regions are compiled, where what is read
    lies, which outputs gradients come back from, and what arrives from elsewhere."""

    trained: list[bool]
    compiled: bool
    lies: list[int]
    arrived: frozenset[int]
    seen: Mapping[Action, Arriving]


@dataclass(eq=False)
class RecordedStep:
    """All passes of a step, recorded under the same circumstances."""

    circumstances: Circumstances
    passes: dict[Action, RecordedPass] = field(default_factory=dict)
    reduction: RecordedPass | None = None
    totals: dict[tuple[int, Any], Tensor] = field(default_factory=dict)
    """By stage and key, the gradients that the reduction begins with."""
    pooled: list[LeftGradient] = field(default_factory=list)
    """Gradients that lie where any pass may write."""
    large: list[tuple[Tensor, int]] = field(default_factory=list)
    """Results that are handed out in place, and how many tensors lie there while nobody holds them."""


class Known:
    """What is to be known about the program of a part."""

    def __init__(self, part: StageProgram) -> None:
        flow, graph, program = part.flow, part.executor.flow.graph, part.executor.program
        names, received = graph.sources, part.part.received
        changing = {name for name, _ in flow.mutations} | {e.tensor for e in graph.inputs if e.tensor is not None}
        self.parameters = [part.rank.home[p.tensor] for p in graph.parameters]
        self.copied = [i for i, name in enumerate(names) if name in changing]
        self.standing = [i for i, name in enumerate(names) if name not in changing]
        self.received = [i for i, name in enumerate(names) if name in received]
        self.updated = dict(updated_in_place(program))
        """The values that are written over their sources, by the place of these."""
        self.results = {part.results[name] for _, name in part.part.results}
        self.stored = {value for _, value in flow.mutations}
        self.back = {flow.rest[name] for name in received}
        """The values whose gradients go back to other stages."""
        self.draws = bool(random_nodes(program))


class Attempt:
    """A recording of all passes, one after the other, and what they leave for each other."""

    def __init__(
        self,
        step: RecordedStep,
        known: Mapping[StageProgram, Known],
        reduced: Mapping[int, StageProgram],
        last: Action,
        recorder: Recorder,
    ) -> None:
        """``last``: the last of the passes, after which the gradients of all are there for the reduction of ``reduced``."""
        self._step, self._known, self._reduced, self._last, self._recorder = step, known, reduced, last, recorder
        self._eager = Eager()
        self._device = next(iter(known)).rank.device
        self._parcels: dict[Any, Tensor] = {}
        """Where passes leave what is copied from there before the next one, by shape, dtype and a count."""
        self._gradients: dict[tuple[int, str], Tensor] = {}
        self._wrapped: dict[tuple[int, str], Tensor] = {}
        self._beside: dict[PassState, PassState] = {}
        """What actions that are performed between the parts of a pass have left for each other."""

    def between(
        self, act: Performed, run: PassState, reads: Sequence[int], writes: Sequence[int], wrote: Looks
    ) -> None:
        """Have an action performed between two parts of the recording, at every replay: from where what it reads lies, into
        tensors that stand where later parts read them."""
        own = self._beside.setdefault(run, PassState([None] * len(run.slots)))
        given = {slot: x for slot in reads if isinstance(x := run.slots[slot], Tensor) or x is None}
        standing = {
            slot: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device)
            for slot, x in zip(writes, wrote, strict=True)
            if isinstance(x, Tensor)
        }
        for slot, x in zip(writes, wrote, strict=True):
            run.slots[slot] = standing.get(slot, _LEFT if x is True else None)

        def work() -> None:
            for slot, x in given.items():
                own.slots[slot] = x
            act(own)
            for slot, x in standing.items():
                made = own.slots[slot]
                x.zero_() if made is None else x.copy_(made)
            for slot in (*given, *standing):
                own.slots[slot] = None

        self._recorder.apart(work)

    def forward(self, action: Action, part: StageProgram, given: Given) -> RecordedPass:
        known, found = self._known[part], dict[int, Any]()

        def work() -> None:
            handed = self._eager.run(action, part, given.sources, True)
            for value, x in handed.items():
                if value not in known.updated.values():
                    self._leave(found, value, x, value in known.results or value in known.stored)
            copy_all([given.sources[i] for i in known.updated], [handed[value] for value in known.updated.values()])
            self._end(action)

        recording = self._recorder.record(work, known.draws)
        leaving = []
        for values, x in _together(found):
            stays = x.nbytes > _COPIED_BYTES and known.results.issuperset(values) and known.stored.isdisjoint(values)
            leaving.append(HandedOut(values, x, stays))
            self._step.large += [(x, 0)] if stays else []
        leaving += [HandedOut((value,), given.sources[i], True) for i, value in known.updated.items()]
        return RecordedPass(given, recording, leaving)

    def backward(self, action: Action, part: StageProgram, given: Given) -> RecordedPass:
        known, left, found = self._known[part], dict[str, LeftGradient](), dict[int, Any]()
        wanted = {*part.wanted} if action.kind != INPUT else set[int]()
        back = known.back if action.kind != WEIGHT else set[int]()
        instead = None if part.executor.apart else self._keeping(action.stage, part, left)

        def work() -> None:
            for value, x in self._eager.backward(action, part, given.arriving, instead).items():
                if value in wanted or value in back:
                    self._leave(found, value, x, value in wanted)
            self._end(action)

        recording = self._recorder.record(work)
        leaving = [HandedOut(values, x, False) for values, x in _together(found)]
        return RecordedPass(given, recording, leaving, [*left.values()])

    def reduction(self) -> RecordedPass:
        left: dict[int, dict[str, LeftGradient]] = {stage: {} for stage in self._reduced}

        def work() -> None:
            for stage, part in self._reduced.items():
                kept = {key: x for (of, key), x in self._step.totals.items() if of == stage}
                part.executor.reduce(kept, self._keeping(stage, part, left[stage]))

        recording = self._recorder.record(work)
        return RecordedPass(_NOTHING, recording, (), [one for own in left.values() for one in own.values()])

    def _leave(self, found: dict[int, Any], value: int, x: Tensor | None, stays: bool) -> None:
        """Keep what a pass hands out until it is copied: results until the end of the step, parcels until the next pass."""
        if x is not None and not stays and value not in found:
            key = x.shape, x.dtype, len(found)
            into(self._parcels, key, x.clone() if key not in self._parcels else x)
            found[value] = self._parcels[key]
        else:
            into(found, value, x)

    def _end(self, action: Action) -> None:
        """After the last pass, the gradients of all of them."""
        if action != self._last:
            return
        for stage, kept in self._eager.kept_back().items():
            for key in [*kept]:
                x = kept.pop(key)
                into(self._step.totals, (stage, key), x if owns_storage(x) else x.clone())

    def _keeping(self, stage: int, part: StageProgram, left: dict[str, LeftGradient]) -> Instead:
        """Bringing gradients home without what only Python does: they stay where they are computed, or in their buckets."""
        executor, rank = part.executor, part.rank

        def keep(run: PassState, number: int) -> bool:
            instruction = executor.program.instructions[number]
            if instruction.kind is not Kind.DEPOSIT:
                return False
            name, parameter = instruction.name, rank.held(instruction.name)
            if instruction.bucket >= 0:
                flat = executor.flats[instruction.bucket]
                x = flat.filled.pop(name, None)
                if x is not None:
                    left[name] = LeftGradient(
                        *rank.home[name], x, flat.given(name) if x.dtype == parameter.dtype else None, True
                    )
            elif (gradient := executor.reduction.own_gradient(run, instruction.reads[0])) is not None:
                key = stage, name
                into(self._gradients, key, laid_out_as(gradient, local_of(parameter)))
                given = self._wrapped.setdefault(key, wrapped(parameter, self._gradients[key]))
                left[name] = LeftGradient(*rank.home[name], self._gradients[key], given, False)
            return True

        return keep


def _together(found: Mapping[int, Any]) -> list[tuple[tuple[int, ...], Any]]:
    """What is found, each once, with all its values."""
    values: dict[int, list[int]] = {}
    for value, x in found.items():
        values.setdefault(id(x), []).append(value)
    return [(tuple(of), found[of[0]]) for of in values.values()]


def updated_in_place(program: Program) -> list[tuple[int, int]]:
    """The buffers that a recording may write over itself, by their place among the sources and the new value: running
    statistics and counts, whose old values nothing but the new ones depends on."""
    flow, graph = program.flow, program.graph
    made_by = {name: op for op in graph.ops for name in op.outputs}
    found = []
    for name, value in flow.mutations:
        new = flow.values[value].tensor
        readers = [op for op in graph.ops if name in op.inputs]
        alone = all(record(op.target).only_updates or op.outputs == (new,) for op in readers)
        if alone and made_by.get(new) in readers and new not in {ref.name for ref in refs(graph.outputs)}:
            found.append((graph.sources.index(name), value))
    return found


class TensorPool:
    """Tensors that several passes use in turn."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A copy of a tensor where nobody needs what is there."""
        strides = torch.empty_like(like, device="meta").stride()
        free = self._free.get((like.shape, strides, like.dtype))
        return free.pop().copy_(like) if free else like.clone()

    def give(self, taken: Iterable[Tensor]) -> None:
        for x in taken:
            self._free.setdefault((x.shape, x.stride(), x.dtype), []).append(x)


def laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the dtype and the order of its parameter, as fused optimizers want it."""
    if gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def into(known: dict[Any, Any], key: Any, x: Tensor | None) -> None:
    """What a recording wrote: where recordings are done again by Python, the new values go where the first ones lie."""
    if known.get(key) is not None and x is not None:
        known[key].copy_(x)
    else:
        known[key] = x
