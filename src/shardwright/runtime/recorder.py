"""The passes of a rank's step recorded once and replayed: on CUDA a step is as many graphs, and no host in its way.

After some eager steps every pass of the rank's order is captured into a CUDA graph (PyTorch's ``torch.cuda.graph``), all in
one pool of memory, which is planned over all of them together (:mod:`~shardwright.runtime.cuda_graphs`). One mesh is one
forward pass and one backward pass with the reduction of gradients in it; where a reduction follows the passes of several
micro-batches it is a graph of its own. Graphs are replayed in the order in which they were captured: what one frees, a later
one may use. Collectives are part of the graphs; parcels between stages are sent and received between them.

Parameters are read and buckets summed where they lie. What a pass is given (inputs, parcels, the gradients that arrive) is
copied into standing tensors outside of the pool, which passes share that do not need theirs at the same time. Results up to
1 MiB are copied out, larger ones handed out in place; parcels are copied. What Python does (handing gradients to parameters,
calling hooks) is done after the replay, exactly as the instructions would.

A replay overwrites what the last one left, so a step is only replayed where nobody needs that any more: not while a call
waits for its backward, not while a large result of the last step is still held. Such steps, accumulation under ``no_sync``,
passes that are logged or counted, and passes back from other results than before run eagerly, with the same numbers. Random
pieces draw from generators that the graphs advance; blocks that are computed again with random operators in them are not
captured; why a step is not is logged once.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import copy_all, has_hooks, local_of, owns_storage, scale_all, storage_users
from shardwright.lowering.collectives import ledger
from shardwright.program import Kind
from shardwright.program.recording import random_nodes, why_not_recorded
from shardwright.runtime.actions import PassState
from shardwright.runtime.buckets import FlatBucket, deposit, wrapped
from shardwright.runtime.cuda_graphs import SWITCH, CudaGraphs, Recorder, Recording
from shardwright.runtime.executor import TRACED_AFTER, Instead
from shardwright.runtime.gradient_reduction import KeptBack
from shardwright.runtime.performer import Eager, Gradients, Performer
from shardwright.runtime.stage_program import StageProgram
from shardwright.runtime.static_tensors import TensorPool, into, laid_out_as, updated_in_place
from shardwright.schedules import FORWARD, INPUT, WEIGHT, Action

_WARM_PASSES = TRACED_AFTER + 2
_WARM_STEPS = 3
_TRIES = 4
_COPIED_BYTES = 2**20
"""Results up to this size are copied out of the graphs' memory, larger ones are handed out as they lie there."""
_MOST_PASSES = 512
"""Of longer orders nothing is recorded: a graph takes some memory of its own."""

log = logging.getLogger("shardwright")

Sources = Mapping[StageProgram, Sequence[Tensor]]
Pieces = Mapping[tuple[int, int], Sequence[Tensor]]
Looks = dict[Any, tuple[torch.Size, torch.dtype]]


def why_not(parts: Iterable[StageProgram], passes: int) -> str:
    """Why a step of so many passes cannot be recorded; nothing if it can."""
    backend = dist.get_backend()
    if backend not in ("nccl", "fake"):
        return f"collectives of {backend} run on the host"
    if passes > _MOST_PASSES:
        return f"a step has more than {_MOST_PASSES} passes"
    return next((reason for part in parts if (reason := why_not_recorded(part.executor.program))), "")


def step_recorder(
    order: Sequence[tuple[Action, StageProgram]], reduced: Mapping[int, StageProgram]
) -> StepRecorder | None:
    """What records these passes of a rank, if they can be recorded; ``reduced``: the programs that reduce the gradients of
    stages after them."""
    parts = dict.fromkeys(part for _, part in order)
    device = next((part.rank.device for part in parts), None)
    if device is None or device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return None
    reason = why_not(parts, len(order))
    if reason:
        log.info("The step is run without CUDA graphs: %s.", reason)
        return None
    return StepRecorder(order, reduced, CudaGraphs(device))


class _Home(NamedTuple):
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


class _Leaving(NamedTuple):
    """What a pass hands out, and the values that it is. ``stays``: it is not copied."""

    values: tuple[int, ...]
    x: Tensor | None
    stays: bool


class _Given(NamedTuple):
    """What a pass reads that others write: its sources in the order in which they are computed with, of which those at
    ``copied`` are copied there first, and the gradients that arrive."""

    sources: list[Tensor]
    copied: Sequence[int]
    arriving: Mapping[int, Tensor]


_NOTHING = _Given([], (), {})


class _Pass(NamedTuple):
    """A recorded pass and what it leaves."""

    given: _Given
    recording: Recording
    leaving: Sequence[_Leaving] = ()
    homes: Sequence[_Home] = ()

    def replayed(self) -> dict[int, Any]:
        for home in self.homes:
            if home.flat:
                home.let_go()
        self.recording.replay()
        for home in self.homes:
            home.hand_over()
        handed = {}
        for values, x, stays in self.leaving:
            own = x if x is None else x.detach() if stays else x.clone()
            for value in values:
                handed[value] = own
        return handed


@dataclass(eq=False)
class _Step:
    """All passes of a step, recorded under the same circumstances."""

    circumstances: _Circumstances
    passes: dict[Action, _Pass] = field(default_factory=dict)
    reduction: _Pass | None = None
    totals: dict[tuple[int, Any], Tensor] = field(default_factory=dict)
    """By stage and key, the gradients that the reduction begins with."""
    pooled: list[_Home] = field(default_factory=list)
    """Gradients that lie where any pass may write."""
    large: list[tuple[Tensor, int]] = field(default_factory=list)
    """Results that are handed out in place, and how many tensors lie there while nobody holds them."""


class _Circumstances(NamedTuple):
    """What a recording takes for granted: which parameters are trained, whether regions are compiled, where what is read
    lies, which outputs gradients come back from, and what arrives from elsewhere."""

    trained: list[bool]
    compiled: bool
    lies: list[int]
    arrived: frozenset[int]
    seen: Mapping[Action, Looks]


class _Known:
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


class StepRecorder:
    """Decides for every step whether its passes are replayed, and records them."""

    def __init__(
        self, order: Sequence[tuple[Action, StageProgram]], reduced: Mapping[int, StageProgram], recorder: Recorder
    ) -> None:
        self.order, self.recorder = order, recorder
        self.reduced = {stage: part for stage, part in reduced.items() if part.executor.apart}
        self.known = {part: _Known(part) for _, part in order}
        self.seen: Mapping[Action, Looks] = {}
        """Of the last eager step, what came from elsewhere: parcels, by their places among the sources, and gradients."""
        self.arrived: frozenset[int] = frozenset()
        """The outputs whose gradients the passes back of that step waited for."""
        self.steps = self.replays = self._tries = 0
        self._parameters = [place for known in self.known.values() for place in known.parameters]
        self._executors = [part.executor for part in self.known]
        self._rank = next(iter(self.known)).rank
        self._under_way: Callable[[], _Replayed | None] = lambda: None
        self._made: _Step | None = None

    def performer(self, sources: Sources, pieces: Pieces, plain: bool) -> Performer:
        """Who performs the next step, from these; ``plain``: no gradients are held back."""
        step = self._replayable(sources, pieces) if plain else None
        if step is None:
            return Noted(self)
        self.replays += 1
        chosen = _Replayed(self, step)
        self._under_way = weakref.ref(chosen)
        return chosen

    def memory(self) -> AbstractContextManager[Any]:
        """Where passes that are not replayed take their memory: once there is a recording, not where it writes."""
        return self.recorder.memory() if self._made is None and self._tries < _TRIES else nullcontext()

    def trained(self) -> list[bool]:
        return [place[key].requires_grad for place, key in self._parameters]

    def _replayable(self, sources: Sources, pieces: Pieces) -> _Step | None:
        """The recorded step, where everything is as it was recorded and nobody needs what the last one left."""
        before, made = self._under_way(), self._made
        if (before is not None and not before.finished) or ledger() is not None:
            return None
        if any(executor.log is not None for executor in self._executors):
            return None
        if made is not None and made.circumstances.compiled != self._rank.compiled:  # compiled in eager passes first
            made, self._made, self.steps = None, None, 0
        if made is None and (self._tries >= _TRIES or not self._warm()):
            return None
        lies = [sources[part][i].data_ptr() for part, known in self.known.items() for i in known.standing]
        now = _Circumstances(self.trained(), self._rank.compiled, lies, self.arrived, self.seen)
        if (made is None or made.circumstances != now) and self._tries < _TRIES:
            made = self._made = None  # the memory of what is thrown away is given back first
            made = self._made = self._captured(now, sources, pieces)
        if made is None or made.circumstances != now:
            return None
        return None if any(storage_users(x) > users for x, users in made.large) else made

    def _warm(self) -> bool:
        return self.steps >= _WARM_STEPS and all(executor.passes >= _WARM_PASSES for executor in self._executors)

    def _captured(self, now: _Circumstances, sources: Sources, pieces: Pieces) -> _Step | None:
        self._tries += 1
        try:
            made = self._recorded_as_planned(now, sources, pieces)
        except Exception as error:  # whatever stopped the recording: the step is run as it was until now
            self._tries = _TRIES
            log.warning("The step is run without CUDA graphs: %s.", " ".join(str(error).split())[:300])
            return None
        made.large = [(x, storage_users(x)) for x, _ in made.large]
        return made

    def _recorded_as_planned(self, now: _Circumstances, sources: Sources, pieces: Pieces) -> _Step:
        """Recorded as often as the recorder wants."""
        given = self._given(sources, pieces)
        for flat in self._flats():  # out of the memory of earlier passes, which is about to be given back
            flat.move()
        while True:
            made = None  # the memory of what is thrown away is given back first
            try:
                with self.recorder.attempt():
                    made = self._recorded(now, given)
                if not self.recorder.again():
                    return made
            except Exception as error:
                if not self.recorder.failed(error):
                    raise

    def _given(self, sources: Sources, pieces: Pieces) -> dict[Action, _Given]:
        """Standing tensors for what passes are given. Those of a micro-batch are others' after its last pass; buffers that
        are updated in place stay where they are from pass to pass."""
        places, buffers, found = TensorPool(), dict[tuple[int, int], Tensor](), dict[Action, _Given]()
        last = {(action.stage, action.microbatch): action for action, _ in self.order}
        taken: dict[tuple[int, int], list[Tensor]] = {}
        for action, part in self.order:
            key, known, device = (action.stage, action.microbatch), self.known[part], part.rank.device
            looks = self.seen[action]
            arriving = {
                value: torch.zeros(shape, dtype=dtype, device=device) for value, (shape, dtype) in looks.items()
            }
            own = taken.setdefault(key, [])
            if action.kind == FORWARD:
                standing = list(part.laid([*sources[part], *pieces[key], *(arriving[i] for i in known.received)]))
                for i in known.copied:
                    if i in known.updated:
                        standing[i] = buffers.setdefault((action.stage, i), standing[i].clone())
                    else:
                        standing[i] = places.take(standing[i])
                        own.append(standing[i])
                found[action] = _Given(standing, known.copied, {})
            else:
                arriving = {value: places.take(x) for value, x in arriving.items()}
                own += arriving.values()
                found[action] = _Given([], (), arriving)
            if action == last[key]:
                places.give(taken.pop(key))
        return found

    def _flats(self) -> list[FlatBucket]:
        return [flat for executor in self._executors for flat in executor.flats]

    def _recorded(self, now: _Circumstances, given: Mapping[Action, _Given]) -> _Step:
        step, attempt = _Step(now), _Attempt(self)
        parameters = [place[key] for place, key in self._parameters]
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        for executor in self._executors:
            executor.before = self.recorder.window
        try:
            for action, part in self.order:
                recorded = attempt.forward if action.kind == FORWARD else attempt.backward
                step.passes[action] = recorded(action, part, given[action])
            if self.reduced:
                step.reduction = attempt.reduction()
        except BaseException:
            for flat in self._flats():
                flat.abandon()
            raise
        finally:
            for executor in self._executors:
                executor.before = None
            for flat in self._flats():
                flat.filled.clear()
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient
        step.totals, step.large = attempt.totals, attempt.large
        made = [*step.passes.values(), *([step.reduction] if step.reduction else ())]
        step.pooled = [home for one in made for home in one.homes if not home.flat]
        return step


class _Attempt:
    """A recording of all passes, one after the other, and what they leave for each other."""

    def __init__(self, of: StepRecorder) -> None:
        self._of, self._eager = of, Eager()
        self.totals: dict[tuple[int, Any], Tensor] = {}
        self.large: list[tuple[Tensor, int]] = []
        self._parcels: dict[Any, Tensor] = {}
        """Where passes leave what is copied from there before the next one, by shape, dtype and a count."""
        self._gradients: dict[tuple[int, str], Tensor] = {}
        self._wrapped: dict[tuple[int, str], Tensor] = {}

    def forward(self, action: Action, part: StageProgram, given: _Given) -> _Pass:
        known, found = self._of.known[part], dict[int, Any]()

        def work() -> None:
            handed = self._eager.run(action, part, given.sources, True)
            for value, x in handed.items():
                if value not in known.updated.values():
                    self._leave(found, value, x, value in known.results or value in known.stored)
            copy_all([given.sources[i] for i in known.updated], [handed[value] for value in known.updated.values()])
            self._end(action)

        recording = self._of.recorder.record(work, known.draws)
        leaving = []
        for values, x in _together(found):
            stays = x.nbytes > _COPIED_BYTES and known.results.issuperset(values) and known.stored.isdisjoint(values)
            leaving.append(_Leaving(values, x, stays))
            self.large += [(x, 0)] if stays else []
        leaving += [_Leaving((value,), given.sources[i], True) for i, value in known.updated.items()]
        return _Pass(given, recording, leaving)

    def backward(self, action: Action, part: StageProgram, given: _Given) -> _Pass:
        known, homes, found = self._of.known[part], dict[str, _Home](), dict[int, Any]()
        wanted = {*part.wanted} if action.kind != INPUT else set[int]()
        back = known.back if action.kind != WEIGHT else set[int]()
        instead = None if part.executor.apart else self._keeping(action.stage, part, homes)

        def work() -> None:
            for value, x in self._eager.backward(action, part, given.arriving, instead).items():
                if value in wanted or value in back:
                    self._leave(found, value, x, value in wanted)
            self._end(action)

        recording = self._of.recorder.record(work)
        leaving = [_Leaving(values, x, False) for values, x in _together(found)]
        return _Pass(given, recording, leaving, [*homes.values()])

    def reduction(self) -> _Pass:
        homes: dict[int, dict[str, _Home]] = {stage: {} for stage in self._of.reduced}

        def work() -> None:
            for stage, part in self._of.reduced.items():
                kept = {key: x for (of, key), x in self.totals.items() if of == stage}
                part.executor.reduce(kept, self._keeping(stage, part, homes[stage]))

        recording = self._of.recorder.record(work)
        return _Pass(_NOTHING, recording, (), [home for own in homes.values() for home in own.values()])

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
        if action != self._of.order[-1][0]:
            return
        for stage, kept in self._eager.kept_back().items():
            for key in [*kept]:
                x = kept.pop(key)
                into(self.totals, (stage, key), x if owns_storage(x) else x.clone())

    def _keeping(self, stage: int, part: StageProgram, homes: dict[str, _Home]) -> Instead:
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
                    homes[name] = _Home(
                        *rank.home[name], x, flat.given(name) if x.dtype == parameter.dtype else None, True
                    )
            elif (gradient := executor.reduction.own_gradient(run, instruction.reads[0])) is not None:
                key = stage, name
                into(self._gradients, key, laid_out_as(gradient, local_of(parameter)))
                given = self._wrapped.setdefault(key, wrapped(parameter, self._gradients[key]))
                homes[name] = _Home(*rank.home[name], self._gradients[key], given, False)
            return True

        return keep


class Noted(Eager):
    """Eager passes of steps that may be recorded: what they are given is noted."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.seen: dict[Action, Looks] = {}
        self._arrived: frozenset[int] = frozenset()

    def run(self, action: Action, part: StageProgram, laid: Sequence[Tensor], keep: bool) -> Mapping[int, Tensor]:
        self.seen[action] = {i: (laid[i].shape, laid[i].dtype) for i in self._recorder.known[part].received}
        with self._recorder.memory():
            return super().run(action, part, laid, keep)

    def going_back(self, places: frozenset[int], plain: bool) -> Performer:
        self._arrived = places
        return self

    def backward(
        self, action: Action, part: StageProgram, gradients: Gradients, instead: Instead | None = None
    ) -> Gradients:
        self.seen[action] = {value: (x.shape, x.dtype) for value, x in gradients.items() if x is not None}
        with self._recorder.memory():
            return super().backward(action, part, gradients, instead)

    def finish(self) -> None:
        recorder = self._recorder
        recorder.seen, recorder.arrived = self.seen, self._arrived
        recorder.steps += 1


class _Replayed:
    """A step of recorded passes."""

    def __init__(self, recorder: StepRecorder, step: _Step) -> None:
        self._recorder, self._step = recorder, step
        self.finished = False
        for home in step.pooled:
            home.let_go()

    def forward(
        self, action: Action, part: StageProgram, sources: Sequence[Tensor], keep: bool
    ) -> Mapping[int, Tensor]:
        one = self._step.passes[action]
        own = one.given.sources
        for i in one.given.copied:
            if own[i].data_ptr() != sources[i].data_ptr():  # else it is there since the last replay
                own[i].copy_(sources[i])
        return one.replayed()

    def going_back(self, places: frozenset[int], plain: bool) -> Performer:
        known = self._step.circumstances
        alike = places == known.arrived and self._recorder.trained() == known.trained
        if alike and (plain or self._step.reduction is not None):
            return self
        again = Noted(self._recorder)  # the same forward passes, run one by one
        for action, part in self._recorder.order:
            if action.kind == FORWARD:
                again.run(action, part, self._step.passes[action].given.sources, True)
        again.going_back(places, plain)
        self.finish()
        return again

    def backward(self, action: Action, part: StageProgram, gradients: Gradients) -> Gradients:
        one = self._step.passes[action]
        for value, x in one.given.arriving.items():
            arrived = gradients.get(value)
            if arrived is None:
                x.zero_()
            else:
                x.copy_(arrived)
        return one.replayed()

    def kept_back(self) -> Mapping[int, KeptBack]:
        found: dict[int, KeptBack] = {}
        for (stage, key), total in self._step.totals.items():
            found.setdefault(stage, {})[key] = total.clone()
        return found

    def reduce(self, scale: Tensor | None) -> bool:
        if self._step.reduction is None:
            return False
        if scale is not None:
            scale_all([*self._step.totals.values()], scale)
        self._step.reduction.replayed()
        return True

    def finish(self) -> None:
        self.finished = True


def _together(found: Mapping[int, Any]) -> list[tuple[tuple[int, ...], Any]]:
    """What is found, each once, with all its values."""
    values: dict[int, list[int]] = {}
    for value, x in found.items():
        values.setdefault(id(x), []).append(value)
    return [(tuple(of), found[of[0]]) for of in values.values()]
