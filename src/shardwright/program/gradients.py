"""How gradients of parameters get home: scattered in bundles, summed between replicas in buckets, all without waiting.

A gradient of a gathered parameter is reduce-scattered together with those of its bundle
(:mod:`~shardwright.program.bundles`) when all of them are there, or stays whole until the end (ZeRO-1). A gradient that has
to be summed between replicas is copied into a bucket that exists since the first step; the sum of a full bucket is started
at once, and where it takes several legs (:mod:`~shardwright.program.sums`), each new bucket moves those before it one leg
on. Gradients that several reads of a parameter bring are added up first and packed at the end. When more than a few bytes
are under way the oldest is awaited, and when the backward pass is through, all are; what goes on along a further axis then
is awaited when the next one is launched (the ideas of DDP, Li et al. 2020, and FSDP, Zhao et al. 2023).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.rules import largest_shard
from shardwright.program.bundles import together
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Bucket, Kind, Phase, Traveller
from shardwright.program.steps import BoundStep, Step
from shardwright.program.sums import Leg, nested, replica_axes
from shardwright.program.writer import ProgramWriter

Key = tuple[tuple[int, ...], str]
"""What the gradients of one bucket have in common: the mesh axes along which they are summed, and their dtype."""
BACKWARD = Phase.BACKWARD


@dataclass
class _Open:
    tensors: list[str] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    bytes: int = 0
    flat: int = -1


@dataclass
class _Sum:
    """The sum of a bucket under way: the legs still to be written, and the instruction of the last one that was."""

    label: str
    bucket: int
    itemsize: int
    flat: int
    legs: deque[Leg]
    last: int = -1

    def advance(self, writer: ProgramWriter, after: tuple[int, ...] = ()) -> None:
        """Write the next leg. Where the host waits for communication itself, it waits for the leg before."""
        if not self.legs:
            return
        leg, aside = self.legs.popleft(), self.last >= 0 and writer.flow.device == "cuda"
        if self.last >= 0 and not aside:
            writer.wait(self.last, BACKWARD)
        self.last = writer.communicate(
            Kind.REDUCE,
            BACKWARD,
            self.label,
            leg.kind,
            leg.axis,
            leg.elements * self.itemsize,
            (self.flat,),
            after=after or (self.last,),
            aside=aside,
            leg=leg,
            bucket=self.bucket,
        )


@dataclass(eq=False)
class _Flight:
    """Something under way: ``finish`` waits for it and passes the result on, which frees ``bytes``."""

    finish: Callable[[], None]
    bytes: int
    sum: _Sum | None = None


class _Share(NamedTuple):
    """A gradient to be scattered by the first of the ``steps``."""

    tensor: str
    node: int
    steps: tuple[tuple[Step, BoundStep], ...]
    slot: int
    alone: bool
    module: str


class GradientFlow:
    """The gradients under way in one backward pass."""

    def __init__(self, writer: ProgramWriter, decisions: Decisions, scatters: Iterable[tuple[int, ...]] = ()) -> None:
        """``scatters``: bundles of nodes whose gradients are scattered together."""
        self.writer, self.decisions, self.sizes = writer, decisions, decisions.sizes
        self.bundle_of = {node: bundle for bundle in scatters for node in bundle}
        self.buckets: list[Bucket] = []
        self.complete: list[int] = []
        """Complete gradients: what the optimizer reads."""
        self._known: dict[str, tuple[tuple[int, ...], int]] = {}
        self._open: dict[Key, _Open] = {}
        self._flight: deque[_Flight] = deque()
        self._flight_bytes = 0
        self._further: list[_Flight] = []
        self._shared: dict[str, int] = {}
        self._reduced: set[Key] = set()
        self._coming: Counter[Key] = Counter()
        self._whole: deque[_Share] = deque()
        self._collected: dict[tuple[int, ...], list[_Share]] = {}

    def add(
        self,
        tensor: str,
        node: int,
        steps: tuple[tuple[Step, BoundStep], ...],
        slot: int,
        alone: bool,
        module: str,
    ) -> None:
        """A gradient in the layout in which the parameter was used; ``steps`` lead to the dual of its resting layout."""
        share = _Share(tensor, node, steps, slot, alone, module)
        if tensor in self.writer.flow.strategy.whole_gradients and any(s.kind == "reduce_scatter" for s, _ in steps):
            self._whole.append(share)
        else:
            self._reduce_share(share)

    def _reduce_share(self, share: _Share, further: bool = False) -> None:
        """What is left of a gradient's way; ``further``: it was scattered along one axis already, in its bundle."""
        slot = share.slot
        for number, (step, bound) in enumerate(share.steps):
            if step.kind == "reduce_scatter" and not self._dtype(share.tensor).startswith("complex"):
                left = share._replace(steps=share.steps[number:], slot=slot)
                if further:
                    self._scatter([left], further)
                else:
                    self._collect(left)
                return
            slot = self._step(step, bound, share, slot)
        self._sum(share.tensor, slot, share.alone)

    def _step(self, step: Step, bound: BoundStep, share: _Share, slot: int) -> int:
        return self.writer.step(
            step,
            bound,
            BACKWARD,
            slot,
            tensor=share.tensor,
            role="gradient",
            module=share.module,
            node=share.node,
        )

    def _collect(self, share: _Share) -> None:
        """Scatter a bundle when all of its gradients are there."""
        bundle = self.bundle_of.get(share.node, (share.node,))
        shares = self._collected.setdefault(bundle, [])
        shares.append(share)
        if len(shares) == len(bundle):
            self._scatter(self._collected.pop(bundle))

    def _scatter(self, shares: list[_Share], further: bool = False) -> None:
        writer, first, name = self.writer, shares[0], shares[0].tensor
        travellers = tuple(Traveller(share.node, *share.steps[0]) for share in shares)
        step = together([traveller.step for traveller in travellers])
        given = first.slot
        if len(shares) > 1:
            name, given = f"{len(shares)} gradients", writer.slot("", "flat", step.bytes_in)
            writer.compute(
                Kind.PACK,
                BACKWARD,
                name,
                [share.slot for share in shares],
                (given,),
                module=first.module,
                node=first.node,
                steps=travellers,
            )
        flat = writer.slot("", "gradient", step.bytes_out)
        started = writer.communicate(
            Kind.SCATTER,
            BACKWARD,
            name,
            step.kind,
            step.axis,
            step.wire_bytes,
            (given,),
            (flat,),
            module=first.module,
            node=first.node,
            steps=travellers,
            temporary=step.buffer_bytes,
        )
        self._coming.update(self._key(share.tensor) for share in shares)

        def finish() -> None:
            parts = [writer.slot(share.tensor, "gradient", 0, flat) for share in shares]
            writer.wait(started, BACKWARD, (flat, given), parts)
            for share, part in zip(shares, parts, strict=True):
                self._coming[self._key(share.tensor)] -= 1
                self._reduce_share(share._replace(steps=share.steps[1:], slot=part), further=True)

        if further:  # begun in the wait for what lies before it, and awaited when the next one is launched
            self._further.append(_Flight(finish, 0))
        else:
            self._launch(finish, step.bytes_in)

    def _launch(self, finish: Callable[[], None], size: int, summing: _Sum | None = None) -> None:
        if summing is not None:
            self._advance()
        self._finish_further()
        self._flight.append(_Flight(finish, size, summing))
        self._flight_bytes += size
        while size and self._flight_bytes > self.sizes.in_flight and self._flight_bytes > size:
            self._finish(next(flight for flight in self._flight if flight.bytes))

    def _advance(self) -> None:
        """Every sum under way goes one leg on, the oldest first."""
        for flight in self._flight:
            if flight.sum is not None and flight.sum.legs:
                flight.sum.advance(self.writer)

    def _finish_further(self) -> None:
        """Wait for what was scattered along a further axis since the last launch."""
        begun, self._further = self._further, []
        for flight in begun:
            flight.finish()

    def _finish(self, flight: _Flight) -> None:
        self._flight.remove(flight)
        self._flight_bytes -= flight.bytes
        flight.finish()

    def _sum(self, tensor: str, slot: int, alone: bool) -> None:
        if alone:
            self._complete(tensor, slot)
        elif tensor in self._shared:
            both = (self._shared[tensor], slot)
            total = self.writer.slot(tensor, "gradient", self._bytes(tensor))
            self.writer.compute(Kind.ACCUMULATE, BACKWARD, tensor, both, (total,))
            self._shared[tensor] = total
        else:
            self._shared[tensor] = slot

    def _complete(self, tensor: str, slot: int) -> None:
        """All shares of a gradient are there: it is summed between replicas, if there are any."""
        if self._axes(tensor):
            self._join(tensor, slot)
        else:
            self._deposit(tensor, slot)

    def _deposit(self, tensor: str, slot: int, bucket: int = -1) -> None:
        self.writer.compute(Kind.DEPOSIT, BACKWARD, tensor, (slot,), bucket=bucket)
        self.complete.append(slot)

    def _key(self, tensor: str) -> Key:
        return self._axes(tensor), self._dtype(tensor)

    def _dtype(self, tensor: str) -> str:
        return self.writer.flow.graph.tensors[tensor].dtype

    def _join(self, tensor: str, slot: int) -> None:
        """Copy a gradient into its bucket. The first bucket of a kind is small, so that communication starts early."""
        key = self._key(tensor)
        if key not in self._open:
            self._open[key] = _Open(flat=self.writer.slot("", "resting", 0))
        bucket = self._open[key]
        part = self.writer.slot(tensor, "gradient", 0, bucket.flat)
        bucket.packed.append(self.writer.compute(Kind.PACK, BACKWARD, tensor, (slot,), (part,)))
        bucket.tensors.append(tensor)
        bucket.slots.append(part)
        bucket.bytes += self._bytes(tensor)
        if bucket.bytes >= (self.sizes.bucket if key in self._reduced else self.sizes.first_bucket):
            self._reduce(key, self._open.pop(key), prepared=True)

    def _reduce(self, key: Key, bucket: _Open, prepared: bool) -> None:
        (axes, dtype), writer, number = key, self.writer, len(self.buckets)
        itemsize = DTYPE_BYTES[dtype]
        count = bucket.bytes // itemsize
        way = nested(count, axes, self.decisions.nest(count, itemsize, axes), writer.flow.place.sizes)
        self._reduced.add(key)
        sizes = tuple(self._bytes(tensor) // itemsize for tensor in bucket.tensors)
        self.buckets.append(Bucket(tuple(bucket.tensors), sizes, way, dtype, itemsize, prepared))
        for packed in dict.fromkeys(bucket.packed):
            writer.instructions[packed] = writer.instructions[packed]._replace(bucket=number)
        flat = writer.slots[bucket.flat]
        writer.slots[bucket.flat] = flat._replace(bytes=way.elements * itemsize)
        label = f"{len(bucket.tensors)} gradients" if len(bucket.tensors) > 1 else bucket.tensors[0]
        summing = _Sum(label, number, itemsize, bucket.flat, deque(way.legs))
        summing.advance(writer, tuple(dict.fromkeys(bucket.packed)))

        def finish() -> None:
            while summing.legs:
                summing.advance(writer)
            writer.wait(summing.last, BACKWARD, (bucket.flat,))
            for tensor, part in zip(bucket.tensors, bucket.slots, strict=True):
                self._deposit(tensor, part, number)

        self._launch(finish, 0, summing)  # the sums stay where they are: waiting for them would free nothing

    def finish(self) -> None:
        """Complete everything: first what stayed whole until now."""
        while self._whole:
            self._reduce_share(self._whole.popleft())
        while self._collected:  # some of them got no gradient
            self._scatter(self._collected.pop(next(iter(self._collected))))
        while self._flight or self._further or self._shared or self._open:
            for key in list(self._open):
                # Launching one may complete a gradient that fills, and reduces, another; some still wait for members.
                if key in self._open and not self._coming[key]:
                    self._reduce(key, self._open.pop(key), prepared=True)
            while self._flight:
                self._advance()
                self._finish(self._flight[0])
            self._finish_further()
            if not (self._open or self._flight or self._further):
                self._pack_shared()

    def _pack_shared(self) -> None:
        """Gradients that several reads of a parameter brought: packed into new tensors at the end."""
        shared, self._shared = self._shared, {}
        loose: dict[Key, _Open] = {}
        for tensor, slot in shared.items():
            if not self._axes(tensor):
                self._deposit(tensor, slot)
                continue
            key = self._key(tensor)
            bucket = loose.setdefault(key, _Open())
            bucket.tensors.append(tensor)
            bucket.packed.append(slot)
            bucket.bytes += self._bytes(tensor)
            if bucket.bytes >= self.sizes.bucket:
                self._pack(key, loose.pop(key))
        for key, bucket in loose.items():
            self._pack(key, bucket)

    def _pack(self, key: Key, bucket: _Open) -> None:
        """One copy of all members, after what made them."""
        given, writer = bucket.packed, self.writer
        bucket.flat = writer.slot("", "gradient", bucket.bytes)
        bucket.slots = [writer.slot(tensor, "gradient", 0, bucket.flat) for tensor in bucket.tensors]
        name = f"{len(bucket.tensors)} gradients"
        bucket.packed = [writer.compute(Kind.PACK, BACKWARD, name, given, (bucket.flat, *bucket.slots))]
        self._reduce(key, bucket, prepared=False)

    def _axes(self, tensor: str) -> tuple[int, ...]:
        """The mesh axes along which replicas of a parameter are summed."""
        return self._summed(tensor)[0]

    def _bytes(self, tensor: str) -> int:
        """Those of the largest shard: when a bucket is full must not depend on the rank, or collectives would not match."""
        return self._summed(tensor)[1]

    def _summed(self, tensor: str) -> tuple[tuple[int, ...], int]:
        if tensor not in self._known:
            flow, resting = self.writer.flow, self.writer.flow.strategy.resting[tensor]
            meta = flow.graph.tensors[tensor]
            size = largest_shard(meta.shape, resting, flow.place_of(tensor).cuts) * DTYPE_BYTES[meta.dtype]
            self._known[tensor] = (replica_axes(resting, flow.place.sizes), size)
        return self._known[tensor]
