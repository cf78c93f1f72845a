"""The passes of one rank of a pipeline: run one by one, or recorded once and replayed.

On CUDA, after some eager steps, every pass of the rank's order is captured into a graph of its own, all in one pool of
memory (see :mod:`~shardwright.runtime.replay`), so that a step costs the host as many launches as it has passes. Steps
replay the graphs in the order in which they were captured: what one frees, a later one may use. Parcels are sent and
received between them as ever. What arrives is copied into standing tensors; gradients of parameters are added up in
standing tensors outside of the pool, which then are the parameters' gradients.

Steps under ``no_sync``, those that are logged or counted, passes without a backward and stages that draw random numbers run
eagerly, with the same numbers.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import local_of
from shardwright.lowering.collectives import ledger
from shardwright.program.recording import random_nodes
from shardwright.runtime.actions import Run
from shardwright.runtime.cuda_graphs import SWITCH, CudaGraphs, Recorder, Recording
from shardwright.runtime.executor import TRACED_AFTER, Executor
from shardwright.runtime.homeward import KeptBack
from shardwright.runtime.part import Part
from shardwright.runtime.replay import why_not
from shardwright.runtime.standing import into
from shardwright.schedules import FORWARD, INPUT, WEIGHT, Action

_WARM_STEPS = 3
_TRIES = 3
_MOST_PASSES = 512
"""Of longer orders nothing is recorded: a graph takes some memory of its own."""

log = logging.getLogger("shardwright")

Gradients = Mapping[int, Tensor | None]


class Passes:
    """Eager passes, and what those that are under way have left."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], Run] = {}
        self.finished = False
        self.kept_back: dict[int, KeptBack] = {}
        """By stage, the gradients of parameters so far: those of all micro-batches, when all passes are done."""

    def forward(self, action: Action, part: Part, sources: list[Tensor], keep: bool) -> Mapping[int, Tensor]:
        """A forward pass; the values that it hands out, and those that become buffers. ``keep``: others follow it."""
        run = part.forward(sources, keep)
        if keep:
            self._runs[action.stage, action.microbatch] = run
        return part.handed_out(run)

    def backward(self, action: Action, part: Part, gradients: Gradients) -> Gradients:
        """A backward pass, or its first half; the gradients of the inputs."""
        self._collect(action, part)
        return _backward(action, part, self._runs, gradients)

    def weights(self, action: Action, part: Part) -> Gradients:
        """The second half of a backward pass."""
        self._collect(action, part)
        return part.executor.weights(self._runs.pop((action.stage, action.microbatch)))

    def go_back_from(self, places: frozenset[int]) -> bool:
        """Before the passes back, where these wait for the gradients of outputs: whether they can be run from these."""
        return True

    def own(self, x: Tensor) -> Tensor:
        """What the caller may keep of what a pass hands out."""
        return x

    def finish(self) -> None:
        """All passes are done."""
        self.finished = True

    def _collect(self, action: Action, part: Part) -> None:
        """What the pass keeps back is added to what passes before it have."""
        if part.executor.apart:
            part.executor.home.kept_back = self.kept_back.setdefault(action.stage, {})


def _backward(action: Action, part: Part, runs: dict[tuple[int, int], Run], gradients: Gradients) -> Gradients:
    key = (action.stage, action.microbatch)
    return part.backward(runs[key] if action.kind == INPUT else runs.pop(key), gradients, action.kind)


@dataclass(eq=False)
class _Pass:
    """A recorded pass: what it reads from and writes to, beside what lies where it lay."""

    recording: Recording | None = None
    sources: list[Tensor] = field(default_factory=list)
    copied: Sequence[int] = ()
    arriving: dict[int, Tensor] = field(default_factory=dict)
    found: dict[Any, Any] = field(default_factory=dict)


class _Made:
    """All passes of a step, recorded under the same circumstances."""

    def __init__(self, key: Any, sums: dict[int, KeptBack], arrived: frozenset[int]) -> None:
        self.key, self.sums, self.arrived = key, sums, arrived
        self.passes: dict[Action, _Pass] = {}
        self.kept: dict[int, KeptBack] = {stage: {} for stage in sums}
        self.totals: dict[Any, Any] = {}
        """By stage and key, where the sum of a gradient lies after the last pass."""


class PassReplay:
    """Decides for every step whether its passes are replayed, and records them."""

    def __init__(self, parts: Mapping[tuple[int, int], Part], sizes: Sequence[int], recorder: Recorder) -> None:
        self._parts, self._sizes, self.recorder = parts, sizes, recorder
        self.seen: dict[Action, tuple[list[Tensor], dict[int, Tensor]]] = {}
        """Of the last eager step: sources of forward passes, gradients that arrived at others (on meta, what changes)."""
        self.sums: dict[int, KeptBack] = {}
        self.complete = False
        self.arrived: frozenset[int] = frozenset()
        """The outputs whose gradients the passes back of that step waited for."""
        self._under_way: Callable[[], Passes | None] = lambda: None
        self._made: _Made | None = None
        self._steps = self._tries = self.replays = 0

    def part(self, action: Action) -> Part:
        return self._parts[action.stage, self._sizes[action.microbatch]]

    def passes(self, order: Sequence[Action]) -> Passes:
        """How the passes of the next step are run."""
        before = self._under_way()
        if before is not None and not before.finished:  # what it has left would be overwritten
            return Passes()
        if any(part.executor.log is not None for part in self._parts.values()) or ledger() is not None:
            return Passes()
        chosen = self._chosen(order)
        self._under_way = weakref.ref(chosen)
        return chosen

    def forget(self) -> None:
        """What is recorded is not what is run any more."""
        self._made, self._steps = None, 0

    def _chosen(self, order: Sequence[Action]) -> Passes:
        key, made = self._key(), self._made
        if made is not None and made.key != key:
            made = self._made = None
            self._steps = 0
        if made is None and self._steps >= _WARM_STEPS and self.complete and self._tries < _TRIES and self._settled():
            made = self._made = self._capture(key, order)
        if made is not None:
            self.replays += 1
            return _Replayed(self._parts, made, self)
        self._steps += 1
        return _Noted(self) if self._tries < _TRIES else Passes()

    def _settled(self) -> bool:
        return all(part.executor.passes > TRACED_AFTER + 1 for part in self._parts.values())

    def _key(self) -> Any:
        """What recordings take for granted: what is trained, how it is computed, and where it lies."""
        key: list[Any] = []
        for part in self._parts.values():
            graph, rank = part.executor.flow.graph, part.rank
            key.append(rank.compiled)
            for entry in graph.parameters:
                held = rank.held(entry.tensor)
                key.append((held.requires_grad, local_of(held).data_ptr()))
            key += [x.data_ptr() for x in rank.constants]
            changing = changing_sources(part.executor)
            key += [local_of(rank.held(b.tensor)).data_ptr() for b in graph.buffers if b.tensor not in changing]
        return tuple(key)

    def _capture(self, key: Any, order: Sequence[Action]) -> _Made | None:
        self._tries += 1
        try:
            return self._recorded_step(key, order)
        except Exception as error:  # whatever stopped the recording: the passes are run as they were until now
            self._tries = _TRIES
            for part in self._parts.values():
                for flat in part.executor.flats:
                    flat.abandon()
            log.warning("The pipeline is run without CUDA graphs: %s.", " ".join(str(error).split())[:300])
            return None

    def _recorded_step(self, key: Any, order: Sequence[Action]) -> _Made:
        sums = {
            stage: {k: torch.zeros(x.shape, dtype=x.dtype, device=self._device(stage)) for k, x in found.items()}
            for stage, found in self.sums.items()
        }
        made, runs = _Made(key, sums, self.arrived), dict[tuple[int, int], Run]()
        made.kept = {stage: dict(found) for stage, found in sums.items()}
        for action in order:
            part = self.part(action)
            part.executor.home.kept_back = made.kept.setdefault(action.stage, {})
            made.passes[action] = self._recorded(made, action, runs, last=action == order[-1])
        return made

    def _device(self, stage: int) -> torch.device:
        return next(part.rank.device for (number, _), part in self._parts.items() if number == stage)

    def _recorded(self, made: _Made, action: Action, runs: dict[tuple[int, int], Run], last: bool) -> _Pass:
        part, one = self.part(action), _Pass()
        executor, device = part.executor, part.rank.device
        sources, arrived = self.seen[action]
        one.arriving = {value: torch.zeros(x.shape, dtype=x.dtype, device=device) for value, x in arrived.items()}
        changing = changing_sources(executor)
        names = executor.flow.graph.sources
        one.copied = [i for i, name in enumerate(names) if name in changing] if action.kind == FORWARD else ()
        one.sources = [
            torch.zeros(x.shape, dtype=x.dtype, device=device) if i in one.copied else x for i, x in enumerate(sources)
        ]

        def work() -> None:
            found: Mapping[int, Tensor | None] = {}
            if action.kind == FORWARD:
                run = runs[action.stage, action.microbatch] = executor.forward(one.sources, True)
                found = part.handed_out(run)
            elif action.kind == WEIGHT:
                found = executor.weights(runs.pop((action.stage, action.microbatch)))
            else:
                found = _backward(action, part, runs, one.arriving)
            for value, x in found.items():
                into(one.found, value, x)
            if last:
                for stage, kept in made.kept.items():
                    for k, total in kept.items():
                        into(made.totals, (stage, k), total)

        one.recording = self.recorder.record(work)
        return one


class _Noted(Passes):
    """Eager passes before the recording: what they are given is noted."""

    def __init__(self, replay: PassReplay) -> None:
        super().__init__()
        self._replay = replay
        replay.seen, replay.complete = {}, False

    def forward(self, action: Action, part: Part, sources: list[Tensor], keep: bool) -> Mapping[int, Tensor]:
        changing = changing_sources(part.executor)
        names = part.executor.flow.graph.sources
        noted = [_meta(x) if name in changing else x for name, x in zip(names, sources, strict=True)]
        self._replay.seen[action] = (noted, {})
        with self._replay.recorder.memory():
            return super().forward(action, part, sources, keep)

    def backward(self, action: Action, part: Part, gradients: Gradients) -> Gradients:
        self._replay.seen[action] = ([], {value: _meta(x) for value, x in gradients.items() if x is not None})
        with self._replay.recorder.memory():
            return super().backward(action, part, gradients)

    def weights(self, action: Action, part: Part) -> Gradients:
        self._replay.seen[action] = ([], {})
        with self._replay.recorder.memory():
            return super().weights(action, part)

    def go_back_from(self, places: frozenset[int]) -> bool:
        self._replay.arrived = places
        return True

    def finish(self) -> None:
        super().finish()
        self._replay.sums = {stage: {k: _meta(x) for k, x in kept.items()} for stage, kept in self.kept_back.items()}
        self._replay.complete = True


class _Replayed(Passes):
    """A step of recorded passes."""

    def __init__(self, parts: Mapping[tuple[int, int], Part], made: _Made, replay: PassReplay) -> None:
        super().__init__()
        self._made, self._replay = made, replay
        for (stage, _), part in parts.items():
            for (name, _), total in made.sums.get(stage, {}).items():
                _let_go(part.rank.held(name), total)
        for stage, sums in made.sums.items():
            for total in sums.values():
                total.zero_()
            made.kept[stage].clear()
            made.kept[stage].update(sums)
        for (stage, _), part in parts.items():
            part.executor.home.kept_back = made.kept.setdefault(stage, {})

    def forward(self, action: Action, part: Part, sources: list[Tensor], keep: bool) -> Mapping[int, Tensor]:
        one = self._made.passes[action]
        for i in one.copied:
            one.sources[i].copy_(sources[i])
        return self._done(one)

    def backward(self, action: Action, part: Part, gradients: Gradients) -> Gradients:
        one = self._made.passes[action]
        for value, x in one.arriving.items():
            arrived = gradients.get(value)
            if arrived is None:
                x.zero_()
            else:
                x.copy_(arrived)
        return self._done(one)

    def weights(self, action: Action, part: Part) -> Gradients:
        return self._done(self._made.passes[action])

    def _done(self, one: _Pass) -> Mapping[int, Any]:
        assert one.recording is not None
        one.recording.replay()
        return one.found

    def own(self, x: Tensor) -> Tensor:
        return x.clone()

    def go_back_from(self, places: frozenset[int]) -> bool:
        alike = places == self._made.arrived
        if not alike:
            self.finished = True
            self._replay.forget()
        return alike

    def finish(self) -> None:
        super().finish()
        for (stage, key), total in self._made.totals.items():
            standing = total is self._made.sums.get(stage, {}).get(key)
            self.kept_back.setdefault(stage, {})[key] = total if standing else total.clone()


def _let_go(parameter: Any, total: Tensor) -> None:
    """A gradient of the step before, if nobody zeroed it, is about to be overwritten."""
    grad = parameter.grad
    if grad is not None and local_of(grad).untyped_storage().data_ptr() == total.untyped_storage().data_ptr():
        parameter.grad = grad.clone()


def changing_sources(executor: Executor) -> set[str]:
    """Sources of a stage that lie somewhere else in every pass: its inputs, and buffers that it changes."""
    graph = executor.flow.graph
    found = {entry.tensor for entry in graph.inputs if entry.tensor is not None}
    return found | {name for name, _ in executor.flow.mutations}


def _meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def pass_replay(
    parts: Mapping[tuple[int, int], Part], sizes: Sequence[int], passes: int, device: torch.device
) -> PassReplay | None:
    """What replays the passes of this rank, if they can be recorded."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0" or not parts:
        return None
    reason = f"a step has more than {_MOST_PASSES} passes" if passes > _MOST_PASSES else _why_not(parts.values())
    if reason:
        log.info("The pipeline is run without CUDA graphs: %s.", reason)
        return None
    return PassReplay(parts, sizes, CudaGraphs(device))


def _why_not(parts: Iterable[Part]) -> str:
    for part in parts:
        program = part.executor.program
        drawn = random_nodes(program)
        if drawn:
            return f"{drawn[0][1].op.name} draws random numbers"
        if reason := why_not(program):
            return reason
    return ""
