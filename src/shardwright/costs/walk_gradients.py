"""How gradients of parameters get home, event by event, as the runtime does it (:mod:`shardwright.runtime.gradients`).

A gradient of a gathered parameter is reduce-scattered without waiting, together with those of its bundle
(:mod:`~shardwright.costs.bundles`) when all of them are there, or stays whole until the end (ZeRO-1). A gradient
that has to be summed between replicas is copied into a bucket that exists since the first step; the sum of a full bucket
is started without waiting, and where it takes several legs (:mod:`~shardwright.costs.replica_sums`), each new bucket moves
those before it one leg on. Gradients that several reads of a parameter bring are added up first and packed at the end. When
more than a few bytes are under way the oldest is awaited, and when the backward pass is through, all are (the ideas of DDP,
Li et al. 2020, and FSDP, Zhao et al. 2023).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.costs.bundles import together
from shardwright.costs.redistribute import Step
from shardwright.costs.replica_sums import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    IN_FLIGHT_BYTES,
    Leg,
    replica_axes,
    replica_sum,
)
from shardwright.costs.walk_events import Recorder
from shardwright.costs.walk_reading import Flat
from shardwright.graph.core import DTYPE_BYTES

Key = tuple[tuple[int, ...], str]
"""What the gradients of one bucket have in common: the mesh axes along which they are summed, and their dtype."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together, and the events that copy them into one flat tensor.

    ``bytes`` are that tensor's, padding included. ``prepared``: it lives on from step to step.
    """

    tensors: tuple[str, ...]
    packed: tuple[int, ...]
    bytes: int
    prepared: bool


@dataclass
class _Open:
    tensors: list[str] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Sum:
    """The sum of a bucket under way: the legs still to be issued, and the event of the last one that was."""

    label: str
    itemsize: int
    legs: deque[Leg]
    last: int = -1

    def advance(self, recorder: Recorder, after: tuple[int, ...] = ()) -> None:
        """Issue the next leg. Where the host waits for communication itself, it waits for the leg before."""
        if not self.legs:
            return
        leg, aside = self.legs.popleft(), self.last >= 0 and recorder.device.kind == "cuda"
        if self.last >= 0 and not aside:
            recorder.wait(self.last)
        self.last = recorder.communicate(
            "reduce",
            "backward",
            self.label,
            leg.kind,
            leg.axis,
            leg.elements * self.itemsize,
            leg.seconds,
            after or (self.last,),
            aside=aside,
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
    steps: tuple[Step, ...]
    after: tuple[int, ...]
    alone: bool
    module: str


class GradientFlow:
    """The gradients under way in one backward pass."""

    def __init__(self, recorder: Recorder, scatters: Iterable[tuple[int, ...]] = ()) -> None:
        """``scatters``: bundles of nodes whose gradients are scattered together."""
        self.recorder = recorder
        self.bundle_of = {node: bundle for bundle in scatters for node in bundle}
        self.packed: dict[int, int] = {}
        self.flats: list[Flat] = []
        self.buckets: list[Bucket] = []
        self.events_of: dict[int, list[int]] = {}
        self.awaited: dict[int, int] = {}
        self.done: list[int] = []
        self._open: dict[Key, _Open] = {}
        self._flight: deque[_Flight] = deque()
        self._flight_bytes = 0
        self._shared: dict[str, list[int]] = {}
        self._reduced: set[Key] = set()
        self._coming: Counter[Key] = Counter()
        self._whole: deque[Callable[[], None]] = deque()
        self._collected: dict[tuple[int, ...], list[_Share]] = {}

    def add(
        self, tensor: str, node: int, steps: tuple[Step, ...], after: tuple[int, ...], alone: bool, module: str
    ) -> None:
        """A gradient in the layout in which the parameter was used; ``steps`` lead to the dual of its resting layout."""
        self.events_of.setdefault(node, [])
        if tensor in self.recorder.nodes.strategy.whole_gradients and any(s.kind == "reduce_scatter" for s in steps):
            self._whole.append(lambda: self._bring_home(tensor, node, steps, after, alone, module))
        else:
            self._bring_home(tensor, node, steps, after, alone, module)

    def _bring_home(
        self, tensor: str, node: int, steps: tuple[Step, ...], after: tuple[int, ...], alone: bool, module: str
    ) -> None:
        made = self.events_of[node]
        for number, step in enumerate(steps):
            if step.kind == "reduce_scatter":
                self._collect(_Share(tensor, node, steps[number:], after, alone, module))
                return
            made.extend(self.recorder.steps((step,), "backward", tensor, after, module=module, node=node))
            after = (made[-1],)
        self._sum(tensor, after, alone)

    def _collect(self, share: _Share) -> None:
        """Scatter a bundle when all of its gradients are there."""
        bundle = self.bundle_of.get(share.node, (share.node,))
        shares = self._collected.setdefault(bundle, [])
        shares.append(share)
        if len(shares) == len(bundle):
            self._scatter(self._collected.pop(bundle))

    def _scatter(self, shares: list[_Share]) -> None:
        recorder, first, name = self.recorder, shares[0], shares[0].tensor
        step = together([share.steps[0] for share in shares], recorder.mesh)
        after, packed = tuple(event for share in shares for event in share.after), -1
        if len(shares) > 1:
            name, seconds = f"{len(shares)} gradients", recorder.copy_seconds(step.bytes_in, 2)
            packed = recorder.compute("pack", "backward", name, seconds, after, module=first.module, node=first.node)
            self.packed.update((share.node, packed) for share in shares)
            after = (packed,)
        event = recorder.step(
            step, "backward", name, after, module=first.module, node=first.node, travellers=len(shares)
        )
        for share in shares:
            self.events_of[share.node].append(event)
            self._coming[self._key(share.tensor)] += 1

        def finish() -> None:
            recorder.wait(event)
            if packed >= 0:
                self.flats.append(Flat(step.bytes_in, packed, len(recorder.events) - 1))
            for share in shares:
                self.awaited[share.node] = len(recorder.events) - 1
                rest = recorder.steps(
                    share.steps[1:], "backward", share.tensor, (event,), module=share.module, node=share.node
                )
                self.events_of[share.node].extend(rest)
                self._coming[self._key(share.tensor)] -= 1
                self._sum(share.tensor, rest[-1:] or (event,), share.alone)

        self._launch(finish, step.bytes_in)

    def _launch(self, finish: Callable[[], None], size: int, summing: _Sum | None = None) -> None:
        if summing is not None:
            self._advance()
        self._flight.append(_Flight(finish, size, summing))
        self._flight_bytes += size
        while size and self._flight_bytes > IN_FLIGHT_BYTES and self._flight_bytes > size:
            self._finish(next(flight for flight in self._flight if flight.bytes))

    def _advance(self) -> None:
        """Every sum under way goes one leg on, the oldest first."""
        for flight in self._flight:
            if flight.sum is not None and flight.sum.legs:
                flight.sum.advance(self.recorder)

    def _finish(self, flight: _Flight) -> None:
        self._flight.remove(flight)
        self._flight_bytes -= flight.bytes
        flight.finish()

    def _sum(self, tensor: str, after: tuple[int, ...], alone: bool) -> None:
        if not self._axes(tensor):
            self.done.extend(after)
        elif alone:
            self._join(tensor, after)
        elif tensor in self._shared:
            seconds = self.recorder.copy_seconds(self._bytes(tensor), 3)
            both = (*self._shared[tensor], *after)
            self._shared[tensor] = [self.recorder.compute("accumulate", "backward", tensor, seconds, both)]
        else:
            self._shared[tensor] = list(after)

    def _key(self, tensor: str) -> Key:
        return self._axes(tensor), self.recorder.nodes.graph.tensors[tensor].dtype

    def _join(self, tensor: str, after: tuple[int, ...]) -> None:
        """Copy a gradient into its bucket. The first bucket of a kind is small, so that communication starts early."""
        key = self._key(tensor)
        bucket = self._open.setdefault(key, _Open())
        seconds = self.recorder.copy_seconds(self._bytes(tensor), 2)
        bucket.packed.append(self.recorder.compute("pack", "backward", tensor, seconds, after))
        bucket.tensors.append(tensor)
        bucket.bytes += self._bytes(tensor)
        if bucket.bytes >= (BUCKET_BYTES if key in self._reduced else FIRST_BUCKET_BYTES):
            self._reduce(key, self._open.pop(key), prepared=True)

    def _reduce(self, key: Key, bucket: _Open, prepared: bool) -> None:
        (axes, dtype), recorder, count = key, self.recorder, len(bucket.tensors)
        itemsize = DTYPE_BYTES[dtype]
        way = replica_sum(bucket.bytes // itemsize, itemsize, axes, recorder.mesh)
        self._reduced.add(key)
        self.buckets.append(Bucket(tuple(bucket.tensors), tuple(bucket.packed), way.elements * itemsize, prepared))
        summing = _Sum(f"{count} gradients" if count > 1 else bucket.tensors[0], itemsize, deque(way.legs))
        summing.advance(recorder, tuple(bucket.packed))

        def finish() -> None:
            while summing.legs:
                summing.advance(recorder)
            recorder.wait(summing.last)
            self.done.append(summing.last)

        self._launch(finish, 0, summing)  # the sums stay where they are: waiting for them would free nothing

    def finish(self) -> None:
        """Complete everything, in the order of the runtime: first what stayed whole until now."""
        while self._whole:
            self._whole.popleft()()
        while self._collected:  # some of them got no gradient
            self._scatter(self._collected.pop(next(iter(self._collected))))
        while self._flight or self._shared or self._open:
            for key in list(self._open):
                # Launching one may complete a gradient that fills, and reduces, another; some still wait for members.
                if key in self._open and not self._coming[key]:
                    self._reduce(key, self._open.pop(key), prepared=True)
            while self._flight:
                self._advance()
                self._finish(self._flight[0])
            if not self._open:
                self._pack_shared()

    def _pack_shared(self) -> None:
        """Gradients that several reads of a parameter brought: packed into new tensors at the end."""
        shared, self._shared = self._shared, {}
        loose: dict[Key, _Open] = {}
        for tensor, events in shared.items():
            key = self._key(tensor)
            bucket = loose.setdefault(key, _Open())
            bucket.tensors.append(tensor)
            bucket.packed.extend(events)
            bucket.bytes += self._bytes(tensor)
            if bucket.bytes >= BUCKET_BYTES:
                self._pack(key, loose.pop(key))
        for key, bucket in loose.items():
            self._pack(key, bucket)

    def _pack(self, key: Key, bucket: _Open) -> None:
        """One copy of all members, after what made them."""
        seconds = self.recorder.copy_seconds(bucket.bytes, 2)
        name = f"{len(bucket.tensors)} gradients"
        packed = self.recorder.compute("pack", "backward", name, seconds, bucket.packed)
        bucket.packed = [packed] * len(bucket.tensors)
        self._reduce(key, bucket, prepared=False)

    def _axes(self, tensor: str) -> tuple[int, ...]:
        """The mesh axes along which replicas of a parameter are summed."""
        return replica_axes(self.recorder.nodes.strategy.resting[tensor], self.recorder.mesh.sizes)

    def _bytes(self, tensor: str) -> int:
        nodes = self.recorder.nodes
        return nodes.values[nodes.rest[tensor]].local.bytes
