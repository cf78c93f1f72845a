"""Parcels between the ranks of a pipeline: sent without waiting, awaited where they are read.

Between two ranks parcels arrive in the order in which they were sent. A receive is posted one pass ahead of its use, with
all that the same sender sends before it, so the memory of parcels under way is bounded by what one pass reads and what was
sent ahead of it. On gloo every parcel has a number of its own; on NCCL every ordered pair of ranks has a communicator of its
own, in which the order of both sides is the same by construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.collectives import ledger
from shardwright.program.tasks import Message, Task
from shardwright.program.transfers import Region, region_of
from shardwright.waiting import wait_for

Pair = tuple[int, int]
"""The rank that sends and the rank that receives."""


def channels(every: Sequence[Sequence[Task]], known: Mapping[Pair, Any]) -> dict[Pair, Any]:
    """A process group for every ordered pair of ranks, where the backend needs one: those that are ``known``, and new ones.
    Every rank calls this."""
    if dist.get_backend() != "nccl":
        return {}
    return {pair: known.get(pair) or dist.new_group(list(pair)) for pair in sorted(_pairs(every))}


def _pairs(every: Sequence[Sequence[Task]]) -> dict[Pair, list[Message]]:
    """What is sent between any two ranks, in order."""
    pairs: dict[Pair, list[Message]] = {}
    for message in (message for steps in every for step in steps for message in step.sends):
        if message.source != message.target:
            pairs.setdefault((message.source, message.target), []).append(message)
    return pairs


class PointToPoint:
    """What one rank sends and receives in the steps of a pipeline."""

    def __init__(
        self, every: Sequence[Sequence[Task]], rank: int, device: torch.device, channels: Mapping[Pair, Any]
    ) -> None:
        """``every``: the steps of all ranks; ``channels``: the process groups of pairs of ranks that have one."""
        self.rank, self.device, self._groups = rank, device, channels
        pairs = _pairs(every)
        self._number = {message: n for queue in pairs.values() for n, message in enumerate(queue)}
        self._order = {source: queue for (source, target), queue in pairs.items() if target == rank}
        self._posted: dict[Message, tuple[Any, Tensor]] = {}
        self._next: dict[int, int] = {}
        self._local: dict[Message, Tensor] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def send(self, message: Message, local: Tensor) -> None:
        """Send a part of this rank's local tensor; nothing is waited for."""
        part = region_of(local, message.parcel.take)
        if message.target == self.rank:
            self._local[message] = part
            return
        part = part.contiguous()
        if (record := ledger()) is not None:
            record.parcel(part.nbytes)
        group = self._groups.get((message.source, message.target))
        work = dist.isend(part, message.target, group=group, tag=self._number[message])
        self._leaving.append((work, part))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def expect(self, messages: Iterable[Message]) -> None:
        """Post the receives of these parcels, and of all that the same ranks send before them."""
        for message in messages:
            if message.source == self.rank:
                continue
            queue, upto = self._order[message.source], self._number[message]
            for number in range(self._next.get(message.source, 0), upto + 1):
                one, group = queue[number], self._groups.get((message.source, self.rank))
                dtype = getattr(torch, one.boundary.dtype)
                buffer = torch.empty(one.parcel.shape, dtype=dtype, device=self.device)
                self._posted[one] = (dist.irecv(buffer, one.source, group=group, tag=number), buffer)
            self._next[message.source] = max(upto + 1, self._next.get(message.source, 0))

    def receive(self, messages: Sequence[Message], shape: tuple[int, ...]) -> Tensor:
        """Wait for the parts of one tensor and put them together."""
        parts: list[tuple[Region, Tensor]] = []
        for message in messages:
            if message.source == self.rank:
                parts.append((message.parcel.put, self._local.pop(message)))
                continue
            work, buffer = self._posted.pop(message)
            wait_for(work)
            parts.append((message.parcel.put, buffer))
        if len(parts) == 1 and tuple(parts[0][1].shape) == shape:
            return parts[0][1]
        whole = parts[0][1].new_empty(shape)
        for region, part in parts:
            region_of(whole, region).copy_(part)
        return whole

    def finish(self) -> None:
        """Wait until everything that was sent has left; the next step starts to count anew."""
        while self._leaving:
            wait_for(self._leaving.popleft()[0])
        self._next.clear()
