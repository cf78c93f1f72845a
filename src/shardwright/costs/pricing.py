"""Seconds on the instructions of a program: what each takes on the device, and what the host takes to issue it.

Nothing is decided here. Equal operators are priced once. Waiting costs nothing by itself: the simulator finds out how long
it takes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cluster import Mesh
from shardwright.costs import collectives
from shardwright.costs.compute import kernel_seconds, op_times
from shardwright.costs.gradient_addition import adding_seconds, trained_dtype
from shardwright.costs.host import dispatch_seconds, modules_entered, several_seconds
from shardwright.costs.optimizer import step_seconds as update_seconds
from shardwright.costs.redistribute import collective_seconds, step_seconds
from shardwright.costs.replica_sums import leg_seconds
from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators import record
from shardwright.operators.work import memory_work
from shardwright.program import COMPUTE, Instruction, Kind, Phase, Program
from shardwright.program.dataflow import Compute
from shardwright.program.footprints import Strided
from shardwright.program.nodes import exchanges

FREE = frozenset((Kind.AWAIT, Kind.ARRIVE, Kind.DEPOSIT))
"""Instructions that issue nothing."""


class Event(NamedTuple):
    """An instruction with its price: ``seconds`` are the device's, ``host`` the host's to issue it."""

    instruction: Instruction
    seconds: float
    host: float

    @property
    def kind(self) -> Kind:
        return self.instruction.kind

    @property
    def phase(self) -> Phase:
        return self.instruction.phase

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def stream(self) -> str:
        return self.instruction.stream

    @property
    def after(self) -> tuple[int, ...]:
        return self.instruction.after

    @property
    def module(self) -> str:
        return self.instruction.module

    @property
    def node(self) -> int:
        return self.instruction.node

    @property
    def collective(self) -> str:
        return self.instruction.collective

    @property
    def bytes(self) -> int:
        return self.instruction.bytes

    @property
    def travellers(self) -> int:
        """How many parameters or gradients a collective carries (none where it is about something else)."""
        return len(self.instruction.steps) if self.kind in (Kind.GATHER, Kind.SCATTER) else 0


@dataclass(frozen=True)
class Priced:
    """A program on a mesh, every instruction with its price."""

    program: Program
    mesh: Mesh
    events: tuple[Event, ...]

    @cached_property
    def seconds(self) -> float:
        """The plain sum of all instructions."""
        return sum(event.seconds for event in self.events)

    @property
    def communication(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Per kind of collective and mesh axis, how many of them one rank performs in a step, and their bytes."""
        return self.program.communication


def price(program: Program, mesh: Mesh) -> Priced:
    """Price every instruction of a program.

    Example
    -------
    >>> events = price(program, mesh).events                                                     # doctest: +SKIP
    >>> sum(event.seconds for event in events if event.phase is Phase.FORWARD)                   # doctest: +SKIP
    """
    prices = _Prices(program, mesh)
    idle = program.idle
    events = [
        Event(one._replace(collective="", bytes=0, stream=COMPUTE), 0.0, 0.0) if number in idle else prices.event(one)
        for number, one in enumerate(program.instructions)
    ]
    return Priced(program, mesh, tuple(events))


def is_batch_of_matrices(operand: Strided) -> bool:
    """Whether ``matmul`` can take an operand as it lies: it sees all dims but the last two as one, which heads that were
    split off the last dim and turned to the front are not.

    >>> is_batch_of_matrices(Strided((2, 4, 8, 16), (512, 128, 16, 1), "float32"))
    True
    >>> is_batch_of_matrices(Strided((2, 4, 8, 16), (512, 16, 64, 1), "float32"))
    False
    """
    batch = [(n, step) for n, step in zip(operand.shape[:-2], operand.strides[:-2], strict=True) if n > 1]
    return all(outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(batch))


class _Prices:
    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program, self.flow, self.mesh, self.device = program, program.flow, mesh, mesh.device
        # A processor computes what it issues, so issuing has no time of its own there.
        self.overhead = self.device.launch_overhead if self.device.kind == "cuda" else 0.0
        self._operators: dict[object, tuple[float, float]] = {}
        self._entered = modules_entered(self.flow.graph.ops)
        profile = self.device.profile
        self._call_seconds = 0.0 if profile is None else profile.dispatch_of.get("module", (0.0, 0.0))[0]

    def event(self, instruction: Instruction) -> Event:
        """An instruction with its price; as an engine runs it, reductions stand in line with computation unless they overlap
        there, and where launches block, the host waits for the device and the device for the host."""
        engine = self.device.engine
        if engine is not None and not engine.overlap and instruction.kind is Kind.REDUCE:
            instruction = instruction._replace(stream=COMPUTE)
        event = self._event(instruction)
        if engine is not None and engine.blocking:
            return event._replace(seconds=event.seconds + event.host, host=0.0)
        return event

    def _event(self, instruction: Instruction) -> Event:
        kind = instruction.kind
        if kind in FREE:
            return Event(instruction, 0.0, 0.0)
        if kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
            return Event(instruction, *self._operator(instruction))
        if kind is Kind.UPDATE:
            return Event(instruction, *self._update())
        return Event(instruction, self._seconds(instruction), self.overhead)

    def _seconds(self, instruction: Instruction) -> float:
        kind, steps = instruction.kind, instruction.steps
        if kind is Kind.CHANGE:
            return step_seconds(steps[0].step, self.mesh)
        if kind in (Kind.GATHER, Kind.SCATTER):
            seconds = collective_seconds([traveller.step for traveller in steps], self.mesh)
            return seconds * self._reduced_in(1.0) if kind is Kind.SCATTER else seconds
        if kind is Kind.REDUCE:
            assert instruction.leg is not None
            size = self.program.buckets[instruction.bucket].itemsize
            return leg_seconds(instruction.leg, int(self._reduced_in(size)), self.mesh)
        if kind is Kind.EXCHANGE:
            axis = next(axis for axis in self.mesh.axes if axis.name == instruction.stream)
            return float(collectives.all_reduce(instruction.bytes, axis))
        if kind is Kind.UNPACK:
            return self._copy(sum(traveller.step.bytes_out for traveller in steps), 2)
        if kind is Kind.PACK:
            return self._copy(self._packed_bytes(instruction), 2)
        return adding_seconds(self._gradient_bytes(instruction), self.device, self._dtype)

    def _reduced_in(self, size: float) -> float:
        """Bytes of gradients that take ``size`` as they lie, in the precision in which an engine reduces them."""
        engine = self.device.engine
        return size if engine is None else size * max(engine.reduction / DTYPE_BYTES[self._dtype], 1.0)

    def _packed_bytes(self, instruction: Instruction) -> int:
        if instruction.bucket < 0:
            return sum(traveller.step.bytes_in for traveller in instruction.steps)
        bucket = self.program.buckets[instruction.bucket]
        if len(instruction.writes) > 1 or instruction.name not in bucket.tensors:
            return sum(bucket.elements) * bucket.itemsize
        return bucket.elements[bucket.tensors.index(instruction.name)] * bucket.itemsize

    def _gradient_bytes(self, instruction: Instruction) -> int:
        """Of the tensor whose gradients are added."""
        return self.program.slots[self.program.root(instruction.writes[0])].bytes

    def _copy(self, size: int, passes: int) -> float:
        """Seconds of an elementwise kernel that reads and writes ``size`` bytes ``passes`` times in all."""
        return max(passes * size / self.device.bandwidth, self.overhead or self.device.launch_overhead)

    def _operator(self, instruction: Instruction) -> tuple[float, float]:
        node = self.flow.nodes[instruction.node]
        assert isinstance(node, Compute)
        which = 1 if instruction.phase is Phase.BACKWARD else 0
        if node.kernel is None:
            host = dispatch_seconds(node.op, self.flow.graph.tensors, node.footprint.issued, self.device)[which]
        else:
            host = several_seconds(node.footprint.issued, self.device)[which]
        if which == 0:
            host += self._entered.get(node.op.name, 0) * self._call_seconds
        part = 1.0 if instruction.kind is Kind.OPERATOR else 0.5  # both gradients of a product are products of its size
        return part * self._price(node)[which], part * host if self.overhead else 0.0

    def _price(self, node: Compute) -> tuple[float, float]:
        """Forward and backward seconds on the device; equal operators are priced once."""
        shapes = tuple(self.flow.values[i].local for i in node.inputs)
        copies = ""
        if node.rules.kind == "view" and any(r is not None and r.owner >= 0 for r in node.footprint.results):
            copies = "copy_rows" if shapes[0].strides[-1:] == (1,) else "copy"
        key = (node.call, shapes, node.split, copies, node.op.grad)
        if key not in self._operators:
            times = op_times(
                node.op,
                node.rules,
                self.flow.graph.tensors,
                [node.split],
                self.mesh,
                self.program.training,
                copies=copies,
                pieces=self._pieces,
            )
            forward, backward = float(times[0, 0]), float(times[0, 1])
            if self.overhead and node.kernel is None and record(node.op.target).orders_operands:
                forward += sum(self._turned(operand) for operand in shapes if not is_batch_of_matrices(operand))
            for axis, size, often in exchanges(self.flow, node):  # these are instructions of their own
                seconds = float(collectives.all_reduce(size, self.mesh.axes[axis]))
                forward, backward = forward - seconds, backward - often * seconds
            self._operators[key] = (max(forward, 0.0), max(backward, 0.0))
        return self._operators[key]

    def _turned(self, operand: Strided) -> float:
        """Seconds in which an operand is copied for a product."""
        kernel = "copy_rows" if operand.strides[-1] == 1 else "copy"
        moved = memory_work(f"{kernel}/forward", operand.dtype, np.array([2.0 * operand.bytes]))
        return float(kernel_seconds(moved, self.device)[0])

    @cached_property
    def _pieces(self) -> tuple[float, ...]:
        """Into how many pieces as large as this rank's every mesh axis cuts."""
        place = self.flow.place
        return tuple(
            1.0 / cut[here] if isinstance(cut, tuple) else cut
            for cut, here in zip(place.cuts, place.coordinate, strict=True)
        )

    def _update(self) -> tuple[float, float]:
        graph, flow = self.flow.graph, self.flow
        trained = self.program.trained  # a parameter without a gradient is passed over
        sizes = [flow.values[flow.rest[p.tensor]].local.bytes for p in graph.parameters if p.tensor in trained]
        seconds, host = update_seconds(self.program.optimizer, sizes, self.device, self._dtype)
        return seconds, host if self.overhead else 0.0

    @cached_property
    def _dtype(self) -> str:
        return trained_dtype(self.flow.graph)
