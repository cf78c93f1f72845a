"""Results of a pipeline that lie on the ranks of one stage: fetched by the others when every rank looks at them.

A loop that never looks at the logits pays nothing for them. The parts of the micro-batches are put together on the stage
that made them, and broadcast from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from shardwright._torch_compat import wrapper_tensor
from shardwright.lowering.collectives import run_steps
from shardwright.runtime.border import Whole


class Fetched(Whole):
    """An output of a pipeline. The first operator that looks at its values fetches them from the stage that has them, so
    every rank has to look."""

    @staticmethod
    def __new__(
        cls,
        mine: Sequence[Tensor | None],
        exits: Sequence[tuple[Any, ...]],
        join: Any,
        ranks: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Fetched:
        made = wrapper_tensor(cls, shape, torch.empty(0, dtype=dtype, device=device))
        made._parts, made._exits, made._join, made._ranks = mine, exits, join, ranks
        made._gathered = None
        return made

    _parts: Sequence[Tensor | None]
    _exits: Sequence[tuple[Any, ...]]
    _join: Any
    _ranks: tuple[int, ...]

    def whole(self) -> Tensor:
        if self._gathered is None:
            pieces = [run_steps(x, steps) for x, steps in zip(self._parts, self._exits, strict=True) if x is not None]
            if not pieces:
                whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            elif isinstance(self._join, Shard):
                whole = torch.cat(pieces, self._join.dim)
            else:
                whole = torch.stack(pieces).sum(0) if isinstance(self._join, Partial) else pieces[0]
            if len(self._ranks) < dist.get_world_size():
                whole = whole.contiguous()
                dist.broadcast(whole, self._ranks[0])
            self._gathered = whole
            self._parts = ()
        return self._gathered
