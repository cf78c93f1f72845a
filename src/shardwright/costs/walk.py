"""One training step of one rank as a list of events: what runs, on which stream, for how long, after what.

Forward operators and the changes of layout between them come in the order of the program; parameters are gathered some
bytes ahead of use; backward events mirror the forward ones (the backward of an operator is one event, that of a change its
dual steps); a recomputed block runs forward once more when its backward asks for what was not kept; gradients of
parameters travel home while the backward pass goes on; the optimiser ends the step. List order
is the order in which the host issues the events, and it is the runtime's. Which of them overlap is found out by
:mod:`shardwright.simulator`; the plain sum is what the search minimises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.cluster import Mesh
from shardwright.costs.optimizer import step_seconds
from shardwright.costs.redistribute import Step
from shardwright.costs.walk_blocks import Block, blocks, made, saves
from shardwright.costs.walk_events import COMPUTE, Event, Recorder
from shardwright.costs.walk_gradients import Bucket, GradientFlow
from shardwright.costs.walk_nodes import Change, Compute, Nodes, forward_nodes
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy

__all__ = ["COMPUTE", "Event", "Walk", "walk"]

AHEAD_BYTES = 64 * 2**20
"""Gathers of parameters are started ahead of use until this many bytes are under way."""


@dataclass(frozen=True)
class Walk:
    """The events of one step, and where the storages of its nodes begin and end.

    ``forward_of`` and ``backward_of`` give the events of every forward node. ``gathered`` says for a gather of a
    parameter after which event its result is used, ``again`` the same for the gathers repeated in the backward pass with
    the events that repeat them, ``awaited`` when a gradient's scattering is awaited. ``blocks`` maps the nodes of recomputed
    blocks to these, ``recomputed_of`` those that run again to their events.
    """

    nodes: Nodes
    events: tuple[Event, ...]
    forward_of: Mapping[int, tuple[int, ...]]
    backward_of: Mapping[int, tuple[int, ...]]
    gathered: Mapping[int, int]
    again: Mapping[int, tuple[tuple[int, ...], int]]
    awaited: Mapping[int, int]
    buckets: tuple[Bucket, ...]
    optimiser: str
    blocks: Mapping[int, Block]
    recomputed_of: Mapping[int, tuple[int, ...]]

    @cached_property
    def seconds(self) -> float:
        """The plain sum of all events."""
        return sum(event.seconds for event in self.events)

    @cached_property
    def communication(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Per kind of collective and mesh axis, how many of them one rank performs in a step, and their bytes."""
        count: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for event in self.events:
            if event.collective:
                count[event.collective, event.stream] += 1
                size[event.collective, event.stream] += event.bytes
        return {key: (count[key], size[key]) for key in sorted(count)}


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
        self.nodes, self.optimiser = nodes, optimiser
        self.recorder = Recorder(nodes)
        self.made: dict[int, tuple[int, ...]] = {}
        self.gradient: dict[int, tuple[int, ...]] = {}
        self.forward_of: dict[int, tuple[int, ...]] = {}
        self.backward_of: dict[int, tuple[int, ...]] = {}
        self.blocks = blocks(nodes)
        self.recomputed_of: dict[int, tuple[int, ...]] = {}
        self.reading = _Reading(self.recorder, self.blocks)
        self.flow = GradientFlow(self.recorder)

    def walk(self) -> Walk:
        for number, node in enumerate(self.nodes.nodes):
            if isinstance(node, Compute):
                after = [event for value in node.inputs for event in self.made.get(value, ())]
                events = self.recorder.operator(number, node, "forward", after)
                self.made.update({output: events[-1:] for output in node.outputs if output is not None})
            else:
                events = self._change(number, node)
                self.made[node.result] = events[-1:] or self.made.get(node.source, ())
            self.forward_of[number] = events
        if self.nodes.training and self.nodes.roots:
            self._backward()
        self.backward_of.update({number: tuple(made) for number, made in self.flow.events_of.items() if number >= 0})
        return Walk(
            self.nodes,
            tuple(self.recorder.events),
            self.forward_of,
            self.backward_of,
            self.reading.used,
            self.reading.again,
            self.flow.awaited,
            tuple(self.flow.buckets),
            self.optimiser,
            self.blocks,
            self.recomputed_of,
        )

    def _change(self, number: int, node: Change) -> tuple[int, ...]:
        if number in self.reading.places:
            return self.reading.take(number, node)
        after = self.made.get(node.source, ())
        name = self.nodes.values[node.result].tensor
        return self.recorder.steps(node.steps.forward, "forward", name, after, module=node.module, node=number)

    def _backward(self) -> None:
        waiting = Counter(value for node in self.nodes.nodes for value in set(_direct(node)))
        shares = self._shares()
        for root in self.nodes.roots:
            self.gradient[root] = self.made.get(root, ())
        for number in reversed(range(len(self.nodes.nodes))):
            node = self.nodes.nodes[number]
            results = (node.result,) if isinstance(node, Change) else node.outputs
            arrived = [self.gradient[r] for r in results if r is not None and r in self.gradient]
            if arrived:
                self._backward_node(number, node, tuple(event for one in arrived for event in one), shares)
            for value in set(_direct(node)):
                waiting[value] -= 1
                if waiting[value] == 0:
                    self._read_at_rest(value, shares)
        self.flow.finish()
        self._update()

    def _shares(self) -> Counter[str]:
        """Per parameter, how many reads of it bring a gradient: one for all that use it as it rests, one per change."""
        readers: set[tuple[str, int]] = set()
        for number, node in enumerate(self.nodes.nodes):
            for value in set((node.source,) if isinstance(node, Change) else node.inputs):
                tensor = self.nodes.values[value].tensor
                if self.nodes.rest.get(tensor) == value and tensor in self.nodes.graph.parameter_of:
                    readers.add((tensor, number if isinstance(node, Change) else -1))
        return Counter(tensor for tensor, _ in readers)

    def _backward_node(self, number: int, node: Compute | Change, after: tuple[int, ...], shares: Counter[str]) -> None:
        if isinstance(node, Compute):
            if not node.op.grad or not any(self.nodes.values[i].local.grad for i in node.inputs):
                return
            if number in self.blocks and saves(node) and self.blocks[number].nodes.start not in self.recomputed_of:
                self._recompute(self.blocks[number])
            for value in node.footprint.saved_inputs:
                self.reading.unpack(self.nodes.roots_of[node.inputs[value]], number)
            self.backward_of[number] = self.recorder.operator(number, node, "backward", after)
            for value in dict.fromkeys(node.inputs):
                if self.nodes.values[value].local.grad:
                    self._deposit(value, self.backward_of[number][-1:])
            return
        source = self.nodes.values[node.source]
        if not source.local.grad:
            return
        name, steps = source.tensor, node.steps.backward
        if node.reads:
            self.reading.drop(number)
            self.flow.add(name, number, steps, after, shares[name] == 1, node.module)
            return
        self.backward_of[number] = self.recorder.steps(steps, "backward", name, after, module=node.module, node=number)
        self._deposit(node.source, self.backward_of[number][-1:] or after)

    def _recompute(self, block: Block) -> None:
        """The forward pass of a block once more. Parameters are read again too, each as it is needed, none ahead."""
        last = dict(self.made)
        for number in block.again:
            node = self.nodes.nodes[number]
            if isinstance(node, Compute):
                after = [event for value in node.inputs for event in last.get(value, ())]
                events = self.recorder.operator(number, node, "recompute", after)
                last.update(dict.fromkeys(made(node), events[-1:]))
            else:
                name, before = self.nodes.values[node.result].tensor, last.get(node.source, ())
                events = self.recorder.steps(
                    node.steps.forward, "recompute", name, before, module=node.module, node=number
                )
                last[node.result] = events[-1:] or before
            self.recomputed_of[number] = events

    def _read_at_rest(self, value: int, shares: Counter[str]) -> None:
        """All operators that use a parameter as it rests have given their gradients."""
        tensor = self.nodes.values[value].tensor
        parameter = self.nodes.graph.parameter_of.get(tensor)
        if parameter is None or self.nodes.rest[tensor] != value or value not in self.gradient:
            return
        self.flow.add(tensor, -1, (), self.gradient[value], shares[tensor] == 1, parameter.paths[0])

    def _deposit(self, value: int, events: tuple[int, ...]) -> None:
        """A reader's gradient arrives; a second one is added to the first."""
        if value in self.gradient:
            local, tensor = self.nodes.values[value].local, self.nodes.values[value].tensor
            seconds = self.recorder.copy_seconds(local.bytes, 3)
            both = (*self.gradient[value], *events)
            events = (self.recorder.compute("accumulate", "backward", tensor, seconds, both),)
        self.gradient[value] = events

    def _update(self) -> None:
        trained = [p.tensor for p in self.nodes.graph.parameters if p.trainable]
        sizes = [self.nodes.values[self.nodes.rest[tensor]].local.bytes for tensor in trained]
        dtype = self.nodes.graph.tensors[trained[0]].dtype if trained else "float32"
        seconds, host = step_seconds(self.optimiser, sizes, self.nodes.mesh.device, dtype)
        self.recorder.compute("update", "update", self.optimiser, seconds, self.flow.done, host=host)


class _Reading:
    """Gathers of parameters, started ahead of use, as the runtime's reading queue does it."""

    def __init__(self, recorder: Recorder, inside: Mapping[int, Block]) -> None:
        self.recorder, self.nodes, self.inside = recorder, recorder.nodes, inside
        self.order = [
            n for n, node in enumerate(self.nodes.nodes) if isinstance(node, Change) and node.ahead is not None
        ]
        self.places = {number: place for place, number in enumerate(self.order)}
        makers = {self._node(number).result: number for number in self.order if self._node(number).again}
        roots = ((n, self.nodes.roots_of[v]) for n, node in enumerate(self.nodes.nodes) for v in _saved(node))
        saved = {root for n, root in roots if root in makers and not self._recomputes(makers[root], n)}
        freed = [number for result, number in makers.items() if result in saved]
        self.of_value = {self._node(number).result: number for number in freed}
        self.used: dict[int, int] = {}
        self.again: dict[int, tuple[tuple[int, ...], int]] = {}
        self._under_way: dict[int, tuple[int, ...]] = {}
        self._held: set[int] = set()

    def _node(self, number: int) -> Change:
        node = self.nodes.nodes[number]
        assert isinstance(node, Change)
        return node

    def take(self, number: int, node: Change) -> tuple[int, ...]:
        """The value for the forward pass; the next gathers are started before this one is awaited."""
        self._start(number, "forward")
        self._ahead(number, 1, "forward")
        started = self._under_way.pop(number)
        self.recorder.wait(started[-1])
        self.used[number] = len(self.recorder.events)
        return (*started, *self._rest(number, node, "forward", started))

    def _recomputes(self, number: int, reader: int) -> bool:
        """Whether a gather and the node that saves its result belong to one recomputed block, which reads it again."""
        return number in self.inside and self.inside[number] is self.inside.get(reader)

    def unpack(self, value: int, reader: int) -> None:
        """A saved value is read in the backward pass: if it was freed, it is gathered again."""
        number = self.of_value.get(value)
        if number is None or number in self._held or self._recomputes(number, reader):
            return
        self._start(number, "backward")
        self._ahead(number, -1, "backward")
        started = self._under_way.pop(number)
        self.recorder.wait(started[-1])
        used = len(self.recorder.events)
        events = (*started, *self._rest(number, self._node(number), "backward", started))
        self.again[number] = (events, used)
        self._held.add(number)

    def drop(self, number: int) -> None:
        self._held.discard(number)

    def _rest(self, number: int, node: Change, phase: str, started: tuple[int, ...]) -> tuple[int, ...]:
        name, steps = self.nodes.values[node.result].tensor, node.steps.forward[len(started) :]
        return self.recorder.steps(steps, phase, name, started[-1:], module=node.module, node=number)

    def _gather(self, number: int) -> Step:
        node = self._node(number)
        assert node.ahead is not None
        return node.steps.forward[node.ahead]

    def _start(self, number: int, phase: str) -> None:
        """Issue what comes before the gather, and the gather."""
        if number not in self._under_way:
            node, recorder = self._node(number), self.recorder
            name, where = self.nodes.values[node.result].tensor, node.module
            before = recorder.steps(node.steps.forward[: node.ahead], phase, name, module=where, node=number)
            gather = recorder.step(self._gather(number), phase, name, before[-1:], module=where, node=number)
            self._under_way[number] = (*before, gather)

    def _ahead(self, number: int, direction: int, phase: str) -> None:
        travelling = sum(self._gather(n).bytes_out for n in self._under_way)
        place = self.places[number] + direction
        while 0 <= place < len(self.order) and travelling < AHEAD_BYTES:
            following = self.order[place]
            if direction > 0 or (self._node(following).result in self.of_value and following not in self._held):
                self._start(following, phase)
                travelling += self._gather(following).bytes_out
            place += direction


def _saved(node: Compute | Change) -> tuple[int, ...]:
    return () if isinstance(node, Change) else tuple(node.inputs[i] for i in node.footprint.saved_inputs)


def _direct(node: Compute | Change) -> tuple[int, ...]:
    """The values a node reads whose gradient comes from operators that use them as they are."""
    return (
        () if isinstance(node, Change) and node.reads else ((node.source,) if isinstance(node, Change) else node.inputs)
    )
