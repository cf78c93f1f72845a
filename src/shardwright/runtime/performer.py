"""How the passes of a call are performed: one by one, as the program says, or as they were recorded
(:mod:`~shardwright.runtime.recorder`). Which pass comes when, :class:`~shardwright.runtime.in_flight.CallInFlight` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from shardwright.runtime.actions import PassState
from shardwright.runtime.executor import Instead
from shardwright.runtime.gradient_reduction import KeptBack
from shardwright.runtime.stage_program import StageProgram
from shardwright.schedules import INPUT, WEIGHT, Action

Gradients = Mapping[int, Tensor | None]
"""By the values that they are gradients of."""


class Performer(Protocol):
    """Performs the passes of one call. What it hands out belongs to whoever asked."""

    def forward(
        self, action: Action, part: StageProgram, sources: Sequence[Tensor], keep: bool
    ) -> Mapping[int, Tensor]:
        """A forward pass; the values that others read, and those that become buffers. ``keep``: passes back follow it."""

    def going_back(self, places: frozenset[int], plain: bool) -> Performer:
        """Before the passes back, where these wait for the gradients of outputs, those at ``places``: who performs them.
        ``plain``: no gradients are held back, these or earlier ones."""

    def backward(self, action: Action, part: StageProgram, gradients: Gradients) -> Gradients:
        """A backward pass, or a half of it; the gradients of the inputs."""

    def kept_back(self) -> Mapping[int, KeptBack]:
        """By stage, the gradients of parameters of all micro-batches, where a reduction follows the passes: from now on the
        caller's."""

    def reduce(self, scale: Tensor | None) -> bool:
        """Bring these home, times ``scale``, unless that is the caller's business."""

    def finish(self) -> None:
        """Everything is done: nobody needs any more what the passes have left."""


class Eager:
    """Passes one by one, and what those that are under way have left."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], PassState] = {}
        self._kept_back: dict[int, KeptBack] = {}

    def forward(
        self, action: Action, part: StageProgram, sources: Sequence[Tensor], keep: bool
    ) -> Mapping[int, Tensor]:
        return self.run(action, part, part.laid(sources), keep)

    def run(self, action: Action, part: StageProgram, laid: Sequence[Tensor], keep: bool) -> Mapping[int, Tensor]:
        """A forward pass from sources that lie as they are computed with."""
        run = part.executor.forward(laid, keep)
        if keep:
            self._runs[action.stage, action.microbatch] = run
        return part.handed_out(run)

    def going_back(self, places: frozenset[int], plain: bool) -> Performer:
        return self

    def backward(
        self, action: Action, part: StageProgram, gradients: Gradients, instead: Instead | None = None
    ) -> Gradients:
        executor, key = part.executor, (action.stage, action.microbatch)
        if executor.apart:  # what the pass keeps back is added to what passes before it have
            executor.reduction.kept_back = self._kept_back.setdefault(action.stage, {})
        run = self._runs[key] if action.kind == INPUT else self._runs.pop(key)
        if action.kind == WEIGHT:
            return executor.weights(run)
        return executor.backward(run, gradients, action.kind, instead)

    def kept_back(self) -> Mapping[int, KeptBack]:
        kept_back, self._kept_back = self._kept_back, {}
        return kept_back

    def reduce(self, scale: Tensor | None) -> bool:
        return False

    def finish(self) -> None:
        """Runs are let go of by their last passes."""
