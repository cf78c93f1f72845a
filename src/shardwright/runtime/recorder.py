"""The passes of a rank's step recorded once and replayed: on CUDA a step is as many graphs, and no host in its way.

After some eager steps every pass of the rank's order is captured into a CUDA graph (PyTorch's ``torch.cuda.graph``), all in
one pool of memory, which is planned over all of them together (:mod:`~shardwright.runtime.cuda_graphs`). One mesh is one
forward pass and one backward pass with the reduction of gradients in it; where a reduction follows the passes of several
micro-batches it is a graph of its own. Graphs are replayed in the order in which they were captured: what one frees, a later
one may use. Collectives are part of the graphs; parcels between stages are sent and received between them.

Parameters are read and buckets summed where they lie; what else passes read and leave is copied
(:mod:`~shardwright.runtime.recorded_step`). What Python does (handing gradients to parameters, calling hooks) is done after
the replay, exactly as the instructions would.

A replay overwrites what the last one left, so a step is only replayed where nobody needs that any more: not while a call
waits for its backward, not while a large result of the last step is still held. Such steps, accumulation under ``no_sync``,
passes that are logged or counted, and passes back from other results than before run eagerly, with the same numbers. Random
pieces draw from generators that the graphs advance; blocks that are computed again with random operators in them are not
captured; why a step is not is logged once. What the host waits for is performed between two graphs of its pass.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import scale_all, storage_users
from shardwright.lowering.collectives import ledger
from shardwright.program.recording import why_not_recorded
from shardwright.runtime.buckets import FlatBucket
from shardwright.runtime.cuda_graphs import SWITCH, CudaGraphs, Recorder
from shardwright.runtime.executor import TRACED_AFTER, Instead
from shardwright.runtime.gradient_reduction import KeptBack
from shardwright.runtime.performer import Eager, Gradients, Performer
from shardwright.runtime.recorded_step import Arriving, Attempt, Circumstances, Given, Known, RecordedStep, TensorPool
from shardwright.runtime.stage_program import StageProgram
from shardwright.schedules import FORWARD, Action

_WARM_PASSES = TRACED_AFTER + 2
_WARM_STEPS = 3
_TRIES = 4
_MOST_PASSES = 512
"""Of longer orders nothing is recorded: a graph takes some memory of its own."""

log = logging.getLogger("shardwright")

Sources = Mapping[StageProgram, Sequence[Tensor]]
Pieces = Mapping[tuple[int, int], Sequence[Tensor]]


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


class StepRecorder:
    """Decides for every step whether its passes are replayed, and records them."""

    def __init__(
        self, order: Sequence[tuple[Action, StageProgram]], reduced: Mapping[int, StageProgram], recorder: Recorder
    ) -> None:
        self.order, self.recorder = order, recorder
        self.reduced = {stage: part for stage, part in reduced.items() if part.executor.apart}
        self.known = {part: Known(part) for _, part in order}
        self.seen: Mapping[Action, Arriving] = {}
        """Of the last eager step, what came from elsewhere: parcels, by their places among the sources, and gradients."""
        self.arrived: frozenset[int] = frozenset()
        """The outputs whose gradients the passes back of that step waited for."""
        self.steps = self.replays = self._tries = 0
        self._parameters = [place for known in self.known.values() for place in known.parameters]
        self._executors = [part.executor for part in self.known]
        self._rank = next(iter(self.known)).rank
        self._under_way: Callable[[], _Replayed | None] = lambda: None
        self._made: RecordedStep | None = None

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

    def _replayable(self, sources: Sources, pieces: Pieces) -> RecordedStep | None:
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
        now = Circumstances(self.trained(), self._rank.compiled, lies, self.arrived, self.seen)
        if (made is None or made.circumstances != now) and self._tries < _TRIES:
            made = self._made = None  # the memory of what is thrown away is given back first
            made = self._made = self._captured(now, sources, pieces)
        if made is None or made.circumstances != now:
            return None
        return None if any(storage_users(x) > users for x, users in made.large) else made

    def _warm(self) -> bool:
        return self.steps >= _WARM_STEPS and all(executor.passes >= _WARM_PASSES for executor in self._executors)

    def _captured(self, now: Circumstances, sources: Sources, pieces: Pieces) -> RecordedStep | None:
        self._tries += 1
        try:
            made = self._recorded_as_planned(now, sources, pieces)
        except Exception as error:  # whatever stopped the recording: the step is run as it was until now
            self._tries = _TRIES
            log.warning("The step is run without CUDA graphs: %s.", " ".join(str(error).split())[:300])
            return None
        made.large = [(x, storage_users(x)) for x, _ in made.large]
        return made

    def _recorded_as_planned(self, now: Circumstances, sources: Sources, pieces: Pieces) -> RecordedStep:
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

    def _given(self, sources: Sources, pieces: Pieces) -> dict[Action, Given]:
        """Standing tensors for what passes are given. Those of a micro-batch are others' after its last pass; buffers that
        are updated in place stay where they are from pass to pass."""
        places, buffers, found = TensorPool(), dict[tuple[int, int], Tensor](), dict[Action, Given]()
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
                found[action] = Given(standing, known.copied, {})
            else:
                arriving = {value: places.take(x) for value, x in arriving.items()}
                own += arriving.values()
                found[action] = Given([], (), arriving)
            if action == last[key]:
                places.give(taken.pop(key))
        return found

    def _flats(self) -> list[FlatBucket]:
        return [flat for executor in self._executors for flat in executor.flats]

    def _recorded(self, now: Circumstances, given: Mapping[Action, Given]) -> RecordedStep:
        step = RecordedStep(now)
        attempt = Attempt(step, self.known, self.reduced, self.order[-1][0], self.recorder)
        parameters = [place[key] for place, key in self._parameters]
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        for executor in self._executors:
            executor.before, executor.between = self.recorder.window, attempt.between
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
                executor.before = executor.between = None
            for flat in self._flats():
                flat.filled.clear()
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient
        made = [*step.passes.values(), *([step.reduction] if step.reduction else ())]
        step.pooled = [gradient for one in made for gradient in one.left if not gradient.flat]
        return step


class Noted(Eager):
    """Eager passes of steps that may be recorded: what they are given is noted."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.seen: dict[Action, Arriving] = {}
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

    def __init__(self, recorder: StepRecorder, step: RecordedStep) -> None:
        self._recorder, self._step = recorder, step
        self.finished = False
        for gradient in step.pooled:
            gradient.let_go()

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
