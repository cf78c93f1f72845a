"""One training step of one rank as a list of events: what runs, on which stream, for how long, after what.

Forward operators and the changes of layout between them come in the order of the program; backward events mirror them
(the backward of an operator is one event, that of a change its dual steps); gradients of parameters that rest replicated
are reduced in buckets as they become complete; the optimiser ends the step. An event that communicates occupies the stream
of its mesh axis, everything else the compute stream. List order is the order in which the host issues the events. Which
of them may overlap is left to :mod:`shardwright.simulator`; the plain sum is what the search minimises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.costs.compute import dispatch_seconds, kernel_seconds, localise
from shardwright.costs.kernels import kernels
from shardwright.costs.optimizer import step_seconds
from shardwright.costs.redistribute import COMMUNICATION, Step
from shardwright.costs.walk_nodes import Change, Compute, Nodes, forward_nodes
from shardwright.graph import Graph
from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.rules import Shard
from shardwright.operators.strategy import Strategy

COMPUTE = "compute"
BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced together in buckets of this size, as ``DistributedDataParallel`` does."""


@dataclass(frozen=True)
class Event:
    """Something one rank does.

    ``kind`` is ``operator``, ``change`` (one step of a change of layout), ``exchange`` (statistics between pieces),
    ``accumulate`` (adding gradients of several readers), ``reduce`` (a bucket of gradients) or ``update``; ``phase`` is
    ``forward``, ``backward`` or ``update``. ``seconds`` are the device's, ``host`` the host's to issue it. ``bytes`` are
    those communicated. ``after`` are the events it must wait for. ``node`` numbers the forward node it belongs to.
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


@dataclass(frozen=True)
class Walk:
    """The events of one step, and for every forward node the events of its forward and backward part.

    ``buckets`` hold, per gradient reduction, the parameters reduced together and the events that do it.
    """

    nodes: Nodes
    events: tuple[Event, ...]
    forward_of: Mapping[int, tuple[int, ...]]
    backward_of: Mapping[int, tuple[int, ...]]
    regather_of: Mapping[int, tuple[int, ...]]
    buckets: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    optimiser: str

    @cached_property
    def seconds(self) -> float:
        """The plain sum of all events."""
        return sum(event.seconds for event in self.events)

    @cached_property
    def communication(self) -> dict[str, tuple[int, int]]:
        """Per kind of collective, how often it is called and the bytes it is about, in one step of one rank."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for event in self.events:
            if event.collective:
                count[event.collective] += 1
                size[event.collective] += event.bytes
        return {kind: (count[kind], size[kind]) for kind in sorted(count)}


def walk(graph: Graph, strategy: Strategy, mesh: Mesh, training: bool = True, optimiser: str = "adamw") -> Walk:
    """The events of one step of ``graph`` split by ``strategy`` over ``mesh``.

    Example
    -------
    >>> events = walk(graph, strategy, mesh).events
    >>> sum(event.seconds for event in events if event.phase == "forward")
    """
    return _Walker(forward_nodes(graph, strategy, mesh, training), optimiser).walk()


class _Walker:
    def __init__(self, nodes: Nodes, optimiser: str) -> None:
        self.nodes, self.mesh, self.optimiser = nodes, nodes.mesh, optimiser
        self.events: list[Event] = []
        self.made: dict[int, tuple[int, ...]] = {}
        """Value → the events after which it is there (and, in the backward pass, its gradient)."""
        self.forward_of: dict[int, tuple[int, ...]] = {}
        self.backward_of: dict[int, tuple[int, ...]] = {}
        self.regather_of: dict[int, tuple[int, ...]] = {}
        self.gradient: dict[int, list[int]] = {}
        self.buckets: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        self.prices: dict[object, tuple[float, float]] = {}
        self.overhead = self.mesh.device.launch_overhead if self.mesh.device.kind == "cuda" else 0.0

    def walk(self) -> Walk:
        for number, node in enumerate(self.nodes.nodes):
            if isinstance(node, Compute):
                self._forward_operator(number, node)
            else:
                self._forward_change(number, node)
        if self.nodes.training and self.nodes.roots:
            self._backward()
        return Walk(
            self.nodes,
            tuple(self.events),
            self.forward_of,
            self.backward_of,
            self.regather_of,
            tuple(self.buckets),
            self.optimiser,
        )

    def _emit(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def _forward_operator(self, number: int, node: Compute) -> None:
        after = _unique(e for value in node.inputs for e in self.made.get(value, ()))
        seconds, _ = self._price(node)
        host = dispatch_seconds(node.op, self.mesh.device)[0] if self.overhead else 0.0
        op = node.op
        first = self._emit(
            Event("operator", "forward", op.name, COMPUTE, seconds, host, after=after, module=op.module, node=number)
        )
        events = (first, *self._exchanges(number, node, first, "forward"))
        self.forward_of[number] = events
        for output in node.outputs:
            if output is not None:
                self.made[output] = events[-1:]

    def _exchanges(self, number: int, node: Compute, after: int, phase: str) -> tuple[int, ...]:
        """Statistics that the pieces of an operator reduce between them, one collective per cut axis and statistic."""
        made: list[int] = []
        for axis, loop in enumerate(node.split):
            if loop is None:
                continue
            for exchange in node.rules.by_name[loop].exchanges:
                points = math.prod(self._local_extent(node, name) for name in exchange.loops)
                size = points * DTYPE_BYTES[exchange.dtype]
                for _ in range(1 if phase == "forward" else exchange.backward):
                    seconds = float(collectives.all_reduce(size, self.mesh.axes[axis]))
                    event = Event(
                        "exchange",
                        phase,
                        node.op.name,
                        self.mesh.axes[axis].name,
                        seconds,
                        self.overhead,
                        size,
                        "all_reduce",
                        (made[-1] if made else after,),
                        node.op.module,
                        number,
                    )
                    made.append(self._emit(event))
        return tuple(made)

    def _local_extent(self, node: Compute, name: str) -> int:
        extent = node.rules.by_name[name].extent
        for size, loop in zip(self.mesh.sizes, node.split, strict=True):
            extent = -(-extent // size) if loop == name else extent
        return extent

    def _forward_change(self, number: int, node: Change) -> None:
        start = self.made.get(node.source, ())
        self.forward_of[number] = self._steps(number, node, node.steps.forward, start, "forward")
        self.made[node.result] = self.forward_of[number][-1:] or start

    def _steps(
        self, number: int, node: Change, steps: tuple[Step, ...], after: tuple[int, ...], phase: str
    ) -> tuple[int, ...]:
        made = []
        for step in steps:
            talks = step.kind in COMMUNICATION
            stream = self.mesh.axes[step.axis].name if talks else COMPUTE
            event = Event(
                "change",
                phase,
                self.nodes.values[node.result].tensor,
                stream,
                step.seconds,
                self.overhead,
                step.wire_bytes,
                step.kind if talks else "",
                after,
                node.module,
                number,
            )
            made.append(self._emit(event))
            after = (made[-1],)
        return tuple(made)

    def _backward(self) -> None:
        waiting = self._readers()
        for root in self.nodes.roots:
            self.gradient[root] = list(self.made.get(root, ()))
        pending = _Buckets(self)
        for value in self.nodes.rest.values():
            if value in self.nodes.roots:  # a parameter handed out as it is
                pending.complete(value)
        for number in reversed(range(len(self.nodes.nodes))):
            node = self.nodes.nodes[number]
            arrived = [e for value in _results(node) for e in self.gradient.get(value, ())]
            if any(value in self.gradient for value in _results(node)):
                self._backward_node(number, node, _unique(arrived))
            for value in dict.fromkeys(_sources(node)):
                waiting[value] -= 1
                if waiting[value] == 0 and value in self.gradient:
                    pending.complete(value)
        pending.finish()

    def _backward_node(self, number: int, node: Compute | Change, after: tuple[int, ...]) -> None:
        if isinstance(node, Change):
            events = self._steps(number, node, node.steps.backward, after, "backward")
            self._deposit(node.source, events[-1:] or after)
        else:
            if not node.op.grad or not any(self.nodes.values[i].local.grad for i in node.inputs):
                return
            after = _unique((*after, *self._regathered(node)))
            seconds = self._price(node)[1]
            host = dispatch_seconds(node.op, self.mesh.device)[1] if self.overhead else 0.0
            op = node.op
            first = self._emit(
                Event(
                    "operator", "backward", op.name, COMPUTE, seconds, host, after=after, module=op.module, node=number
                )
            )
            events = (first, *self._exchanges(number, node, first, "backward"))
            for value in dict.fromkeys(node.inputs):
                if self.nodes.values[value].local.grad:
                    self._deposit(value, events[-1:])
        self.backward_of[number] = events

    def _regathered(self, node: Compute) -> tuple[int, ...]:
        """Gather again the parameters that were freed after their forward use, where the backward pass reads them."""
        saved = {node.inputs[i] for i in node.footprint.saved_inputs}
        found: list[int] = []
        for number in self._gathers:
            change = self.nodes.nodes[number]
            assert isinstance(change, Change)
            if change.result in saved:
                if number not in self.regather_of:
                    self.regather_of[number] = self._steps(number, change, change.steps.forward, (), "backward")
                found.extend(self.regather_of[number][-1:])
        return tuple(found)

    @cached_property
    def _gathers(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.nodes.nodes) if isinstance(n, Change) and n.again)

    def _deposit(self, value: int, events: tuple[int, ...]) -> None:
        """A reader's gradient arrives; a second one is added to the first."""
        if value not in self.gradient:
            self.gradient[value] = list(events)
            return
        local, device = self.nodes.values[value].local, self.mesh.device
        seconds = max(3 * local.bytes / device.bandwidth, device.launch_overhead)
        tensor = self.nodes.values[value].tensor
        after = _unique((*self.gradient[value], *events))
        event = Event("accumulate", "backward", tensor, COMPUTE, seconds, self.overhead, after=after)
        self.gradient[value] = [self._emit(event)]

    def _readers(self) -> Counter[int]:
        count: Counter[int] = Counter()
        for node in self.nodes.nodes:
            count.update(set(_sources(node)))
        return count

    def _price(self, node: Compute) -> tuple[float, float]:
        """Forward and backward seconds on the device; equal operators are priced once."""
        copies = node.rules.kind == "view" and any(r is not None and r.owner >= 0 for r in node.footprint.results)
        shapes = tuple(self.nodes.values[i].local for i in node.inputs)
        key = (node.call, shapes, node.split, copies, node.op.grad)
        if key not in self.prices:
            local = localise(node.op, node.rules, self.nodes.graph.tensors, [node.split], self.mesh.sizes)
            forward, backward = kernels(local, copies)
            device = self.mesh.device
            self.prices[key] = (
                float(sum(np.sum(kernel_seconds(work, device)) for work in forward)),
                float(sum(np.sum(kernel_seconds(work, device)) for work in backward)),
            )
        return self.prices[key]


class _Buckets:
    """Complete gradients wait here until there are enough of them to reduce together."""

    def __init__(self, walker: _Walker) -> None:
        self.walker = walker
        self.open: dict[tuple[tuple[int, ...], str], list[int]] = {}
        self.last: list[int] = []

    def complete(self, value: int) -> None:
        nodes = self.walker.nodes
        held = nodes.values[value]
        parameter = nodes.graph.parameter_of.get(held.tensor)
        if parameter is None or not parameter.trainable or nodes.rest[held.tensor] != value:
            return
        self.last.extend(self.walker.gradient[value])
        axes = tuple(i for i, p in enumerate(held.needs) if not isinstance(p, Shard) and nodes.mesh.sizes[i] > 1)
        if not axes:
            return
        waiting = self.open.setdefault((axes, held.local.dtype), [])
        waiting.append(value)
        if sum(nodes.values[v].local.bytes for v in waiting) >= BUCKET_BYTES:
            self.reduce(axes, held.local.dtype)

    def reduce(self, axes: tuple[int, ...], dtype: str) -> None:
        walker, values = self.walker, self.open.pop((axes, dtype))
        size = sum(walker.nodes.values[v].local.bytes for v in values)
        after = _unique(e for v in values for e in walker.gradient[v])
        names = tuple(walker.nodes.values[v].tensor for v in values)
        events = []
        for axis in axes:
            line = walker.mesh.axes[axis]
            seconds = float(collectives.all_reduce(size, line))
            label = f"{len(names)} gradients" if len(names) > 1 else names[0]
            event = Event("reduce", "backward", label, line.name, seconds, walker.overhead, size, "all_reduce", after)
            events.append(walker._emit(event))
            after = (events[-1],)
        self.last.append(events[-1])
        walker.buckets.append((names, tuple(events)))

    def finish(self) -> None:
        """Reduce what is left, then update the parameters."""
        for axes, dtype in list(self.open):
            self.reduce(axes, dtype)
        walker = self.walker
        nodes = walker.nodes
        sizes = [
            nodes.values[nodes.rest[p.tensor]].local.bytes
            for p in nodes.graph.parameters
            if p.trainable and nodes.rest[p.tensor] in walker.gradient
        ]
        seconds, host = step_seconds(walker.optimiser, sizes, walker.mesh.device)
        host = host if walker.overhead else 0.0
        after = _unique(self.last)
        walker._emit(Event("update", "update", walker.optimiser, COMPUTE, seconds, host, after=after))


def _sources(node: Compute | Change) -> tuple[int, ...]:
    return (node.source,) if isinstance(node, Change) else node.inputs


def _results(node: Compute | Change) -> tuple[int, ...]:
    return (node.result,) if isinstance(node, Change) else tuple(o for o in node.outputs if o is not None)


def _unique(events: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(events))
