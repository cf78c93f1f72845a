"""When parameters that rest cut are gathered: in bundles, some bytes ahead of use, and again for the backward pass.

The parameters of a bundle (:mod:`~shardwright.program.bundles`) are packed into one flat tensor, gathered, and unpacked when
the first of them is read; the next bundles are started before that one is awaited, until some bytes are under way, and one
at least. A parameter cut along several axes takes a gather for each; while one bundle is in use the next one's first gather
is awaited and its second begun. What was freed after its forward use is gathered again for the backward pass, those of a
bundle that are needed there together, and so is what a recomputed block reads; both ahead of use, in the order in which the
backward pass comes to them (FSDP, Zhao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from shardwright.program.blocks import RecomputedBlock
from shardwright.program.bundles import together
from shardwright.program.dataflow import Compute, LayoutChange
from shardwright.program.instructions import Kind, Phase, Traveller
from shardwright.program.nodes import read, saves
from shardwright.program.steps import Step
from shardwright.program.writer import ProgramWriter

Turn = tuple[int, Phase]
"""An occasion on which a bundle is gathered: its place in the order of first use, and the pass that reads it."""


@dataclass(frozen=True)
class _Flight:
    """A gather under way: its members and what they take with them, the instruction, the values it reads and makes, and how
    many gathers its members have behind them."""

    travellers: tuple[Traveller, ...]
    started: int
    packed: int
    flat: int
    step: Step
    leg: int


class Reading:
    """Writes gathers. ``gathers`` holds bundles of nodes, ``inside`` maps nodes to the recomputed blocks they are in,
    ``followed`` has the nodes through which gradients flow back.

    ``held`` maps a node whose result was gathered again for the backward pass to the value that holds it now.
    """

    def __init__(
        self,
        writer: ProgramWriter,
        gathers: tuple[tuple[int, ...], ...],
        inside: Mapping[int, RecomputedBlock],
        followed: Container[int],
        ahead: int,
    ) -> None:
        self.writer, self.flow, self.inside, self.order, self.ahead = writer, writer.flow, inside, gathers, ahead
        self.places = {number: place for place, bundle in enumerate(gathers) for number in bundle}
        self.legs = {number: self._legs(number) for number in self.places}
        makers = {self._node(number).result: number for number in self.places if self._node(number).again}
        nodes = [(n, node) for n, node in enumerate(self.flow.nodes) if n in followed]
        again = {n for block in set(inside.values()) for n in block.again}
        roots = ((n, self.flow.roots_of[v]) for n, node in nodes for v in (read(node) if n in again else _saved(node)))
        saved = {root for n, root in roots if root in makers and not self._recomputes(makers[root], n)}
        self.of_value = {result: number for result, number in makers.items() if result in saved}
        self.held: dict[int, int] = {}
        running = {inside[n] for n, node in nodes if n in inside and saves(node)}
        self._wanted = {
            Phase.FORWARD: set(self.places),
            Phase.RECOMPUTE: {n for n in self.places if n in inside and inside[n] in running and n in inside[n].again},
            Phase.BACKWARD: set(self.of_value.values()),
        }
        """What each pass will still read."""
        turns: list[Turn] = [(place, Phase.FORWARD) for place in range(len(gathers))]
        self._turns = [turns, self._backward_turns()]
        self._position = {turn: position for turns in self._turns for position, turn in enumerate(turns)}
        self._under_way: dict[Turn, list[_Flight]] = {}
        self._arrived: dict[int, int] = {}

    def _node(self, number: int) -> LayoutChange:
        node = self.flow.nodes[number]
        assert isinstance(node, LayoutChange)
        return node

    def _legs(self, number: int) -> int:
        """How many gathers a parameter takes one after the other, from the first on."""
        node = self._node(number)
        return sum(1 for _ in takewhile(lambda step: step.kind == "all_gather", node.route.forward[node.ahead :]))

    def _backward_turns(self) -> list[Turn]:
        """The backward pass goes from the last bundle to the first, but through a recomputed block forward first."""
        turns: list[Turn] = []
        of_block: list[Turn] = []
        for place in reversed(range(len(self.order))):
            turns.append((place, Phase.BACKWARD))
            block = self.inside.get(self.order[place][0])
            if block is not None:
                of_block.append((place, Phase.RECOMPUTE))
                if place == 0 or self.inside.get(self.order[place - 1][0]) is not block:
                    turns += reversed(of_block)
                    of_block = []
        return turns

    def take(self, number: int, phase: Phase) -> int:
        """The value for a forward pass, the first or a block's second."""
        self._fetch(number, phase)
        return self._completed(number, phase)

    def _recomputes(self, number: int, reader: int) -> bool:
        """Whether a gather and the node that saves its result belong to one recomputed block, which reads it again."""
        block = self.inside.get(number)
        return block is not None and block is self.inside.get(reader) and number in block.again

    def again(self, value: int, reader: int) -> int | None:
        """A saved value is read in the backward pass: where it was freed, it is gathered again, and this is where it is."""
        number = self.of_value.get(value)
        if number is None or self._recomputes(number, reader):
            return None
        if number not in self.held:
            self._fetch(number, Phase.BACKWARD)
            self.held[number] = self._completed(number, Phase.BACKWARD)
        return self.held[number]

    def drop(self, number: int) -> None:
        """The gradient of a read is known, so nothing needs what was gathered again."""
        self.held.pop(number, None)
        self._arrived.pop(number, None)

    def finish(self) -> None:
        """Wait for what was started and never read."""
        for turn in list(self._under_way):
            self._land_all(turn)

    def _fetch(self, number: int, phase: Phase) -> None:
        """Have a parameter there. The next gathers are started before it is awaited, those under way go on after it."""
        turn = self.places[number], phase
        while number not in self._arrived:
            if turn not in self._under_way:
                self._wanted[phase].add(number)
                self._start(turn)
            before = set(self._under_way)
            self._ahead(turn)
            self._land_all(turn)
            for distance, later in enumerate(self._later(turn), 1):
                if later in before and self._left(later) >= distance:
                    self._go_on(later)

    def _completed(self, number: int, phase: Phase) -> int:
        """What follows the gathers of a parameter that has arrived."""
        node, slot = self._node(number), self._arrived.pop(number)
        assert node.ahead is not None
        first = node.ahead + self.legs[number]
        return self._steps(number, slice(first, None), slot, phase)

    def _steps(self, number: int, which: slice, slot: int, phase: Phase) -> int:
        """Steps of a read that are awaited at once."""
        node, tensor = self._node(number), self.flow.values[self._node(number).result].tensor
        for step, bound in zip(node.route.forward[which], node.forward[which], strict=True):
            slot = self.writer.step(
                step, bound, phase, slot, tensor=tensor, module=node.module, node=number, role="gathered"
            )
        return slot

    def _later(self, turn: Turn) -> list[Turn]:
        """What is under way for later, in order."""
        return sorted((t for t in self._under_way if t != turn), key=self._position.__getitem__)

    def _left(self, turn: Turn) -> int:
        """How many gathers are still to be begun after the one under way."""
        return max(self.legs[t.node] - 1 - f.leg for f in self._under_way[turn] for t in f.travellers)

    def _start(self, turn: Turn) -> None:
        """Start to gather what is wanted of a bundle, unless it is under way."""
        members = self._members(turn)
        if turn in self._under_way or not members:
            return
        shards = []
        for number in members:
            node = self._node(number)
            shards.append((number, self._steps(number, slice(node.ahead), node.source, turn[1])))
        self._under_way[turn] = [self._begun(shards, 0, turn[1])]
        self._wanted[turn[1]].difference_update(members)

    def _begun(self, shards: list[tuple[int, int]], leg: int, phase: Phase) -> _Flight:
        """Write a gather of these nodes' shards."""
        writer, travellers = self.writer, []
        for number, _ in shards:
            node = self._node(number)
            assert node.ahead is not None
            travellers.append(Traveller(number, node.route.forward[node.ahead + leg], node.forward[node.ahead + leg]))
        carried, slots, (member, _) = tuple(travellers), [slot for _, slot in shards], shards[0]
        first, step = self._node(member), together([traveller.step for traveller in carried])
        tensor = name = self.flow.values[first.result].tensor
        packed = -1
        if len(shards) > 1:
            name, packed = f"{len(shards)} parameters", writer.slot("", "flat", step.bytes_in)
            writer.compute(Kind.PACK, phase, name, slots, (packed,), module=first.module, node=member, steps=carried)
        flat = writer.slot("" if packed >= 0 else tensor, "flat" if packed >= 0 else "gathered", step.bytes_out)
        started = writer.communicate(
            Kind.GATHER,
            phase,
            name,
            step.kind,
            step.axis,
            step.wire_bytes,
            (packed,) if packed >= 0 else slots,
            (flat,),
            module=first.module,
            node=member,
            steps=carried,
        )
        return _Flight(carried, started, packed, flat, step, leg)

    def _land_all(self, turn: Turn) -> None:
        while turn in self._under_way:
            self._go_on(turn)

    def _go_on(self, turn: Turn) -> None:
        """Wait for the gathers under way of a bundle and begin the next ones, those along one axis together."""
        begun: list[_Flight] = []
        for flight in self._under_way.pop(turn):
            further: dict[int, list[tuple[int, int]]] = {}
            for number, slot in self._land(flight, turn[1]):
                node, leg = self._node(number), flight.leg + 1
                if leg < self.legs[number]:
                    assert node.ahead is not None
                    further.setdefault(node.route.forward[node.ahead + leg].axis, []).append((number, slot))
                else:
                    self._arrived[number] = slot
            begun += [self._begun(shards, flight.leg + 1, turn[1]) for shards in further.values()]
        if begun:
            self._under_way[turn] = begun

    def _land(self, flight: _Flight, phase: Phase) -> list[tuple[int, int]]:
        """Wait for a gather: its members and where they are. Pieces are put in order unless the first dim was cut."""
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
        landed = list(zip((t.node for t in flight.travellers), results, strict=True))
        if flight.packed < 0:
            writer.wait(flight.started, phase, (flight.flat,), results)
            return landed
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
        return landed

    def _ahead(self, turn: Turn) -> None:
        """Start what comes next: until enough bytes are under way, and whatever could not arrive in time otherwise (of
        what takes several gathers, as many bundles)."""
        in_flight = distance = 0
        turns = self._turns[turn[1] is not Phase.FORWARD]
        for position in range(self._position[turn] + 1, len(turns)):
            later = turns[position]
            members = self._members(later)
            if later not in self._under_way and not members:
                continue
            distance += 1
            if later not in self._under_way:
                if in_flight >= self.ahead and distance > max(self.legs[number] for number in members):
                    return
                self._start(later)
            in_flight += sum(flight.step.bytes_out for flight in self._under_way[later])

    def _members(self, turn: Turn) -> tuple[int, ...]:
        """What is wanted of a bundle, as far as it is not under way."""
        place, phase = turn
        return tuple(number for number in self.order[place] if number in self._wanted[phase])


def _saved(node: Compute | LayoutChange) -> Iterator[int]:
    return iter(()) if isinstance(node, LayoutChange) else (node.inputs[i] for i in node.footprint.saved_inputs)
