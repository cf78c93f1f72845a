"""One training step of one rank as a list of events: what runs, on which stream, for how long, after what.

Forward operators and the changes of layout between them come in the order of the program; parameters are gathered in
bundles, some bytes ahead of use; backward events mirror the forward ones (the backward of an operator is one event, that of
a change its dual steps); a recomputed block runs forward once more when its backward asks for what was not kept; gradients
of parameters travel home while the backward pass goes on; the optimiser ends the step. List order
is the order in which the host issues the events, and it is the runtime's. Which of them overlap is found out by
:mod:`shardwright.simulator`; the plain sum is what the search minimises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.cluster import Mesh
from shardwright.costs.bundles import Read, bundles
from shardwright.costs.optimizer import step_seconds
from shardwright.costs.walk_blocks import Block, blocks, made, saves
from shardwright.costs.walk_events import COMPUTE, Event, Recorder
from shardwright.costs.walk_gradients import Bucket, GradientFlow
from shardwright.costs.walk_nodes import Change, Compute, Nodes, forward_nodes
from shardwright.costs.walk_reading import Flat, Reading
from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy

__all__ = ["COMPUTE", "Event", "Walk", "walk"]


@dataclass(frozen=True)
class Walk:
    """The events of one step, and where the storages of its nodes begin and end.

    ``forward_of`` and ``backward_of`` give the events of every forward node. ``gathered`` says for a gather of a
    parameter after which event its result is used, ``again`` the same for the gathers repeated in the backward pass with
    the events that repeat them, ``landed`` which event unpacks what a bundle's gather brought, ``packed`` which one packs a
    gradient into a bundle, ``awaited`` when a gradient's scattering is awaited, ``flats`` are the tensors of bundles.
    ``blocks`` maps the nodes of recomputed blocks to these, ``recomputed_of`` those that run again to their events.
    """

    nodes: Nodes
    events: tuple[Event, ...]
    forward_of: Mapping[int, tuple[int, ...]]
    backward_of: Mapping[int, tuple[int, ...]]
    gathered: Mapping[int, int]
    again: Mapping[int, tuple[tuple[int, ...], int]]
    landed: Mapping[int, int]
    packed: Mapping[int, int]
    awaited: Mapping[int, int]
    flats: tuple[Flat, ...]
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
        gathers, scatters = _bundles(nodes)
        self.reading = Reading(self.recorder, gathers, self.blocks)
        self.flow = GradientFlow(self.recorder, scatters)

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
            self.reading.landed,
            self.flow.packed,
            self.flow.awaited,
            (*self.reading.flats, *self.flow.flats),
            tuple(self.flow.buckets),
            self.optimiser,
            self.blocks,
            self.recomputed_of,
        )

    def _change(self, number: int, node: Change) -> tuple[int, ...]:
        if number in self.reading.places:
            return self.reading.take(number, "forward")
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
            elif number in self.reading.places:
                events = self.reading.take(number, "recompute")
                last[node.result] = events[-1:]
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


def _bundles(nodes: Nodes) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The nodes whose parameters are gathered together, and those whose gradients are scattered together."""
    reads = [(number, node) for number, node in enumerate(nodes.nodes) if isinstance(node, Change) and node.reads]
    described = [Read(nodes.values[node.result].tensor, node.operator, node.steps) for _, node in reads]
    recomputed = nodes.strategy.recomputed if nodes.training else ()
    found = bundles(nodes.graph, described, nodes.strategy.whole_gradients, recomputed)
    return tuple(tuple(tuple(reads[i][0] for i in bundle) for bundle in way) for way in (found.gathers, found.scatters))


def _direct(node: Compute | Change) -> tuple[int, ...]:
    """The values a node reads whose gradient comes from operators that use them as they are."""
    return (
        () if isinstance(node, Change) and node.reads else ((node.source,) if isinstance(node, Change) else node.inputs)
    )
