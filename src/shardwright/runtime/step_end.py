"""What follows the reduction of gradients within stages: parameters that several stages hold are summed between these, and
gradients come to know that there are others on other ranks. Where one mesh holds everything, nothing does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import local_of
from shardwright.graph import Parameter
from shardwright.runtime.deferred_results import ResultBroadcast
from shardwright.runtime.handshake import Handshake
from shardwright.runtime.norms import AllStages, StageGradient, belongs_to
from shardwright.runtime.rank import Rank
from shardwright.runtime.stages import Stages


def share_overflow(gradients: Iterable[Tensor], device: torch.device) -> None:
    """Every rank calls this with its own gradients; if any of any rank is not finite, one of each rank becomes NaN.

    ``GradScaler`` looks at the gradients that its process holds, skips the update and lowers its scale if one is infinite.
    Stages hold different parameters: each would decide alone, and the model would be half updated. One number is exchanged,
    on the device, without waiting for it on the host.
    """
    local = [part for part in map(local_of, gradients) if part.numel()]
    found = torch.zeros((), dtype=torch.float32, device=device)  # on every rank, whatever its default
    if local:
        found = (~torch.nn.utils.get_total_norm(local, float("inf")).isfinite()).to(torch.float32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if local:
        local[0].mul_(torch.where(found > 0, torch.nan, 1.0).to(local[0].dtype))


class StepEnd:
    """The end of a step of one module; its calls have it in common."""

    def __init__(self, rank: Rank, stages: Stages, own: Sequence[Parameter], handshake: Handshake) -> None:
        """``own`` are the parameters that this rank holds."""
        self.broadcast = ResultBroadcast()
        self._rank, self._own = rank, [p.tensor for p in own]
        self._ties = [tie for tie in stages.groups.ties.values() if tie.group is not None]
        self._copies = {tensor: len(owners) for tensor, owners in stages.pipeline.ties}
        pipeline = stages.pipeline
        parts = zip(pipeline.stages, next(iter(pipeline.parts.values())), strict=True)
        busy = {
            rank for stage, part in parts if any(p.trainable for p in part.graph.parameters) for rank in stage.ranks
        }
        idle = tuple(rank for rank in pipeline.workers if rank not in busy)
        self.all_stages = None if stages.everywhere else AllStages(handshake, idle)
        self.finish(scaled=False)

    @contextmanager
    def around(self, scaled: bool) -> Iterator[None]:
        """Around the reduction within stages; every rank of the job enters it. ``scaled``: somebody may have scaled the loss
        and look for overflows."""
        before: dict[str, Any] = {}
        for tie in self._ties:
            held = self._rank.held(tie.tensor)
            # A gradient that was left may lie in a bucket, which now would not know that it is still wanted.
            before[tie.tensor], held.grad = None if held.grad is None else held.grad.clone(), None
        yield
        for tie in self._ties:
            if tie.trained:
                tie.add_up(self._rank.held(tie.tensor), before[tie.tensor])
        self.finish(scaled)

    def finish(self, scaled: bool) -> None:
        """Gradients are where they belong; every rank of the job calls this."""
        if self.all_stages is None:
            return
        gradients = {tensor: self._rank.held(tensor).grad for tensor in self._own}
        for tensor, gradient in gradients.items():  # norms of gradients are those of the whole model
            if gradient is not None and not isinstance(gradient, StageGradient):
                belongs_to(gradient, self.all_stages, self._copies.get(tensor, 1))
        if scaled:
            share_overflow([x for x in gradients.values() if x is not None], self._rank.device)
        self.broadcast.finish()
