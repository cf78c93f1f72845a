"""Where local gradients end up: reduced into the parameters' own layouts while the backward pass still runs.

A gradient that only has to be summed between replicas joins a bucket; a full bucket is summed at once (the idea of
PyTorch's DDP, Li et al., 2020), along several mesh axes by the legs of :mod:`shardwright.costs.replica_sums`, of which every
new bucket moves the earlier ones one on: which collective follows which is a matter of the program, never of timing. A
gradient of a gathered parameter is reduce-scattered on the spot, small ones when those of their bundle are there
(:mod:`shardwright.costs.bundles`; FSDP, Zhao et al., 2023). All of it is started without
waiting; when autograd is through, the last results are awaited and written to ``parameter.grad``, so an optimiser that
runs after ``backward()`` sees complete gradients. Every rank runs the same graph, hence gradients become ready in the same
order everywhere and collectives match.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import accumulation_hooks, after_backward, gradient_hooks, like_dtensor, local_of
from shardwright.cluster import Mesh
from shardwright.costs.replica_sums import BUCKET_BYTES, FIRST_BUCKET_BYTES, IN_FLIGHT_BYTES, ReplicaSum, replica_sum
from shardwright.errors import RunError
from shardwright.lowering.collectives import BoundStep, Line, ledger, run_step
from shardwright.runtime.bundles import Scattering
from shardwright.runtime.summing import Aside, Summing

Key = tuple[tuple[int, ...], torch.dtype]
"""What the gradients of one bucket have in common: the mesh axes along which they are summed, and their dtype."""


@dataclass(eq=False)
class Slot:
    """One parameter and what completes its gradient.

    ``axes`` are those of the mesh along which replicas are summed. ``elements`` are those of the largest shard: shards may
    be uneven, and when a bucket is full must not depend on the rank, or collectives would not match.
    """

    parameter: torch.nn.Parameter
    axes: tuple[int, ...]
    elements: int
    whole: bool = False
    """Whether a gradient that has to be scattered stays whole until the backward pass is through (ZeRO-1)."""

    @property
    def hooked(self) -> bool:
        """Whether the user put hooks on the parameter: they see a gradient once, when it is complete."""
        return bool(gradient_hooks(self.parameter) or accumulation_hooks(self.parameter))

    def deposit(self, gradient: Tensor) -> None:
        """Add a finished local gradient to ``parameter.grad``, past the parameter's hooks."""
        parameter = self.parameter
        for hook in gradient_hooks(parameter):
            gradient = gradient.to(parameter.dtype)
            gradient = self._returned(hook(self.wrapped(gradient)), gradient)
        if parameter.grad is not None:
            local_of(parameter.grad).add_(gradient)
        else:
            parameter.grad = self.wrapped(gradient.to(parameter.dtype))
        for hook in accumulation_hooks(parameter):
            hook(parameter)

    def _returned(self, answer: Tensor | None, gradient: Tensor) -> Tensor:
        """What a hook makes of a local gradient."""
        if answer is None:
            return gradient
        parameter = self.parameter
        if isinstance(answer, DTensor) != isinstance(parameter, DTensor) or answer.shape != parameter.shape:
            raise RunError(
                f"A hook of a parameter {list(parameter.shape)} returned a {type(answer).__name__} {list(answer.shape)}.",
                "Return the gradient it was given, changed: a DTensor of the same shape.",
            )
        if isinstance(answer, DTensor) and isinstance(parameter, DTensor):
            answer = answer.redistribute(placements=parameter.placements)
        return local_of(answer)

    def wrapped(self, gradient: Tensor) -> Tensor:
        """A local gradient laid out as the parameter is."""
        return like_dtensor(gradient, self.parameter) if isinstance(self.parameter, DTensor) else gradient


@dataclass
class _Bucket:
    """Gradients that wait to be summed along the same axes, in the order in which they became ready."""

    members: list[tuple[Slot, Tensor]] = field(default_factory=list)
    bytes: int = 0


class _Prepared:
    """A bucket whose members are known from an earlier step: gradients are copied into its memory as they come."""

    def __init__(self, slots: list[Slot], shapes: list[torch.Size], like: Tensor, way: ReplicaSum) -> None:
        self.slots, self.shapes, self.way = slots, shapes, way
        self.places = {slot: place for place, slot in enumerate(slots)}
        self.filled: set[int] = set()
        self._allocate(like)

    def _allocate(self, like: Tensor) -> None:
        sizes = [shape.numel() for shape in self.shapes]
        self.flat = torch.empty(self.way.elements, dtype=like.dtype, device=like.device)
        self.flat[sum(sizes) :] = 0
        parts = self.flat[: sum(sizes)].split(sizes)
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
            if slot.hooked:  # who knows where the hooks take it: the bucket's memory is used again
                slot.deposit(view.clone())
            elif slot.parameter.grad is None:
                slot.parameter.grad = gradient
            else:
                slot.deposit(view)


@dataclass(eq=False)
class _Pending:
    """A collective under way; ``finish`` waits for it and passes the result on, which frees ``bytes``."""

    finish: Callable[[], None]
    bytes: int
    summing: Summing | None = None


class _Share(NamedTuple):
    """A gradient to be scattered by ``step``, and by what it has to go on with."""

    slot: Slot
    gradient: Tensor
    step: BoundStep
    rest: tuple[BoundStep, ...]
    alone: bool

    @property
    def bytes(self) -> int:
        """Those of the largest gradient of this kind on any rank."""
        pieces = prod(step.line.size for step in (self.step, *self.rest) if step.kind == "reduce_scatter")
        return self.slot.elements * pieces * self.gradient.itemsize


class Gradients:
    """Collects the gradients of one module on a mesh whose ``lines`` through this rank are given, one for every axis.

    ``hold`` keeps them back, as the first passes of an accumulation want it.
    """

    def __init__(self, mesh: Mesh, lines: Sequence[Line], reduce_dtype: torch.dtype | None = None) -> None:
        self.mesh, self.lines, self.reduce_dtype = mesh, tuple(lines), reduce_dtype
        self.bucket_bytes, self.first_bucket_bytes = BUCKET_BYTES, FIRST_BUCKET_BYTES
        self.hold = False
        self._aside = Aside()
        self._buckets: dict[Key, _Bucket] = {}
        self._begun: set[Key] = set()
        self._coming: Counter[Key] = Counter()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._shared: dict[Slot, tuple[Slot, Tensor]] = {}
        self._whole: deque[tuple[Slot, Tensor, tuple[BoundStep, ...], bool, tuple[Slot, ...]]] = deque()
        self._collected: dict[tuple[Slot, ...], tuple[list[_Share], int]] = {}
        self._listening = False
        self._order: list[Slot] = []
        self._prepared: dict[Slot, _Prepared] | None = None

    def expect_end(self) -> None:
        """Make sure that :meth:`finish` runs when this backward pass is through."""
        if not self._listening:
            self._listening = True
            after_backward(self.finish)

    def add(
        self,
        slot: Slot,
        gradient: Tensor,
        steps: tuple[BoundStep, ...] = (),
        alone: bool = True,
        bundle: tuple[Slot, ...] = (),
    ) -> None:
        """A gradient in the layout in which the parameter was used; ``steps`` lead it to the dual of its resting layout.

        ``alone`` says that no other read of the parameter will bring a further share. ``bundle`` are the parameters, this
        one among them, whose gradients are scattered together.
        """
        if slot.whole and any(step.kind == "reduce_scatter" for step in steps):
            self._whole.append((slot, gradient, steps, alone, bundle))
        else:
            self._bring_home(slot, gradient, steps, alone, bundle)

    def _bring_home(
        self, slot: Slot, gradient: Tensor, steps: tuple[BoundStep, ...], alone: bool, bundle: tuple[Slot, ...]
    ) -> None:
        if self.reduce_dtype is not None and gradient.dtype != self.reduce_dtype:
            gradient = gradient.to(self.reduce_dtype)
        for number, step in enumerate(steps):
            if step.kind == "reduce_scatter" and not gradient.is_complex():
                share = _Share(slot, gradient, step, steps[number + 1 :], alone)
                if len(bundle) > 1:
                    self._collect(share, bundle)
                else:
                    self._scatter([share])
                return
            gradient = run_step(gradient, step)
        self._sum(slot, gradient, alone)

    def _collect(self, share: _Share, bundle: tuple[Slot, ...]) -> None:
        """Scatter a bundle when all of its gradients are there."""
        known = self._collected.get(bundle)
        if known is None:
            known = self._collected[bundle] = ([], sum(slot.parameter.requires_grad for slot in bundle))
        shares, expected = known
        shares.append(share)
        if len(shares) >= expected:
            del self._collected[bundle]
            self._scatter(shares)

    def _scatter(self, shares: list[_Share]) -> None:
        scattering = Scattering.start([s.gradient for s in shares], [s.step for s in shares])
        record = ledger()
        if record is not None:
            record.add(shares[0].step, sum(share.gradient.nbytes for share in shares))
        homes = [(s.slot, s.rest, s.alone, (s.slot.axes, s.gradient.dtype)) for s in shares]
        self._coming.update(key for *_, key in homes)

        def finish() -> None:
            for mine, (slot, rest, alone, key) in zip(scattering.wait(), homes, strict=True):
                for later in rest:
                    mine = run_step(mine, later)
                self._coming[key] -= 1
                self._sum(slot, mine, alone)

        self._launch(finish, sum(share.bytes for share in shares))

    def _launch(self, finish: Callable[[], None], bytes: int, summing: Summing | None = None) -> None:
        if summing is not None:
            self._advance()
        self._pending.append(_Pending(finish, bytes, summing))
        self._pending_bytes += bytes
        while bytes and self._pending_bytes > IN_FLIGHT_BYTES and self._pending_bytes > bytes:
            self._finish(next(pending for pending in self._pending if pending.bytes))

    def _advance(self) -> None:
        """Every sum under way goes one leg on, the oldest first."""
        for pending in self._pending:
            if pending.summing is not None:
                pending.summing.advance()

    def _finish(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        self._pending_bytes -= pending.bytes
        pending.finish()

    def _sum(self, slot: Slot, gradient: Tensor, alone: bool) -> None:
        """Send a gradient to the bucket of its replicas; shares of one parameter meet first."""
        if not slot.axes and (alone or not slot.hooked):
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
                self._sum_up(bucket.flat, bucket.way, bucket.deposit)
            return
        self._join_loose(slot, gradient, early=True)

    def _join_loose(self, slot: Slot, gradient: Tensor, early: bool = False) -> None:
        """The bucket of gradients that were not expected, as all are in the first step.

        ``early``: the first bucket of a kind is small, so that communication starts early.
        """
        key = (slot.axes, gradient.dtype)
        loose = self._buckets.setdefault(key, _Bucket())
        loose.members.append((slot, gradient))
        loose.bytes += slot.elements * gradient.itemsize
        if loose.bytes >= (self.first_bucket_bytes if early and key not in self._begun else self.bucket_bytes):
            self._reduce(key)

    def _way(self, key: Key, elements: int) -> ReplicaSum:
        return replica_sum(elements, key[1].itemsize, key[0], self.mesh)

    def _reduce(self, key: Key) -> None:
        self._begun.add(key)
        members = self._buckets.pop(key).members
        sizes = [gradient.numel() for _, gradient in members]
        places = [(slot, gradient.shape) for slot, gradient in members]
        way = self._way(key, sum(sizes))
        padding = members[0][1].new_zeros(way.elements - sum(sizes))
        flat = torch.cat([*(gradient.reshape(-1) for _, gradient in members), padding])

        def deposit() -> None:
            for (slot, shape), part in zip(places, flat[: sum(sizes)].split(sizes), strict=True):
                slot.deposit(part.view(shape))

        self._sum_up(flat, way, deposit)

    def _sum_up(self, flat: Tensor, way: ReplicaSum, deposit: Callable[[], None]) -> None:
        summing = Summing(flat, way.legs, self.lines, self._aside)
        summing.advance()

        def finish() -> None:
            summing.finish()
            deposit()

        self._launch(finish, 0, summing)  # the sums stay where they are: waiting for them would free nothing

    def _prepare(self) -> None:
        """After the first step the order of gradients is known: lay out the buckets of the steps to come.

        The first bucket of a kind is small, so that communication starts early.
        """
        self._prepared = {}
        groups: dict[Key, list[list[tuple[Slot, torch.Size]]]] = {}
        held: dict[int, int] = {}
        for slot in self._order:
            local = local_of(slot.parameter)
            if (self.reduce_dtype or local.dtype) != local.dtype:
                continue
            runs = groups.setdefault((slot.axes, local.dtype), [[]])
            limit = self.first_bucket_bytes if len(runs) == 1 else self.bucket_bytes
            if held.get(id(runs[-1]), 0) >= limit:
                runs.append([])
            runs[-1].append((slot, local.shape))
            held[id(runs[-1])] = held.get(id(runs[-1]), 0) + slot.elements * local.itemsize
        for key, runs in groups.items():
            for run in runs:
                slots, shapes = [slot for slot, _ in run], [shape for _, shape in run]
                way = self._way(key, sum(shape.numel() for shape in shapes))
                bucket = _Prepared(slots, shapes, local_of(slots[0].parameter), way)
                self._prepared.update(dict.fromkeys(slots, bucket))
        self._order = []

    def finish(self) -> None:
        """Complete everything; called when the backward pass is through."""
        self._listening = False
        while self._whole:
            self._bring_home(*self._whole.popleft())
        while self._collected:  # some of them got no gradient in this step
            self._scatter(self._collected.pop(next(iter(self._collected)))[0])
        while self._pending or self._shared or self._buckets or self._unfilled():
            for key in list(self._buckets):
                # Launching one may complete a gradient that fills, and reduces, another; some still wait for members.
                if key in self._buckets and not self._coming[key]:
                    self._reduce(key)
            while self._pending:
                self._advance()
                self._finish(self._pending[0])
            if self._buckets:  # what was expected comes first
                continue
            for bucket in self._unfilled():  # some of its members got no gradient in this step: reduce what is there
                for place in sorted(bucket.filled):
                    self._join_loose(bucket.slots[place], bucket.views[place].clone())
                bucket.filled.clear()
            shared, self._shared = self._shared, {}
            for slot, gradient in shared.values():
                if slot.axes:
                    self._join_loose(slot, gradient)
                else:
                    slot.deposit(gradient)
        self._begun.clear()
        if self._prepared is None and self._order:
            self._prepare()

    def _unfilled(self) -> list[_Prepared]:
        buckets = dict.fromkeys((self._prepared or {}).values())
        return [bucket for bucket in buckets if 0 < len(bucket.filled) < len(bucket.slots)]
