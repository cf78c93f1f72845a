"""One bucket on its way: the legs that sum a flat tensor between replicas, in place, one after the other.

A scatter leaves this rank's piece where it lies in the flat tensor and a gather fills in the others', which NCCL and gloo
both do without a copy. On CUDA all but the first leg are issued from a stream of their own, so that waiting for the leg
before holds up neither the host nor the computation; elsewhere the host waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import gather_into, group_named, scatter_into
from shardwright.lowering.collectives import ledger
from shardwright.program.steps import BoundStep, Line
from shardwright.program.sums import Leg
from shardwright.waiting import wait_for


class SideStream:
    """The stream beside the computation's, made when it is first needed."""

    def __init__(self) -> None:
        self._stream: Any = None

    def __call__(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)


class BucketReduction:
    """A flat tensor being summed between replicas; ``lines`` gives the ranks along every mesh axis."""

    def __init__(self, flat: Tensor, legs: Sequence[Leg], lines: Sequence[Line], aside: SideStream) -> None:
        # Complex numbers travel as pairs; their scatters cut between numbers, so between pairs too.
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        self._pieces, self._legs, self._lines, self._aside = [real], deque(legs), lines, aside
        self._work: Any = None

    def advance(self) -> None:
        """Start the next leg, if there is one, as soon as the one before has ended."""
        if not self._legs:
            return
        if self._work is None:
            self._work = self._start(self._legs.popleft())
            return
        with self._aside(self._pieces[0].device):
            wait_for(self._work)
            self._work = self._start(self._legs.popleft())

    def finish(self) -> None:
        """Start what is left and wait for all of it."""
        while self._legs:
            self.advance()
        wait_for(self._work)

    def _start(self, leg: Leg) -> Any:
        line, pieces = self._lines[leg.axis], self._pieces
        group = group_named(line.group)
        if leg.kind == "all_gather":
            mine = pieces.pop()
            work = gather_into(pieces[-1], mine, group)
        elif leg.kind == "reduce_scatter":
            pieces.append(pieces[-1].chunk(line.size)[line.position])
            work = scatter_into(pieces[-1], pieces[-2], group)
        else:
            work = dist.all_reduce(pieces[-1], group=group, async_op=True)
        record = ledger()
        if record is not None:
            larger = pieces[-2] if leg.kind == "reduce_scatter" else pieces[-1]
            record.record(BoundStep(leg.kind, line), larger, larger)
        return work
