"""Where local gradients end up: reduced into the parameters' own layouts while the backward pass still runs.

A gradient that only has to be summed between replicas joins a bucket; a full bucket is reduced in one all-reduce (the
idea of PyTorch's DDP, Li et al., 2020). A gradient of a gathered parameter is reduce-scattered on the spot (FSDP, Zhao et
al., 2023). All of it is started without waiting; when autograd is through, the last results are awaited and written to
``parameter.grad``, so an optimiser that runs after ``backward()`` sees complete gradients. Every rank runs the same graph,
hence gradients become ready in the same order everywhere and collectives match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import after_backward, group_named, local_of
from shardwright.lowering.collectives import BoundStep, Line, finish_scatter, ledger, run_step, start_scatter

BUCKET_BYTES = 25 * 2**20
IN_FLIGHT_BYTES = 64 * 2**20


@dataclass
class Slot:
    """One parameter and what completes its gradient: ``lines`` are the axes along which replicas are summed."""

    parameter: torch.nn.Parameter
    lines: tuple[Line, ...]

    def deposit(self, gradient: Tensor) -> None:
        """Add a finished local gradient to ``parameter.grad``."""
        parameter = self.parameter
        if parameter.grad is not None:
            local_of(parameter.grad).add_(gradient)
            return
        if gradient.dtype != parameter.dtype:
            gradient = gradient.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            parameter.grad = whole
        else:
            parameter.grad = gradient


@dataclass
class _Bucket:
    """Gradients that wait to be summed along the same lines, in the order in which they became ready."""

    members: list[tuple[Slot, Tensor]] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Pending:
    """A collective under way; ``finish`` waits for it and passes the result on."""

    finish: Callable[[], None]
    bytes: int


class Gradients:
    """Collects the gradients of one module. ``hold`` keeps them back, as the first passes of an accumulation want it."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, reduce_dtype: torch.dtype | None = None) -> None:
        self.bucket_bytes, self.reduce_dtype = bucket_bytes, reduce_dtype
        self.hold = False
        self._buckets: dict[tuple[tuple[Line, ...], torch.dtype], _Bucket] = {}
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._shared: dict[int, tuple[Slot, Tensor]] = {}
        self._listening = False

    def expect_end(self) -> None:
        """Make sure that :meth:`finish` runs when this backward pass is through."""
        if not self._listening:
            self._listening = True
            after_backward(self.finish)

    def add(self, slot: Slot, gradient: Tensor, steps: tuple[BoundStep, ...], alone: bool) -> None:
        """A gradient in the layout in which the parameter was used; ``steps`` lead it to the dual of its resting layout.

        ``alone`` says that no other read of the parameter will bring a further share.
        """
        if self.reduce_dtype is not None and gradient.dtype != self.reduce_dtype:
            gradient = gradient.to(self.reduce_dtype)
        for number, step in enumerate(steps):
            if step.kind == "reduce_scatter" and not gradient.is_complex():
                self._scatter(slot, gradient, step, steps[number + 1 :], alone)
                return
            gradient = run_step(gradient, step)
        self._sum(slot, gradient, alone)

    def _scatter(self, slot: Slot, gradient: Tensor, step: BoundStep, rest: tuple[BoundStep, ...], alone: bool) -> None:
        started = start_scatter(gradient, step.dim, step.extent, step.reduce, step.line)
        record = ledger()
        if record is not None:
            record.record(step, gradient, started)

        def finish() -> None:
            mine = finish_scatter(started, step.dim, step.extent, step.line)
            for later in rest:
                mine = run_step(mine, later)
            self._sum(slot, mine, alone)

        self._launch(finish, gradient.numel() * gradient.itemsize)

    def _launch(self, finish: Callable[[], None], bytes: int) -> None:
        self._pending.append(_Pending(finish, bytes))
        self._pending_bytes += bytes
        while self._pending_bytes > IN_FLIGHT_BYTES and len(self._pending) > 1:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending = self._pending.popleft()
        self._pending_bytes -= pending.bytes
        pending.finish()

    def _sum(self, slot: Slot, gradient: Tensor, alone: bool) -> None:
        """Send a gradient to the bucket of its replicas; shares of one parameter meet first."""
        if not slot.lines:
            slot.deposit(gradient)
            return
        if not alone:
            known = self._shared.get(id(slot))
            self._shared[id(slot)] = (slot, gradient if known is None else known[1] + gradient)
            return
        self._join(slot, gradient)

    def _join(self, slot: Slot, gradient: Tensor) -> None:
        key = (slot.lines, gradient.dtype)
        bucket = self._buckets.setdefault(key, _Bucket())
        bucket.members.append((slot, gradient))
        bucket.bytes += gradient.numel() * gradient.itemsize
        if bucket.bytes >= self.bucket_bytes:
            self._reduce(key)

    def _reduce(self, key: tuple[tuple[Line, ...], torch.dtype]) -> None:
        bucket, lines = self._buckets.pop(key), key[0]
        members = bucket.members
        flat = torch.cat([gradient.reshape(-1) for _, gradient in members])
        record = ledger()
        if record is not None:
            for line in lines:
                for _, gradient in members:
                    record.record(BoundStep("all_reduce", line), gradient, gradient)
        sizes = [gradient.numel() for _, gradient in members]
        places = [(slot, gradient.shape) for slot, gradient in members]
        work = dist.all_reduce(flat, group=group_named(lines[0].group), async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            for line in lines[1:]:
                dist.all_reduce(flat, group=group_named(line.group))
            for (slot, shape), part in zip(places, flat.split(sizes), strict=True):
                slot.deposit(part.view(shape))

        self._launch(finish, bucket.bytes)

    def finish(self) -> None:
        """Complete everything; called when the backward pass is through."""
        self._listening = False
        while self._pending or self._shared or self._buckets:
            while self._pending:
                self._finish_oldest()
            shared, self._shared = self._shared, {}
            for slot, gradient in shared.values():
                self._join(slot, gradient)
            for key in list(self._buckets):
                self._reduce(key)
