"""Results of a pipeline that lie on the ranks of one stage: fetched by the others when every rank looks at them.

A loop that never looks at the logits pays nothing for them. The parts of the micro-batches are put together on the stage
that made them, and broadcast from there. The loss of a training step is told to all (:class:`Telling`): whoever has it goes
on at once, so that the last stage, which is through first, sums its gradients while the others are still going back.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from shardwright._torch_compat import wrapper_tensor
from shardwright.lowering.collectives import run_steps
from shardwright.runtime.border import Whole
from shardwright.waiting import wait_for


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

    def whole(self, telling: Telling | None = None) -> Tensor:
        """The values; ``telling``: by letters instead of a broadcast that all ranks wait in."""
        if self._gathered is None:
            whole = self._joined()
            if len(self._ranks) < dist.get_world_size():
                whole = whole.contiguous()
                if telling is None:
                    dist.broadcast(whole, self._ranks[0])
                else:
                    telling.tell(whole, self._ranks)
            self._gathered = whole
            self._parts = ()
        return self._gathered

    def _joined(self) -> Tensor:
        """The parts of the micro-batches together, where this rank has them; memory for them elsewhere."""
        pieces = [run_steps(x, steps) for x, steps in zip(self._parts, self._exits, strict=True) if x is not None]
        if not pieces:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if isinstance(self._join, Shard):
            return torch.cat(pieces, self._join.dim)
        return torch.stack(pieces).sum(0) if isinstance(self._join, Partial) else pieces[0]


TAG = 1 << 20
"""Beyond the numbers of the parcels between two ranks."""


class Telling:
    """Small results on their way to the ranks that lack them; whoever has them waits for nobody before :meth:`finish`."""

    def __init__(self) -> None:
        self._leaving: list[tuple[Any, Tensor]] = []
        atexit.register(self._leave)

    def tell(self, value: Tensor, ranks: Sequence[int]) -> None:
        """The first of ``ranks``, which all have it, tells those that do not; there it is written into ``value``."""
        here, source = dist.get_rank(), ranks[0]
        if dist.get_backend() == "nccl":
            copy = value.clone() if here == source else value
            work = dist.broadcast(copy, source, async_op=True)
            assert work is not None
            if here == source:
                self._leaving.append((work, copy))
            else:
                wait_for(work)
        elif here == source:
            copy = value.clone()
            others = (rank for rank in range(dist.get_world_size()) if rank not in ranks)
            self._leaving += [(dist.isend(copy, rank, tag=TAG), copy) for rank in others]
        elif here not in ranks:
            wait_for(dist.irecv(value, source, tag=TAG))

    def finish(self) -> None:
        """Wait until all that was told has left."""
        while self._leaving:
            wait_for(self._leaving.pop()[0])

    def _leave(self) -> None:
        """A process that ends must not take along what others wait for."""
        with suppress(RuntimeError):  # the processes have parted already
            self.finish()
