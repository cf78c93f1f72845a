"""What follows the reduction of gradients within stages: parameters that several stages hold are summed between these, and
gradients come to know that there are others on other ranks. Where one mesh holds everything, nothing does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.graph import Parameter
from shardwright.program.pipeline import Pipeline
from shardwright.runtime.deferred_results import ResultBroadcast
from shardwright.runtime.handshake import Handshake
from shardwright.runtime.norms import AllStages, StageGradient, belongs_to
from shardwright.runtime.overflow import share_overflow
from shardwright.runtime.stages import Stages
from shardwright.runtime.submodules import SplitModel


class StepEnd:
    """The end of a step of one module; its calls have it in common."""

    def __init__(self, module: SplitModel, stages: Stages, own: Sequence[Parameter], handshake: Handshake) -> None:
        """``own`` are the parameters that this rank holds."""
        self.broadcast = ResultBroadcast()
        self._home, self._own, self._device = module._home, [p.tensor for p in own], stages.device
        self._ties = [tie for tie in stages.groups.ties.values() if tie.group is not None]
        self._copies = {tensor: len(owners) for tensor, owners in stages.pipeline.ties}
        self.all_stages = None if stages.everywhere else AllStages.of(handshake, _idle(stages.pipeline))
        self.finish(scaled=False)

    @contextmanager
    def around(self, scaled: bool) -> Iterator[None]:
        """Around the reduction within stages; every rank of the job enters it. ``scaled``: somebody may have scaled the loss
        and look for overflows."""
        before: dict[str, Any] = {}
        for tie in self._ties:
            held = self._held(tie.tensor)
            # A gradient that was left may lie in a bucket, which now would not know that it is still wanted.
            before[tie.tensor], held.grad = None if held.grad is None else held.grad.clone(), None
        yield
        for tie in self._ties:
            if tie.trained:
                tie.add_up(self._held(tie.tensor), before[tie.tensor])
        self.finish(scaled)

    def finish(self, scaled: bool) -> None:
        """Gradients are where they belong; every rank of the job calls this."""
        if self.all_stages is None:
            return
        self._show_stages(self.all_stages)
        if scaled:
            held = map(self._held, self._own)
            share_overflow([p.grad for p in held if p.grad is not None], self._device)
        self.broadcast.finish()

    def _show_stages(self, every: AllStages) -> None:
        """Norms of gradients are those of the whole model."""
        for tensor in self._own:
            gradient = self._held(tensor).grad
            if gradient is not None and not isinstance(gradient, StageGradient):
                belongs_to(gradient, every, self._copies.get(tensor, 1))

    def _held(self, tensor: str) -> torch.nn.Parameter:
        place, key = self._home[tensor]
        held: torch.nn.Parameter = place[key]
        return held


def _idle(pipeline: Pipeline) -> list[int]:
    """Ranks that have stages, and nothing in them that is trained."""
    parts = next(iter(pipeline.parts.values()))
    busy = {
        rank
        for stage, part in zip(pipeline.stages, parts, strict=True)
        if any(parameter.trainable for parameter in part.graph.parameters)
        for rank in stage.ranks
    }
    return sorted(set(pipeline.workers) - busy)
