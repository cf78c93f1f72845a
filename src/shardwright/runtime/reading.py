"""How a rank reads its parameters: as they rest, or gathered ahead of use and freed after.

Each read of a parameter in a program is a :class:`Reader`. Small parameters of a block are gathered together, with the first
of them that is read. Reading starts the gathers of the next few readers, so that their bytes travel while earlier
operators compute. Where the plan says so, what was gathered is not kept for backward:
autograd's saved-tensor hooks replace it by a note, and unpacking the note gathers it again, the reader before it already
under way. The gradient of a read goes to :class:`~shardwright.runtime.gradients.Gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwright._torch_compat import in_backward, storage_watch
from shardwright.costs.redistribute import first_gather
from shardwright.lowering.collectives import BoundStep, in_place, ledger, run_steps
from shardwright.runtime.bundles import Gathering
from shardwright.runtime.gradients import Gradients, Slot


@dataclass(frozen=True)
class Note:
    """Stands for a gathered parameter, or a view of it, among the tensors saved for backward."""

    reader: Reader
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Reader(torch.nn.Module):
    """One read of one parameter: ``forward`` steps lead from its resting layout to the one that is used."""

    def __init__(
        self,
        slot: Slot,
        forward: tuple[BoundStep, ...],
        backward: tuple[BoundStep, ...],
        queue: ReadingQueue,
        gradients: Gradients,
        *,
        again: bool,
        alone: bool,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.slot, self.steps, self.back, self.alone = slot, forward, backward, alone
        self.ahead = first_gather(step.kind for step in forward)
        self.again = again and self.gathers
        self.gradients, self.dtype = gradients, dtype
        self.queue = queue
        self.kept_back: Tensor | None = None
        self.scatters: tuple[Slot, ...] = (slot,)
        """The parameters whose gradients are scattered together with this one's."""
        self.number = queue.enter(self)
        self.bundle: Bundle = (self,)

    def forward(self, leaf: Tensor) -> Tensor:
        if self.slot.parameter.requires_grad and torch.is_grad_enabled():
            value = _Read.apply(self.queue.anchor, leaf, self)
        else:
            value = self.queue.take(self, leaf)
        if self.again:
            self.queue.watch(self, value)
        return value

    @property
    def gathers(self) -> bool:
        """Whether there is a gather to be started ahead of use."""
        return self.ahead is not None

    @property
    def gather(self) -> BoundStep:
        """The step that is started ahead of use."""
        assert self.ahead is not None
        return self.steps[self.ahead]

    def shard(self, leaf: Tensor) -> Tensor:
        """Do what comes before the gather."""
        return run_steps(self._cast(leaf), self.steps[: self.ahead])

    def complete(self, stacked: Tensor) -> Tensor:
        """Put the shards that arrived in their places and do what follows the gather."""
        assert self.ahead is not None
        step = self.gather
        return run_steps(in_place(stacked, step.dim, step.extent, step.line), self.steps[self.ahead + 1 :])

    def gathered_bytes(self, stacked: Tensor) -> int:
        """Of the shards that arrived, without what they were padded with."""
        step = self.gather
        return stacked.nbytes // (-(-step.extent // step.line.size) * step.line.size) * step.extent

    def local(self, leaf: Tensor) -> Tensor:
        """The value where nothing has to be gathered first."""
        value = run_steps(self._cast(leaf), self.steps)
        return value.view_as(value) if value is leaf else value

    def receive(self, gradient: Tensor) -> None:
        """A gradient of the value that was read; kept back during accumulation."""
        self.queue.drop(self)
        if self.kept_back is not None:
            gradient, self.kept_back = gradient + self.kept_back, None
        if self.gradients.hold:
            self.kept_back = gradient
            return
        self.gradients.expect_end()
        self.gradients.add(self.slot, gradient, self.back, self.alone, self.scatters)

    def _cast(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.dtype) if self.dtype is not None and leaf.is_floating_point() else leaf


Bundle = tuple[Reader, ...]
"""Readers whose parameters are gathered together."""


class _Read(torch.autograd.Function):
    """Autograd sees a value that depends on an ``anchor``; its gradient goes to the reader and nowhere else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, leaf: Tensor, reader: Reader) -> Tensor:
        ctx.reader = reader
        return reader.queue.take(reader, leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.reader.receive(gradients[0])
        return None, None, None


class ReadingQueue:
    """The readers of one program in order, which gathers are under way, and what was gathered again for backward."""

    def __init__(self, ahead_bytes: int = 64 * 2**20) -> None:
        self.readers: list[Reader] = []
        self.ahead_bytes = ahead_bytes
        self.leaves: Sequence[Tensor] = ()
        self.anchor = torch.empty(0, requires_grad=True)
        self._under_way: dict[Bundle, tuple[Bundle, Gathering]] = {}
        self._travelling = 0
        self._arrived: dict[int, Tensor] = {}
        self._reached = {1: -1, -1: 0}
        self._asked = {1: -1, -1: 0}
        self._again: dict[int, Tensor] = {}
        self._watched: dict[int, tuple[Any, Reader]] = {}
        self._noted: set[int] = set()

    def enter(self, reader: Reader) -> int:
        self.readers.append(reader)
        return len(self.readers) - 1

    @cached_property
    def _bundles(self) -> dict[Bundle, int]:
        """Every bundle and its place, in the order of their first members."""
        bundles = dict.fromkeys(reader.bundle for reader in self.readers if reader.gathers)
        return {bundle: place for place, bundle in enumerate(bundles)}

    @cached_property
    def _order(self) -> list[Bundle]:
        return list(self._bundles)

    def take(self, reader: Reader, leaf: Tensor) -> Tensor:
        """The value of a reader for the forward pass; the next gathers are started before this one is awaited."""
        if not reader.gathers:
            return reader.local(leaf.detach())
        if reader.number not in self._arrived:
            if in_backward():  # a block that is computed again reads its parameters again, and none beyond
                self._land(reader.bundle, self._gathering(reader.bundle))
            else:
                self._start(reader.bundle, reader.bundle)
                self._await(reader.bundle, 1)
        return reader.complete(self._arrived.pop(reader.number))

    def _gathering(self, readers: Bundle) -> Gathering:
        shards = [reader.shard(self.leaves[reader.number].detach()) for reader in readers]
        return Gathering.start(shards, [reader.gather for reader in readers])

    def _start(self, bundle: Bundle, readers: Bundle) -> None:
        """Start to gather some of a bundle, unless it is under way."""
        if bundle not in self._under_way:
            gathering = self._gathering(readers)
            self._under_way[bundle] = (readers, gathering)
            self._travelling += gathering.bytes
            self._noted.difference_update(reader.number for reader in readers)

    def _await(self, bundle: Bundle, direction: int) -> None:
        """Start what comes next in this direction, then wait for the bundle."""
        self._ahead(bundle, direction)
        readers, gathering = self._under_way.pop(bundle)
        self._travelling -= gathering.bytes
        self._land(readers, gathering)

    def _land(self, readers: Bundle, gathering: Gathering) -> None:
        arrived = gathering.wait()
        self._arrived.update(zip((reader.number for reader in readers), arrived, strict=True))
        record = ledger()
        if record is not None:
            sizes = (reader.gathered_bytes(x) for reader, x in zip(readers, arrived, strict=True))
            record.add(readers[0].gather, sum(sizes))

    def _ahead(self, bundle: Bundle, direction: int) -> None:
        """Start the gathers that come next in this direction, as far as the bytes under way allow."""
        # Gathers under way lie between this bundle and the last one reached. They count twice against the limit, here as in
        # the walk that predicts the order.
        travelling = 2 * self._travelling - self._under_way[bundle][1].bytes
        place = self._bundles[bundle]
        if direction * (place - self._asked[direction]) < 0:  # a tied weight was asked for out of turn
            self._reached[direction] = place
        self._asked[direction] = place
        place = direction * max(direction * self._reached[direction], direction * place)
        while 0 <= place + direction < len(self._order) and travelling < self.ahead_bytes:
            place += direction
            following = self._order[place]
            readers = following if direction > 0 else self._wanted_again(following)
            if readers:
                self._start(following, readers)
                travelling += self._under_way[following][1].bytes
        self._reached[direction] = place

    def _wanted_again(self, bundle: Bundle) -> Bundle:
        return tuple(reader for reader in bundle if reader.number in self._noted)

    def watch(self, reader: Reader, value: Tensor) -> None:
        """From now on, saving this value, or a view of it that has outlived it, for backward saves a note."""
        self._watched[value.untyped_storage().data_ptr()] = (storage_watch(value), reader)

    def hooks(self) -> AbstractContextManager[Any]:
        """Within this context autograd saves notes in place of what is gathered again."""
        if not any(reader.again for reader in self.readers):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        known = self._watched.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if known is None or known[0].expired():
            return tensor
        self._noted.add(known[1].number)
        return Note(known[1], tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, Note):
            return saved
        reader = saved.reader
        whole = self._again.get(reader.number)
        if whole is None:
            while reader.number not in self._arrived:
                if reader.bundle not in self._under_way:
                    self._noted.add(reader.number)
                    self._start(reader.bundle, self._wanted_again(reader.bundle))
                self._await(reader.bundle, -1)
            whole = reader.complete(self._arrived.pop(reader.number))
            if reader.slot.parameter.requires_grad:  # else no gradient will arrive to say that it is done with
                self._again[reader.number] = whole
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    def drop(self, reader: Reader) -> None:
        """The gradient of a read is known, so nothing needs what was gathered again."""
        self._again.pop(reader.number, None)
        self._arrived.pop(reader.number, None)

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """A forward pass starts with these shards: what an earlier pass gathered ahead may be out of date by now."""
        self.leaves = leaves
        for _, gathering in self._under_way.values():
            gathering.pending.wait()
        self._under_way.clear()
        self._travelling = 0
        self._arrived.clear()
        self._reached = {1: -1, -1: len(self._order)}
        self._asked = {1: -1, -1: len(self._order)}
        self._again.clear()
        self._watched.clear()
        self._noted.clear()
