"""How parameters that rest cut are gathered, event by event, as the runtime's reading queue does it.

The parameters of a bundle (:mod:`shardwright.costs.bundles`) are packed into one flat tensor, gathered, and unpacked when
the first of them is read; the next bundles are started before that one is awaited, until some bytes are under way. What was
freed after its forward use is gathered again for the backward pass, those of a bundle that are needed there together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.costs.bundles import together
from shardwright.costs.redistribute import Step
from shardwright.costs.walk_blocks import Block
from shardwright.costs.walk_events import Recorder
from shardwright.costs.walk_nodes import Change, Compute

AHEAD_BYTES = 64 * 2**20
"""Gathers of parameters are started ahead of use until this many bytes are under way."""


@dataclass(frozen=True)
class Flat:
    """A flat tensor of several parameters or gradients: its bytes and the events between which it lives."""

    bytes: int
    born: int
    dies: int


@dataclass(frozen=True)
class _Flight:
    """A gather under way: per member the events so far, the last of which is the gather they share."""

    started: Mapping[int, tuple[int, ...]]
    packed: int
    gather: int
    step: Step


class Reading:
    """Gathers of parameters. ``gathers`` holds bundles of nodes, ``inside`` maps nodes to the recomputed blocks they are in.

    ``used`` says for a gather of a parameter after which event its result is used, ``again`` the same for the gathers
    repeated in the backward pass with the events that repeat them; ``landed`` maps the gather of a bundle to the event that
    unpacks it.
    """

    def __init__(self, recorder: Recorder, gathers: tuple[tuple[int, ...], ...], inside: Mapping[int, Block]) -> None:
        self.recorder, self.nodes, self.inside, self.order = recorder, recorder.nodes, inside, gathers
        self.places = {number: place for place, bundle in enumerate(gathers) for number in bundle}
        makers = {self._node(number).result: number for number in self.places if self._node(number).again}
        roots = ((n, self.nodes.roots_of[v]) for n, node in enumerate(self.nodes.nodes) for v in _saved(node))
        saved = {root for n, root in roots if root in makers and not self._recomputes(makers[root], n)}
        self.of_value = {result: number for result, number in makers.items() if result in saved}
        self.used: dict[int, int] = {}
        self.again: dict[int, tuple[tuple[int, ...], int]] = {}
        self.landed: dict[int, int] = {}
        self.flats: list[Flat] = []
        self._noted = set(self.of_value.values())
        self._under_way: dict[int, _Flight] = {}
        self._arrived: dict[int, tuple[int, ...]] = {}
        self._held: set[int] = set()

    def _node(self, number: int) -> Change:
        node = self.nodes.nodes[number]
        assert isinstance(node, Change)
        return node

    def take(self, number: int, phase: str) -> tuple[int, ...]:
        """The value for a forward pass; unless it is a block's second, the next gathers are started before the wait."""
        if number not in self._arrived:
            place = self.places[number]
            if phase == "forward":
                self._start(place, self.order[place], phase)
                self._await(place, 1, phase)
            else:
                self._land(self._begun(self.order[place], phase), phase)
        if phase == "forward":
            self.used[number] = len(self.recorder.events)
        return self._completed(number, phase)

    def _recomputes(self, number: int, reader: int) -> bool:
        """Whether a gather and the node that saves its result belong to one recomputed block, which reads it again."""
        return number in self.inside and self.inside[number] is self.inside.get(reader)

    def unpack(self, value: int, reader: int) -> None:
        """A saved value is read in the backward pass: if it was freed, it is gathered again."""
        number = self.of_value.get(value)
        if number is None or number in self._held or self._recomputes(number, reader):
            return
        while number not in self._arrived:
            if self.places[number] not in self._under_way:
                self._noted.add(number)
                self._start(self.places[number], self._wanted_again(self.places[number]), "backward")
            self._await(self.places[number], -1, "backward")
        used = len(self.recorder.events)
        self.again[number] = (self._completed(number, "backward"), used)
        self._held.add(number)

    def drop(self, number: int) -> None:
        self._held.discard(number)
        self._arrived.pop(number, None)

    def _completed(self, number: int, phase: str) -> tuple[int, ...]:
        """What follows the gather of a parameter that has arrived."""
        node, started = self._node(number), self._arrived.pop(number)
        name, steps = self.nodes.values[node.result].tensor, node.steps.forward[len(started) :]
        return (
            *started,
            *self.recorder.steps(steps, phase, name, started[-1:], module=node.module, node=number),
        )

    def _begun(self, members: tuple[int, ...], phase: str) -> _Flight:
        """Issue what comes before the gather, and the gather."""
        recorder, before, steps = self.recorder, {}, []
        for number in members:
            node = self._node(number)
            assert node.ahead is not None
            name, steps_before = self.nodes.values[node.result].tensor, node.steps.forward[: node.ahead]
            before[number] = recorder.steps(steps_before, phase, name, module=node.module, node=number)
            steps.append(node.steps.forward[node.ahead])
        step, where, first = together(steps, recorder.mesh), self._node(members[0]).module, members[0]
        after = tuple(event for made in before.values() for event in made[-1:])
        packed = -1
        if len(members) > 1:
            name, seconds = f"{len(members)} parameters", recorder.copy_seconds(step.bytes_in, 2)
            packed = recorder.compute("pack", phase, name, seconds, after, module=where, node=first)
            after = (packed,)
        gather = recorder.step(step, phase, name, after, module=where, node=first, travellers=len(members))
        return _Flight({number: (*made, gather) for number, made in before.items()}, packed, gather, step)

    def _start(self, place: int, members: tuple[int, ...], phase: str) -> None:
        """Start to gather some of a bundle, unless it is under way."""
        if place not in self._under_way:
            self._under_way[place] = self._begun(members, phase)
            if phase == "backward":
                self._noted.difference_update(members)

    def _await(self, place: int, direction: int, phase: str) -> None:
        """Start what comes next in this direction, then wait for the bundle."""
        self._ahead(place, direction, phase)
        self._land(self._under_way.pop(place), phase)

    def _land(self, flight: _Flight, phase: str) -> None:
        recorder = self.recorder
        recorder.wait(flight.gather)
        self._arrived.update(flight.started)
        if flight.packed < 0:
            return
        name, seconds = f"{len(flight.started)} parameters", recorder.copy_seconds(flight.step.bytes_out, 2)
        where, first = recorder.events[flight.gather].module, recorder.events[flight.gather].node
        unpacked = recorder.compute("pack", phase, name, seconds, (flight.gather,), module=where, node=first)
        self.landed[flight.gather] = unpacked
        self.flats.append(Flat(flight.step.bytes_in + flight.step.bytes_out, flight.packed, unpacked))

    def _ahead(self, place: int, direction: int, phase: str) -> None:
        travelling = sum(flight.step.bytes_out for flight in self._under_way.values())
        place += direction
        while 0 <= place < len(self.order) and travelling < AHEAD_BYTES:
            members = self.order[place] if direction > 0 else self._wanted_again(place)
            if members:
                self._start(place, members, phase)
            if place in self._under_way:
                travelling += self._under_way[place].step.bytes_out
            place += direction

    def _wanted_again(self, place: int) -> tuple[int, ...]:
        return tuple(number for number in self.order[place] if number in self._noted)


def _saved(node: Compute | Change) -> Iterator[int]:
    return iter(()) if isinstance(node, Change) else (node.inputs[i] for i in node.footprint.saved_inputs)
