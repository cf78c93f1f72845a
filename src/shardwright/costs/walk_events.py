"""Events of one rank and the recorder that writes them down in the order in which the host issues them.

The recorder keeps what CUDA's streams guarantee: an event that communicates starts no earlier than the computation issued
before it has ended, and once the program waits for a communication, whatever it issues afterwards waits too. Both are
written as dependencies, so that the list alone says what may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwright.costs import collectives
from shardwright.costs.compute import op_times
from shardwright.costs.host import dispatch_seconds, modules_entered, several_seconds
from shardwright.costs.redistribute import COMMUNICATION, Step
from shardwright.costs.walk_nodes import Compute, Nodes
from shardwright.graph.core import DTYPE_BYTES

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """Something one rank does.

    ``kind`` is ``operator``, ``change`` (one step of a change of layout), ``exchange`` (statistics between pieces),
    ``accumulate`` (adding gradients of several readers), ``pack`` (into a bucket, into or out of a bundle), ``reduce``
    (a bucket between replicas) or ``update``; ``phase`` is ``forward``, ``backward``, ``recompute`` or ``update``.
    ``seconds`` are the device's, ``host`` the host's to issue it. ``bytes`` are those communicated. ``after`` are the events
    it must wait for. ``node`` numbers the forward node it belongs to. ``travellers`` are the parameters or gradients that a
    collective carries for a bundle (one where it is alone).
    """

    kind: str
    phase: str
    name: str
    stream: str
    seconds: float
    host: float = 0.0
    bytes: int = 0
    collective: str = ""
    after: tuple[int, ...] = ()
    module: str = ""
    node: int = -1
    travellers: int = 0


class Recorder:
    """The events so far, the last computation issued, and the communications the program waits for from now on."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.mesh, self.device = nodes, nodes.mesh, nodes.mesh.device
        self.events: list[Event] = []
        self._computing: tuple[int, ...] = ()
        self._awaited: list[int] = []
        self._prices: dict[object, tuple[float, float]] = {}
        # A processor computes what it issues, so issuing has no time of its own there.
        self.overhead = self.device.launch_overhead if self.device.kind == "cuda" else 0.0
        self._entered = modules_entered(nodes.graph.ops)
        profile = self.device.profile
        self._call_seconds = 0.0 if profile is None else profile.dispatch_of.get("module", (0.0, 0.0))[0]

    def wait(self, event: int) -> None:
        """Whatever is issued from now on starts after this event."""
        self._awaited.append(event)

    def compute(
        self,
        kind: str,
        phase: str,
        name: str,
        seconds: float,
        after: Iterable[int] = (),
        *,
        host: float | None = None,
        module: str = "",
        node: int = -1,
    ) -> int:
        """Issue work on the compute stream."""
        waits = tuple(dict.fromkeys((*after, *self._awaited)))
        self._awaited = []
        issue = self.overhead if host is None else host if self.overhead else 0.0
        self.events.append(Event(kind, phase, name, COMPUTE, seconds, issue, after=waits, module=module, node=node))
        self._computing = (len(self.events) - 1,)
        return self._computing[0]

    def communicate(
        self,
        kind: str,
        phase: str,
        name: str,
        collective: str,
        axis: int,
        size: int,
        seconds: float,
        after: Iterable[int] = (),
        *,
        module: str = "",
        node: int = -1,
        aside: bool = False,
        travellers: int = 0,
    ) -> int:
        """Issue a collective on the stream of its mesh axis; ``aside``: it waits for what is named and nothing else."""
        waits = tuple(dict.fromkeys((*after, *(() if aside else (*self._computing, *self._awaited)))))
        stream = self.mesh.axes[axis].name
        issue = self.overhead
        event = Event(kind, phase, name, stream, seconds, issue, size, collective, waits, module, node, travellers)
        self.events.append(event)
        return len(self.events) - 1

    def copy_seconds(self, size: int, passes: int) -> float:
        """Seconds of an elementwise kernel that reads and writes ``size`` bytes ``passes`` times in all."""
        return max(passes * size / self.device.bandwidth, self.overhead or self.device.launch_overhead)

    def step(
        self,
        step: Step,
        phase: str,
        name: str,
        after: Iterable[int] = (),
        *,
        module: str = "",
        node: int = -1,
        travellers: int = 0,
    ) -> int:
        """Issue one step of a change of layout, without waiting for it."""
        if step.kind in COMMUNICATION:
            return self.communicate(
                "change",
                phase,
                name,
                step.kind,
                step.axis,
                step.wire_bytes,
                step.seconds,
                after,
                module=module,
                node=node,
                travellers=travellers,
            )
        return self.compute("change", phase, name, step.seconds, after, module=module, node=node)

    def steps(
        self,
        steps: Sequence[Step],
        phase: str,
        name: str,
        after: tuple[int, ...] = (),
        *,
        module: str = "",
        node: int = -1,
    ) -> tuple[int, ...]:
        """Issue steps one after the other, waiting for each."""
        made: list[int] = []
        for step in steps:
            made.append(self.step(step, phase, name, made[-1:] or after, module=module, node=node))
            if step.kind in COMMUNICATION:
                self.wait(made[-1])
        return tuple(made)

    def operator(self, number: int, node: Compute, phase: str, after: Iterable[int]) -> tuple[int, ...]:
        """Issue an operator, or its backward, and the statistics its pieces exchange."""
        which = 1 if phase == "backward" else 0
        seconds = self._price(node)[which]
        if node.kernel is None:
            host = dispatch_seconds(node.op, self.nodes.graph.tensors, node.footprint.issued, self.device)[which]
        else:
            host = several_seconds(node.footprint.issued, self.device)[which]
        op = node.op
        if which == 0:
            host += self._entered.get(op.name, 0) * self._call_seconds
        first = self.compute("operator", phase, op.name, seconds, after, host=host, module=op.module, node=number)
        return (first, *self._exchanges(number, node, phase, first))

    def _exchanges(self, number: int, node: Compute, phase: str, first: int) -> tuple[int, ...]:
        made = [first]
        for axis, size, seconds, times in self._statistics(node):
            for _ in range(times if phase == "backward" else 1):
                made.append(
                    self.communicate(
                        "exchange",
                        phase,
                        node.op.name,
                        "all_reduce",
                        axis,
                        size,
                        seconds,
                        made[-1:],
                        module=node.op.module,
                        node=number,
                    )
                )
                self.wait(made[-1])
        return tuple(made[1:])

    def _statistics(self, node: Compute) -> Iterator[tuple[int, int, float, int]]:
        """What the pieces of an operator exchange: mesh axis, bytes, seconds, and how often in the backward pass."""
        for axis, loop in enumerate(node.split):
            for exchange in () if loop is None else node.rules.by_name[loop].exchanges:
                points = exchange.points * math.prod(self._local_extent(node, name) for name in exchange.loops)
                size = points * DTYPE_BYTES[exchange.dtype]
                yield axis, size, float(collectives.all_reduce(size, self.mesh.axes[axis])), exchange.backward

    def _local_extent(self, node: Compute, name: str) -> int:
        extent = node.rules.by_name[name].extent
        for size, loop in zip(self.mesh.sizes, node.split, strict=True):
            extent = -(-extent // size) if loop == name else extent
        return extent

    def _price(self, node: Compute) -> tuple[float, float]:
        """Forward and backward seconds on the device; equal operators are priced once."""
        shapes = tuple(self.nodes.values[i].local for i in node.inputs)
        copies = ""
        if node.rules.kind == "view" and any(r is not None and r.owner >= 0 for r in node.footprint.results):
            copies = "copy_rows" if shapes[0].strides[-1:] == (1,) else "copy"
        key = (node.call, shapes, node.split, copies, node.op.grad)
        if key not in self._prices:
            times = op_times(
                node.op,
                node.rules,
                self.nodes.graph.tensors,
                [node.split],
                self.mesh,
                self.nodes.training,
                copies=copies,
            )
            exchanged = list(self._statistics(node))  # these are events of their own
            forward = float(times[0, 0]) - sum(seconds for _, _, seconds, _ in exchanged)
            backward = float(times[0, 1]) - sum(seconds * often for _, _, seconds, often in exchanged)
            self._prices[key] = (max(forward, 0.0), max(backward, 0.0))
        return self._prices[key]
