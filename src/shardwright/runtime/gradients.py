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

from shardwright._torch_compat import after_backward, group_named, like_dtensor, local_of
from shardwright.lowering.collectives import BoundStep, Line, finish_scatter, ledger, run_step, start_scatter

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
IN_FLIGHT_BYTES = 64 * 2**20


@dataclass(eq=False)
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
        parameter.grad = self.wrapped(gradient)

    def wrapped(self, gradient: Tensor) -> Tensor:
        """A local gradient laid out as the parameter is."""
        return like_dtensor(gradient, self.parameter) if isinstance(self.parameter, DTensor) else gradient


@dataclass
class _Bucket:
    """Gradients that wait to be summed along the same lines, in the order in which they became ready."""

    members: list[tuple[Slot, Tensor]] = field(default_factory=list)
    bytes: int = 0


class _Prepared:
    """A bucket whose members are known from an earlier step: gradients are copied into its memory as they come."""

    def __init__(self, slots: list[Slot], shapes: list[torch.Size], like: Tensor) -> None:
        self.slots, self.shapes = slots, shapes
        self.places = {slot: place for place, slot in enumerate(slots)}
        self.filled: set[int] = set()
        self._allocate(like)

    def _allocate(self, like: Tensor) -> None:
        sizes = [shape.numel() for shape in self.shapes]
        self.flat = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        parts = self.flat.split(sizes)
        self.views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        self.gradients = [slot.wrapped(view) for slot, view in zip(self.slots, self.views, strict=True)]

    def fill(self, slot: Slot, gradient: Tensor) -> bool:
        """Take a gradient; true when the bucket is full."""
        if not self.filled and any(s.parameter.grad is g for s, g in zip(self.slots, self.gradients, strict=True)):
            self._allocate(self.flat)  # the last step's gradients still live in the old memory
        place = self.places[slot]
        self.views[place].copy_(gradient)
        self.filled.add(place)
        return len(self.filled) == len(self.slots)

    def deposit(self) -> None:
        self.filled.clear()
        for slot, view, gradient in zip(self.slots, self.views, self.gradients, strict=True):
            if slot.parameter.grad is None:
                slot.parameter.grad = gradient
            else:
                slot.deposit(view)


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
        self._shared: dict[Slot, tuple[Slot, Tensor]] = {}
        self._listening = False
        self._order: list[Slot] = []
        self._prepared: dict[Slot, _Prepared] | None = None

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
            known = self._shared.get(slot)
            self._shared[slot] = (slot, gradient if known is None else known[1] + gradient)
            return
        self._join(slot, gradient)

    def _join(self, slot: Slot, gradient: Tensor) -> None:
        if self._prepared is None:
            self._order.append(slot)
        elif (bucket := self._prepared.get(slot)) is not None and gradient.dtype == bucket.flat.dtype:
            if bucket.fill(slot, gradient):
                self._reduce_prepared(bucket)
            return
        self._join_loose(slot, gradient)

    def _join_loose(self, slot: Slot, gradient: Tensor) -> None:
        """The bucket of gradients that were not expected, as all are in the first step."""
        key = (slot.lines, gradient.dtype)
        loose = self._buckets.setdefault(key, _Bucket())
        loose.members.append((slot, gradient))
        loose.bytes += gradient.numel() * gradient.itemsize
        if loose.bytes >= self.bucket_bytes:
            self._reduce(key)

    def _reduce(self, key: tuple[tuple[Line, ...], torch.dtype]) -> None:
        members, lines = self._buckets.pop(key).members, key[0]
        flat = torch.cat([gradient.reshape(-1) for _, gradient in members])
        sizes = [gradient.numel() for _, gradient in members]
        places = [(slot, gradient.shape) for slot, gradient in members]

        def deposit() -> None:
            for (slot, shape), part in zip(places, flat.split(sizes), strict=True):
                slot.deposit(part.view(shape))

        self._all_reduce(flat, lines, [gradient for _, gradient in members], deposit)

    def _reduce_prepared(self, bucket: _Prepared) -> None:
        self._all_reduce(bucket.flat, bucket.slots[0].lines, bucket.views, bucket.deposit)

    def _all_reduce(
        self, flat: Tensor, lines: tuple[Line, ...], members: list[Tensor], deposit: Callable[[], None]
    ) -> None:
        record = ledger()
        if record is not None:
            for line in lines:
                for gradient in members:
                    record.record(BoundStep("all_reduce", line), gradient, gradient)
        work = dist.all_reduce(flat, group=group_named(lines[0].group), async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            for line in lines[1:]:
                dist.all_reduce(flat, group=group_named(line.group))
            deposit()

        self._launch(finish, flat.numel() * flat.itemsize)

    def _prepare(self) -> None:
        """After the first step the order of gradients is known: lay out the buckets of the steps to come.

        The first bucket of a kind is small, so that communication starts early.
        """
        self._prepared = {}
        groups: dict[tuple[tuple[Line, ...], torch.dtype], list[list[tuple[Slot, torch.Size]]]] = {}
        held: dict[int, int] = {}
        for slot in self._order:
            local = local_of(slot.parameter)
            if (self.reduce_dtype or local.dtype) != local.dtype:
                continue
            runs = groups.setdefault((slot.lines, local.dtype), [[]])
            limit = FIRST_BUCKET_BYTES if len(runs) == 1 else self.bucket_bytes
            if held.get(id(runs[-1]), 0) >= limit:
                runs.append([])
            runs[-1].append((slot, local.shape))
            held[id(runs[-1])] = held.get(id(runs[-1]), 0) + local.numel() * local.itemsize
        for runs in groups.values():
            for run in runs:
                slots = [slot for slot, _ in run]
                bucket = _Prepared(slots, [shape for _, shape in run], local_of(slots[0].parameter))
                self._prepared.update(dict.fromkeys(slots, bucket))
        self._order = []

    def finish(self) -> None:
        """Complete everything; called when the backward pass is through."""
        self._listening = False
        while self._pending or self._shared or self._buckets or self._unfilled():
            while self._pending:
                self._finish_oldest()
            for bucket in self._unfilled():  # some of its members got no gradient in this step: reduce what is there
                for place in sorted(bucket.filled):
                    self._join_loose(bucket.slots[place], bucket.views[place].clone())
                bucket.filled.clear()
            shared, self._shared = self._shared, {}
            for slot, gradient in shared.values():
                self._join_loose(slot, gradient)
            for key in list(self._buckets):
                self._reduce(key)
        if self._prepared is None and self._order:
            self._prepare()

    def _unfilled(self) -> list[_Prepared]:
        buckets = dict.fromkeys((self._prepared or {}).values())
        return [bucket for bucket in buckets if 0 < len(bucket.filled) < len(bucket.slots)]
