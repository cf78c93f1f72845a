"""When parameters that rest cut are gathered: in bundles, some bytes ahead of use, and again for the backward pass.

The parameters of a bundle (:mod:`~shardwright.program.bundles`) are packed into one flat tensor, gathered, and unpacked when
the first of them is read; the next bundles are started before that one is awaited, until some bytes are under way. What was
freed after its forward use is gathered again for the backward pass, those of a bundle that are needed there together (FSDP,
Zhao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.program.blocks import Block
from shardwright.program.bundles import together
from shardwright.program.dataflow import Change, Compute
from shardwright.program.instructions import Kind, Phase, Traveller
from shardwright.program.steps import Step
from shardwright.program.writer import Writer


@dataclass(frozen=True)
class _Flight:
    """A gather under way: its members and what they take with them, the instruction, and the values it reads and makes."""

    travellers: tuple[Traveller, ...]
    started: int
    packed: int
    flat: int
    step: Step


class Reading:
    """Writes gathers. ``gathers`` holds bundles of nodes, ``inside`` maps nodes to the recomputed blocks they are in.

    ``held`` maps a node whose result was gathered again for the backward pass to the value that holds it now.
    """

    def __init__(
        self, writer: Writer, gathers: tuple[tuple[int, ...], ...], inside: Mapping[int, Block], ahead: int
    ) -> None:
        self.writer, self.flow, self.inside, self.order, self.ahead = writer, writer.flow, inside, gathers, ahead
        self.places = {number: place for place, bundle in enumerate(gathers) for number in bundle}
        makers = {self._node(number).result: number for number in self.places if self._node(number).again}
        roots = ((n, self.flow.roots_of[v]) for n, node in enumerate(self.flow.nodes) for v in _saved(node))
        saved = {root for n, root in roots if root in makers and not self._recomputes(makers[root], n)}
        self.of_value = {result: number for result, number in makers.items() if result in saved}
        self.held: dict[int, int] = {}
        self._noted = set(self.of_value.values())
        self._under_way: dict[int, _Flight] = {}
        self._arrived: dict[int, int] = {}

    def _node(self, number: int) -> Change:
        node = self.flow.nodes[number]
        assert isinstance(node, Change)
        return node

    def take(self, number: int, phase: Phase) -> int:
        """The value for a forward pass; unless it is a block's second, the next gathers are started before the wait."""
        if number not in self._arrived:
            place = self.places[number]
            if phase is Phase.FORWARD:
                self._start(place, self.order[place], phase)
                self._await(place, 1, phase)
            else:
                self._land(self._begun(self.order[place], phase), phase)
        return self._completed(number, phase)

    def _recomputes(self, number: int, reader: int) -> bool:
        """Whether a gather and the node that saves its result belong to one recomputed block, which reads it again."""
        return number in self.inside and self.inside[number] is self.inside.get(reader)

    def again(self, value: int, reader: int) -> int | None:
        """A saved value is read in the backward pass: where it was freed, it is gathered again, and this is where it is."""
        number = self.of_value.get(value)
        if number is None or self._recomputes(number, reader):
            return None
        if number not in self.held:
            while number not in self._arrived:
                if self.places[number] not in self._under_way:
                    self._noted.add(number)
                    self._start(self.places[number], self._wanted_again(self.places[number]), Phase.BACKWARD)
                self._await(self.places[number], -1, Phase.BACKWARD)
            self.held[number] = self._completed(number, Phase.BACKWARD)
        return self.held[number]

    def drop(self, number: int) -> None:
        """The gradient of a read is known, so nothing needs what was gathered again."""
        self.held.pop(number, None)
        self._arrived.pop(number, None)

    def _completed(self, number: int, phase: Phase) -> int:
        """What follows the gather of a parameter that has arrived."""
        node, slot = self._node(number), self._arrived.pop(number)
        assert node.ahead is not None
        tensor, first = self.flow.values[node.result].tensor, node.ahead + 1
        for step, bound in zip(node.route.forward[first:], node.forward[first:], strict=True):
            slot = self.writer.step(
                step, bound, phase, slot, tensor=tensor, module=node.module, node=number, role="gathered"
            )
        return slot

    def _begun(self, members: tuple[int, ...], phase: Phase) -> _Flight:
        """Write what comes before the gather, and the gather."""
        writer, travellers, shards = self.writer, [], []
        for number in members:
            node = self._node(number)
            assert node.ahead is not None
            tensor, slot = self.flow.values[node.result].tensor, node.source
            for step, bound in zip(node.route.forward[: node.ahead], node.forward[: node.ahead], strict=True):
                slot = writer.step(
                    step, bound, phase, slot, tensor=tensor, module=node.module, node=number, role="gathered"
                )
            travellers.append(Traveller(number, node.route.forward[node.ahead], node.forward[node.ahead]))
            shards.append(slot)
        carried, first = tuple(travellers), self._node(members[0])
        step = together([traveller.step for traveller in carried])
        name, packed = tensor, -1
        if len(members) > 1:
            name, packed = f"{len(members)} parameters", writer.slot("", "flat", step.bytes_in)
            writer.compute(
                Kind.PACK, phase, name, shards, (packed,), module=first.module, node=members[0], steps=carried
            )
        flat = writer.slot("" if packed >= 0 else tensor, "flat" if packed >= 0 else "gathered", step.bytes_out)
        started = writer.communicate(
            Kind.GATHER,
            phase,
            name,
            step.kind,
            step.axis,
            step.wire_bytes,
            (packed,) if packed >= 0 else shards,
            (flat,),
            module=first.module,
            node=members[0],
            steps=carried,
        )
        return _Flight(carried, started, packed, flat, step)

    def _start(self, place: int, members: tuple[int, ...], phase: Phase) -> None:
        """Start to gather some of a bundle, unless it is under way."""
        if place not in self._under_way:
            self._under_way[place] = self._begun(members, phase)
            if phase is Phase.BACKWARD:
                self._noted.difference_update(members)

    def _await(self, place: int, direction: int, phase: Phase) -> None:
        """Start what comes next in this direction, then wait for the bundle."""
        self._ahead(place, direction, phase)
        self._land(self._under_way.pop(place), phase)

    def _land(self, flight: _Flight, phase: Phase) -> None:
        """Wait for a gather. Pieces of a parameter are put in order unless its first dim was cut."""
        writer = self.writer
        results = [
            writer.slot(
                self.flow.values[self._node(number).result].tensor,
                "gathered",
                step.bytes_out,
                flight.flat if flight.packed < 0 and not step.dim else -1,
            )
            for number, step, _ in flight.travellers
        ]
        self._arrived.update(zip((t.node for t in flight.travellers), results, strict=True))
        if flight.packed < 0:
            writer.wait(flight.started, phase, (flight.flat,), results)
            return
        writer.wait(flight.started, phase, (flight.packed,))
        known = writer.instructions[flight.started]
        ordered = sum(step.buffer_bytes for _, step, _ in flight.travellers)
        writer.compute(
            Kind.UNPACK,
            phase,
            known.name,
            (flight.flat,),
            results,
            module=known.module,
            node=known.node,
            steps=flight.travellers,
            temporary=ordered,
        )

    def _ahead(self, place: int, direction: int, phase: Phase) -> None:
        travelling = sum(flight.step.bytes_out for flight in self._under_way.values())
        place += direction
        while 0 <= place < len(self.order) and travelling < self.ahead:
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
