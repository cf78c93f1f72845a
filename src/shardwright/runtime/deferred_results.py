"""Results that lie in parts on several ranks, or on those of one stage: put together when every rank looks at them.

A loop that never looks at the logits pays nothing for them (PyTorch's own asynchronous collectives are awaited when first
used, too). Parts of a mesh are gathered, those of micro-batches joined, and what a stage has alone is broadcast from there.
The loss of a training step is told to all (:class:`ResultBroadcast`): whoever has it goes on at once, so that the last
stage, which is through first, sums its gradients while the others are still going back.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from shardwright._torch_compat import map_tree, wrapper_tensor
from shardwright.lowering.collectives import run_steps
from shardwright.operators.rules import Placement
from shardwright.runtime.boundary_steps import BoundarySteps
from shardwright.waiting import wait_for


@dataclass(frozen=True, eq=False)
class ModuleOutput:
    """An output of a module: how this rank's parts become the whole of every micro-batch (``None`` where it has none), how
    these become that of the batch, and the ranks that have it."""

    name: str
    exits: tuple[BoundarySteps | None, ...]
    join: Placement | None
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def everywhere(self) -> bool:
        """Whether every rank has its part of it."""
        return len(self.ranks) == dist.get_world_size()

    @cached_property
    def known(self) -> bool:
        """Whether every rank has it whole."""
        return self.everywhere and len(self.exits) == 1 and not any(exit and exit.forward for exit in self.exits)


class ResultParts(NamedTuple):
    """An output of one call, as this rank has it: its part of every micro-batch, ``None`` where others have it."""

    output: ModuleOutput
    parts: Sequence[Tensor | None]

    def whole(self, broadcast: ResultBroadcast | None = None) -> Tensor:
        """The values, on every rank; ``broadcast``: without waiting for the ranks that lack it."""
        output, join = self.output, self.output.join
        pairs = zip(self.parts, output.exits, strict=True)
        pieces = [run_steps(x, way.forward) for x, way in pairs if x is not None and way is not None]
        if not pieces:
            whole = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        elif isinstance(join, Shard) and len(pieces) > 1:
            whole = torch.cat(pieces, join.dim)
        else:
            whole = torch.stack(pieces).sum(0) if isinstance(join, Partial) else pieces[0]
        if not output.everywhere:
            whole = whole.contiguous()
            if broadcast is None:
                dist.broadcast(whole, output.ranks[0])
            else:
                broadcast.tell(whole, output.ranks)
        return whole


class Whole(Tensor):
    """A result that lies in parts, as the whole tensor that loops expect.

    It has the whole shape; the first operator that looks at its values puts them together, so every rank has to look. What
    operators make of it are plain tensors.
    """

    _parts: ResultParts | None
    _gathered: Tensor | None

    @staticmethod
    def __new__(cls, parts: ResultParts) -> Whole:
        output = parts.output
        made = wrapper_tensor(cls, output.shape, torch.empty(0, dtype=output.dtype, device=output.device))
        made._parts, made._gathered = parts, None
        return made

    def whole(self) -> Tensor:
        """The values, outside of autograd."""
        if self._gathered is None:
            assert self._parts is not None
            self._gathered, self._parts = self._parts.whole(), None
        return self._gathered

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # as in Tensor, without types
        given: dict[int, Whole] = {}

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, Whole):
                return leaf
            given[id(leaf.whole())] = leaf
            return leaf.whole()

        result = func(*map_tree(plain, args), **map_tree(plain, kwargs or {}))
        return given.get(id(result), result)  # an operator in place hands back what it was given

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            return super().numpy()  # says that it has to be detached
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __repr__(self) -> Any:  # type: ignore[override]  # the keyword is for subclasses that print their parts
        return f"Whole({self.whole()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


TAG = 1 << 20
"""Beyond the numbers of the parcels between two ranks."""


class ResultBroadcast:
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
