"""A program recorded once and replayed: on CUDA a step is two graphs, one forward and one backward, and no host in its way.

After some eager passes both passes are captured into CUDA graphs that share one pool of memory (PyTorch's
``torch.cuda.graph``). Parameters are read and buckets summed where they lie; inputs, the gradients that arrive and those
that are found are copied into standing tensors outside of the pool; collectives are part of the graphs. What Python does
(handing gradients to parameters, calling hooks) is done after the replay, exactly as the instructions would.

A replay overwrites what the last one left, so it is only made where nobody needs that any more: not while a forward pass
waits for its backward, not while a large result of the last pass is still held. Such passes, accumulation under
``no_sync``, passes that are logged or counted, and backward passes from other results than before run eagerly, with the same
numbers. Random pieces draw from generators that the graphs advance; blocks that are computed again with random operators in
them are not captured; why a program is not is logged once.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import copy_all, local_of, storage_users
from shardwright.lowering.collectives import ledger
from shardwright.program import Kind, Program
from shardwright.program.recording import drawn_again, random_nodes
from shardwright.runtime.actions import Run
from shardwright.runtime.buckets import deposit, hooked, wrapped
from shardwright.runtime.cuda_graphs import SWITCH, CudaGraphs, Recorder, Recording
from shardwright.runtime.executor import TRACED_AFTER, Executor
from shardwright.runtime.standing import into, lying_as, updated_in_place

_WARM = TRACED_AFTER + 2
_TRIES = 4
_COPIED_BYTES = 2**20
"""Results up to this size are copied out of the graphs' memory, larger ones are handed out as they lie there."""

log = logging.getLogger("shardwright")


def recorder_for(program: Program, device: torch.device) -> Recorder | None:
    """What can record this program on this device, if anything."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0" or not program.roots:
        return None
    reason = why_not(program)
    if reason:
        log.info("The step is run without CUDA graphs: %s.", reason)
        return None
    return CudaGraphs(device, planned=True)


def why_not(program: Program) -> str:
    """Why a program cannot be captured; nothing if it can."""
    backend = dist.get_backend()
    if backend not in ("nccl", "fake"):
        return f"collectives of {backend} run on the host"
    again = drawn_again(program)
    if again is not None:
        return f"{again.op.name} draws random numbers in a block that is computed again"
    return ""


class _Home(NamedTuple):
    """A gradient that the replay leaves behind, always in the same place: of which parameter, this rank's part, and the same
    as the parameter takes it (nothing where it has another dtype)."""

    name: str
    gradient: Tensor
    given: Tensor | None


class _Captured:
    """Both passes, the tensors they read and write, and under which circumstances."""

    def __init__(self, key: Any, sources: list[Tensor], gradients: dict[int, Tensor]) -> None:
        self.key, self.sources, self.gradients = key, sources, gradients
        self.forward: Recording | None = None
        self.backward: Recording | None = None
        self.results: dict[int, Tensor] = {}
        self.homes: list[_Home] = []
        self.inputs: dict[int, Tensor | None] = {}
        self.users: dict[int, int] = {}


class Replay:
    """An executor whose training passes are replayed where that is safe. ``laid``: sources in the order in which they are
    computed with; a recording's own are, so that copying into them is all there is to do."""

    def __init__(
        self,
        executor: Executor,
        recorder: Recorder,
        laid: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda sources: sources,
    ) -> None:
        self.executor, self.recorder, self.rank, self._laid = executor, recorder, executor.rank, laid
        program, graph = executor.program, executor.flow.graph
        self._parameters = [p.tensor for p in graph.parameters]
        changing = {name for name, _ in executor.flow.mutations}
        changing |= {i.tensor for i in graph.inputs if i.tensor is not None}
        self._copied = [i for i, name in enumerate(graph.sources) if name in changing]
        self._standing = [i for i, name in enumerate(graph.sources) if name not in changing]
        handed = [*executor.flow.results, *(value for _, value in executor.flow.mutations)]
        self._updated = updated_in_place(program)
        kept = {slot for _, slot in self._updated}
        self._results = [s for s in dict.fromkeys(program.elsewhere.get(v, v) for v in handed) if s not in kept]
        self._seen: dict[int, tuple[torch.Size, torch.dtype]] | None = None
        self._captured: _Captured | None = None
        self._last: Callable[[], Run | None] = lambda: None
        self._tries = 0
        self.replays = 0

    def forward(self, sources: Sequence[Tensor]) -> Run:
        """A forward pass that a backward pass may follow, replayed if that is safe now."""
        run = self._replayed(sources)
        if run is None:
            with self._memory():
                run = self.executor.forward(self._laid(sources), True)
        return run

    def _memory(self) -> AbstractContextManager[Any]:
        """Where passes that are not replayed take their memory: once there is a recording, not where it writes."""
        return self.recorder.memory() if self._captured is None and self._tries < _TRIES else nullcontext()

    def _replayed(self, sources: Sequence[Tensor]) -> Run | None:
        executor, before = self.executor, self._last()
        if executor.log is not None or self.rank.hold or executor.home.kept_back or ledger() is not None:
            return None
        if self._seen is None or executor.passes < _WARM or (before is not None and not before.spent):
            return None
        key = self._key(sources)
        made = self._captured
        if made is None or made.key != key or self._seen != _looks(made.gradients):
            made = self._captured = self._capture(key, sources) if self._tries < _TRIES else made
            if made is None or made.key != key or self._seen != _looks(made.gradients):
                return None
        assert made.forward is not None
        if any(storage_users(made.results[slot]) > users for slot, users in made.users.items()):
            return None
        for i in self._copied:
            if made.sources[i].data_ptr() != sources[i].data_ptr():  # else it is there since the last replay
                made.sources[i].copy_(sources[i])
        made.forward.replay()
        run = Run([None] * len(executor.program.slots))
        for slot, x in made.results.items():
            run.slots[slot] = x.detach() if slot in made.users else x.clone()
        for i, slot in self._updated:
            run.slots[slot] = made.sources[i]
        self._last = weakref.ref(run)
        self.replays += 1
        return run

    def backward(self, run: Run, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        """A backward pass, replayed where its forward pass was."""
        looks = _looks(gradients)
        made = self._captured
        if self._last() is not run or made is None:
            self._seen = looks
            with self._memory():
                return self.executor.backward(run, gradients)
        plain = not self.rank.hold and not self.executor.home.kept_back
        if looks != _looks(made.gradients) or not plain or made.key[0] != self._trained():
            self._seen = looks
            run.spent = True
            again = self.executor.forward([x.clone() for x in made.sources], True)
            return self.executor.backward(again, gradients)
        run.spent, run.slots, self._seen = True, [], looks
        for value, x in made.gradients.items():
            arrived = gradients[value]
            assert arrived is not None
            x.copy_(arrived)
        held = self.rank.held
        for (
            name,
            _,
            given,
        ) in made.homes:  # gradients that nobody zeroed since the last step are about to be overwritten
            parameter = held(name)
            if given is not None and parameter.grad is given:
                parameter.grad = given.clone()
        assert made.backward is not None
        made.backward.replay()
        for name, gradient, given in made.homes:
            parameter = held(name)
            if given is not None and parameter.grad is None and not hooked(parameter):
                parameter.grad = given
            else:
                deposit(parameter, gradient.clone())
        return {value: None if x is None else x.clone() for value, x in made.inputs.items()}

    def _trained(self) -> tuple[bool, ...]:
        return tuple([self.rank.held(name).requires_grad for name in self._parameters])

    def _key(self, sources: Sequence[Tensor]) -> Any:
        """What a recording takes for granted: which parameters are trained, and where what it reads lies."""
        return self._trained(), tuple([sources[i].data_ptr() for i in self._standing])

    def _capture(self, key: Any, sources: Sequence[Tensor]) -> _Captured | None:
        self._tries, self._captured = self._tries + 1, None
        try:
            made = self._recorded_as_planned(key, sources)
        except Exception as error:  # whatever stopped the recording: the step is run as it was until now
            self._tries = _TRIES
            log.warning("The step is run without CUDA graphs: %s.", " ".join(str(error).split())[:300])
            return None
        large = (slot for slot, x in made.results.items() if x.nbytes > _COPIED_BYTES)
        made.users = {slot: storage_users(made.results[slot]) for slot in large}
        return made

    def _recorded_as_planned(self, key: Any, sources: Sequence[Tensor]) -> _Captured:
        """Recorded as often as the recorder wants."""
        standing = list(self._laid(sources))
        for i in self._copied:
            standing[i] = standing[i].clone()
        for flat in self.executor.flats:  # out of the memory of earlier passes, which is about to be given back
            flat.move()
        while True:
            made = None  # the memory of what is thrown away is given back first
            try:
                made = self._recorded(key, standing)
                if not self.recorder.again():
                    return made
            except Exception as error:
                if not self.recorder.failed(error):
                    raise

    def _recorded(self, key: Any, standing: list[Tensor]) -> _Captured:
        executor, device = self.executor, self.rank.device
        looks = (self._seen or {}).items()
        arriving = {value: torch.zeros(shape, dtype=dtype, device=device) for value, (shape, dtype) in looks}
        made = _Captured(key, standing, arriving)
        held = {name: self.rank.held(name) for name in self._parameters}
        grads = {name: parameter.grad for name, parameter in held.items()}
        standing_gradients: dict[str, Tensor] = {}
        under_way: list[Run] = []

        def forward() -> None:
            run = executor.forward(standing, True)
            for slot in self._results:
                into(made.results, slot, run.slots[slot])
            copy_all([standing[i] for i, _ in self._updated], [run.slots[slot] for _, slot in self._updated])
            under_way[:] = [run]

        def backward() -> None:
            made.homes, found = self._performed(under_way.pop(), arriving, standing_gradients)
            for value, x in found.items():
                into(made.inputs, value, x)

        for parameter in held.values():
            parameter.grad = None
        executor.before = self.recorder.window
        try:
            made.forward = self.recorder.record(forward, bool(random_nodes(executor.program)))
            made.backward = self.recorder.record(backward)
        except BaseException:
            for flat in executor.flats:
                flat.abandon()
            raise
        finally:
            executor.before = None
            for flat in executor.flats:
                flat.filled.clear()
            for name, gradient in grads.items():
                held[name].grad = gradient
        return made

    def _performed(
        self, run: Run, gradients: Mapping[int, Tensor], standing: dict[str, Tensor]
    ) -> tuple[list[_Home], dict[int, Tensor | None]]:
        """The backward pass without what only Python does: gradients stay where they are computed, or in their buckets."""
        homes: list[_Home] = []

        def keep(number: int) -> bool:
            instruction = self.executor.program.instructions[number]
            if instruction.kind is not Kind.DEPOSIT:
                return False
            name, parameter = instruction.name, self.rank.held(instruction.name)
            if instruction.bucket >= 0:
                flat = self.executor.flats[instruction.bucket]
                part = flat.filled.pop(name, None)
                if part is not None:
                    homes.append(_Home(name, part, flat.given(name) if part.dtype == parameter.dtype else None))
            elif (gradient := self.executor.home.own_gradient(run, instruction.reads[0])) is not None:
                into(standing, name, lying_as(gradient, local_of(parameter)))
                homes.append(_Home(name, standing[name], wrapped(parameter, standing[name])))
            return True

        found = self.executor.backward(run, gradients, instead=keep)
        return homes, found


def _looks(gradients: Mapping[int, Tensor | None]) -> dict[int, tuple[torch.Size, torch.dtype]]:
    return {value: (x.shape, x.dtype) for value, x in gradients.items() if x is not None}
