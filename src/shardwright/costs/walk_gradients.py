"""How gradients of parameters get home, event by event, as the runtime does it (:mod:`shardwright.runtime.gradients`).

A gradient of a gathered parameter is reduce-scattered without waiting. A gradient that has to be summed between replicas is
copied into a bucket that exists since the first step; a full bucket is reduced without waiting. Gradients that several
reads of a parameter bring are added up first and packed at the end. When more than a few bytes are under way the oldest
is awaited, and when the backward pass is through, all are (the ideas of DDP, Li et al. 2020, and FSDP, Zhao et al. 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwright.costs import collectives
from shardwright.costs.redistribute import Step
from shardwright.costs.walk_events import Recorder
from shardwright.operators.rules import Shard

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
IN_FLIGHT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together, and the events that copy them into one flat tensor.

    ``prepared``: that tensor lives on from step to step.
    """

    tensors: tuple[str, ...]
    packed: tuple[int, ...]
    prepared: bool


@dataclass
class _Open:
    tensors: list[str] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    bytes: int = 0


class GradientFlow:
    """The gradients under way in one backward pass."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.buckets: list[Bucket] = []
        self.events_of: dict[int, list[int]] = {}
        self.awaited: dict[int, int] = {}
        self.done: list[int] = []
        self._open: dict[tuple[tuple[int, ...], str], _Open] = {}
        self._flight: deque[tuple[Callable[[], None], int]] = deque()
        self._flight_bytes = 0
        self._shared: dict[str, list[int]] = {}
        self._reduced: set[tuple[tuple[int, ...], str]] = set()

    def add(
        self, tensor: str, node: int, steps: tuple[Step, ...], after: tuple[int, ...], alone: bool, module: str
    ) -> None:
        """A gradient in the layout in which the parameter was used; ``steps`` lead to the dual of its resting layout."""
        made = self.events_of.setdefault(node, [])
        for number, step in enumerate(steps):
            if step.kind == "reduce_scatter":
                self._scatter(tensor, node, steps[number:], after, alone, module)
                return
            made.extend(self.recorder.steps((step,), "backward", tensor, after, module=module, node=node))
            after = (made[-1],)
        self._sum(tensor, after, alone)

    def _scatter(
        self, tensor: str, node: int, steps: tuple[Step, ...], after: tuple[int, ...], alone: bool, module: str
    ) -> None:
        recorder, made = self.recorder, self.events_of[node]
        event = recorder.step(steps[0], "backward", tensor, after, module=module, node=node)
        made.append(event)

        def finish() -> None:
            recorder.wait(event)
            self.awaited[node] = len(recorder.events) - 1
            rest = recorder.steps(steps[1:], "backward", tensor, (event,), module=module, node=node)
            made.extend(rest)
            self._sum(tensor, rest[-1:] or (event,), alone)

        self._launch(finish, steps[0].bytes_in)

    def _launch(self, finish: Callable[[], None], size: int) -> None:
        self._flight.append((finish, size))
        self._flight_bytes += size
        while self._flight_bytes > IN_FLIGHT_BYTES and len(self._flight) > 1:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        finish, size = self._flight.popleft()
        self._flight_bytes -= size
        finish()

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

    def _key(self, tensor: str) -> tuple[tuple[int, ...], str]:
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

    def _reduce(self, key: tuple[tuple[int, ...], str], bucket: _Open, prepared: bool) -> None:
        axes, recorder, count = key[0], self.recorder, len(bucket.tensors)
        self._reduced.add(key)
        self.buckets.append(Bucket(tuple(bucket.tensors), tuple(bucket.packed), prepared))
        label = f"{count} gradients" if count > 1 else bucket.tensors[0]

        def reduce(axis: int, after: tuple[int, ...]) -> int:
            seconds = float(collectives.all_reduce(bucket.bytes, recorder.mesh.axes[axis]))
            return recorder.communicate(
                "reduce", "backward", label, "all_reduce", axis, bucket.bytes, seconds, after, calls=count
            )

        event = reduce(axes[0], tuple(bucket.packed))

        def finish() -> None:
            last = event
            recorder.wait(last)
            for axis in axes[1:]:
                last = reduce(axis, (last,))
                recorder.wait(last)
            self.done.append(last)

        self._launch(finish, bucket.bytes)

    def finish(self) -> None:
        """Complete everything, in the order of the runtime."""
        while self._flight or self._shared or self._open:
            for key in list(self._open):  # their last member has come
                if key in self._open:  # launching one may complete a gradient that fills, and reduces, another
                    self._reduce(key, self._open.pop(key), prepared=True)
            while self._flight:
                self._finish_oldest()
            self._pack_shared()

    def _pack_shared(self) -> None:
        """Gradients that several reads of a parameter brought: packed into a new tensor at the end."""
        shared, self._shared = self._shared, {}
        loose: dict[tuple[tuple[int, ...], str], _Open] = {}
        after: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for tensor, events in shared.items():
            key = self._key(tensor)
            bucket = loose.setdefault(key, _Open())
            bucket.tensors.append(tensor)
            bucket.bytes += self._bytes(tensor)
            after.setdefault(key, []).extend(events)
        for key, bucket in loose.items():
            seconds = self.recorder.copy_seconds(bucket.bytes, 2)
            name = f"{len(bucket.tensors)} gradients"
            packed = self.recorder.compute("pack", "backward", name, seconds, after[key])
            bucket.packed = [packed] * len(bucket.tensors)
            self._reduce(key, bucket, prepared=False)

    def _axes(self, tensor: str) -> tuple[int, ...]:
        """The mesh axes along which replicas of a parameter are summed."""
        recorder = self.recorder
        resting = recorder.nodes.strategy.resting[tensor]
        return tuple(i for i, p in enumerate(resting) if not isinstance(p, Shard) and recorder.mesh.sizes[i] > 1)

    def _bytes(self, tensor: str) -> int:
        nodes = self.recorder.nodes
        return nodes.values[nodes.rest[tensor]].local.bytes
