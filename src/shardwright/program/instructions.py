"""The program of one rank: what it does in one step, as a flat list of numbered instructions.

Price, simulation, memory and execution are all about these lines. An instruction names the values it reads, writes and
is the last to use, and the instructions it waits for; values are numbers into the program's table. Work on the ``compute``
stream runs in the order of the list, and so does what is sent along each mesh axis; between streams only what is written
under ``after`` holds. A communication that is started (``gather``, ``scatter``, ``reduce``) is awaited by an instruction of
its own. Numbers are stable: a trace, a profile and an error message all speak of "instruction 65 of rank 3".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from shardwright.graph import Graph
from shardwright.operators.strategy import Strategy
from shardwright.program.dataflow import Compute, Dataflow, LayoutChange
from shardwright.program.decisions import Sizes
from shardwright.program.steps import BoundStep, Step
from shardwright.program.sums import Leg, ReplicaSum

COMPUTE = "compute"
REDUCE, UPDATE = "R", "U"
"""Passes that stand beside those of a schedule: the reduction of gradients after the last of these, and the optimizer."""


class Phase(str, Enum):
    """The part of a step that an instruction belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    UPDATE = "update"

    __str__ = str.__str__


class Kind(str, Enum):
    """What an instruction does."""

    OPERATOR = "operator"
    """Computes a piece of an operator; in the backward pass, all of its gradients."""
    INPUT = "input"
    """Computes the gradients of an operator's inputs, those of its weights being an instruction of their own."""
    WEIGHT = "weight"
    EXCHANGE = "exchange"
    """Statistics between the pieces of the operator before it, inside its call."""
    CHANGE = "change"
    """One step of a change of layout, awaited."""
    PACK = "pack"
    """Copies parameters or gradients into one flat tensor, of a bundle or of a bucket."""
    GATHER = "gather"
    """Starts to gather a bundle of parameters (or one alone)."""
    SCATTER = "scatter"
    """Starts to scatter a bundle of gradients (or one alone)."""
    REDUCE = "reduce"
    """Starts one leg of the sum of a bucket between replicas."""
    AWAIT = "await"
    """Waits for what was started; what it carried is there from now on."""
    UNPACK = "unpack"
    """Copies the parameters of a bundle out of the flat tensor that was gathered."""
    ACCUMULATE = "accumulate"
    """Adds the gradients that several readers of a value bring."""
    ARRIVE = "arrive"
    """The gradient of one read of a parameter is known."""
    DEPOSIT = "deposit"
    """A gradient is complete and becomes the parameter's."""
    UPDATE = "update"
    """The optimizer's step."""
    SEND = "send"
    """Sends a part of a value, or of its gradient, to a rank of another stage; nothing is waited for."""
    RECEIVE = "receive"
    """Such a part arrives; whoever reads it waits for it."""

    __str__ = str.__str__


class Traveller(NamedTuple):
    """A parameter or gradient in a bundle: the node that reads it, the step it takes, with and without this rank's
    numbers."""

    node: int
    step: Step
    bound: BoundStep


class Bucket(NamedTuple):
    """Gradients summed together: their parameters, how many elements each has (on the largest rank), how they are summed.

    ``prepared``: its flat tensor lives on from step to step.
    """

    tensors: tuple[str, ...]
    elements: tuple[int, ...]
    way: ReplicaSum
    dtype: str
    itemsize: int
    prepared: bool

    @property
    def bytes(self) -> int:
        return self.way.elements * self.itemsize


class Instruction(NamedTuple):
    """One line of a program.

    ``reads`` and ``writes`` are values; ``last`` are those that nobody needs afterwards. ``node`` numbers the node of the
    dataflow it belongs to (-1: none). What it works with stands in ``steps`` (a change of layout: one step; a bundle: one
    for each traveller), ``leg`` and ``bucket``. ``collective`` and ``bytes`` say what is communicated, bytes being those of
    the larger side on the largest rank. ``temporary`` bytes are alive only inside it; ``early`` are values whose storage is
    gone before the most is alive inside.
    """

    kind: Kind
    phase: Phase
    name: str
    stream: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    module: str = ""
    node: int = -1
    steps: tuple[Traveller, ...] = ()
    leg: Leg | None = None
    bucket: int = -1
    collective: str = ""
    bytes: int = 0
    temporary: int = 0
    early: tuple[int, ...] = ()
    stage: int = 0
    microbatch: int = 0


class Slot(NamedTuple):
    """A value of a program: of which tensor, what it is (``value``, ``gradient``, ``gathered``, ``saved``, ``flat``,
    ``resting``), the bytes of the storage it lies in, and whose storage that is (``-1``: its own)."""

    tensor: str
    role: str
    bytes: int
    alias: int = -1


@dataclass(frozen=True)
class Program:
    """What one rank does in one step.

    ``slots`` are the values; the first of them are those of ``flow``. ``sections`` has the instructions of every kind of
    pass, in their order: forward (``F``); backward (``B``, to which recomputation belongs) and, where it is in two, its
    halves (``I``, ``W``); the reduction of gradients (``R``), unless the backward pass reduces them as it goes; the
    optimizer (``U``). ``gradients`` maps the values of ``flow`` whose gradient is known in the end to that
    gradient's slot; ``roots`` those the backward pass starts from.
    """

    flow: Dataflow
    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    sizes: Sizes
    optimizer: str
    sections: Mapping[str, tuple[int, ...]]
    gradients: Mapping[int, int]
    roots: Mapping[int, int]
    again: frozenset[int]
    """Nodes that run once more in the backward pass."""
    saved: Mapping[int, int]
    """Node → the slot of what it keeps of its own for its backward."""
    elsewhere: Mapping[int, int]
    """Values handed out that are not in the slot of their own number → the slot they are in."""

    def slot_of(self, value: int) -> int:
        """Where a value that is handed out is in the end."""
        return self.elsewhere.get(value, value)

    @cached_property
    def handed_out(self) -> frozenset[int]:
        """The slots of what outlives the forward pass by itself: results, and what becomes a buffer."""
        return frozenset(map(self.slot_of, (*self.flow.results, *(value for _, value in self.flow.mutations))))

    @property
    def forward(self) -> range:
        """The instructions of the forward pass: the first ones."""
        return range(len(self.sections["F"]))

    @property
    def backward(self) -> range:
        """Everything that follows the forward pass."""
        return range(len(self.sections["F"]), len(self.instructions))

    @cached_property
    def arrivals(self) -> tuple[int, ...]:
        """Where gradients of parameters are known: a pass adds them to those kept back, the reduction starts there."""
        return tuple(number for number in self.backward if self.instructions[number].kind is Kind.ARRIVE)

    @cached_property
    def performed(self) -> Mapping[str, tuple[int, ...]]:
        """What a pass of every kind performs: its section and, where gradients are reduced apart, the arrivals, in which it
        adds its gradients to those kept back. Of a pass in two halves they are in the second."""
        if REDUCE not in self.sections:
            return self.sections
        late = {kind: numbers for kind, numbers in self.sections.items() if kind in ("B", "W")}
        return {**self.sections, **{kind: tuple(sorted((*n, *self.arrivals))) for kind, n in late.items()}}

    @cached_property
    def communication(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Per kind of collective and mesh axis, how many of them the rank performs in a step, and their bytes."""
        count: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for number, instruction in enumerate(self.instructions):
            if instruction.collective and number not in self.idle:
                count[instruction.collective, instruction.stream] += 1
                size[instruction.collective, instruction.stream] += instruction.bytes
        return {key: (count[key], size[key]) for key in sorted(count)}

    @cached_property
    def idle(self) -> frozenset[int]:
        """The instructions that have nothing to do in a step that goes back from the loss."""
        arriving = [self.roots[value] for value in _started_from(self.flow) if value in self.roots]
        return _idle(self.instructions, self.slots, arriving) if len(arriving) < len(self.roots) else frozenset()

    def root(self, slot: int) -> int:
        """The value in whose storage a value lies."""
        root, known = slot, self._roots
        while root not in known and self.slots[root].alias >= 0:
            root = self.slots[root].alias
        known[slot] = known.get(root, root)
        return known[slot]

    @cached_property
    def _roots(self) -> dict[int, int]:
        return {}

    def read_by(self, arrival: Instruction) -> int:
        """The value whose gradient arrives: a parameter, as it was read."""
        node = self.flow.nodes[arrival.node] if arrival.node >= 0 else None
        return node.result if isinstance(node, LayoutChange) else self.flow.rest[arrival.name]

    @property
    def graph(self) -> Graph:
        return self.flow.graph

    @property
    def strategy(self) -> Strategy:
        return self.flow.strategy

    @property
    def training(self) -> bool:
        return self.flow.training

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that get a gradient."""
        return frozenset(i.name for i in self.instructions if i.kind is Kind.DEPOSIT)

    def operator_name(self, instruction: Instruction) -> str:
        """What an instruction computes, in the words of the operator library: ``linear``."""
        node = self.flow.nodes[instruction.node]
        return node.op.short if isinstance(node, Compute) else instruction.kind.value


def _started_from(flow: Dataflow) -> tuple[int, ...]:
    """The results that a step goes back from: what other stages read, and the first scalar; all, where there is neither."""
    tensors = [flow.values[root].tensor for root in flow.roots]
    sent = [root for root, tensor in zip(flow.roots, tensors, strict=True) if tensor in flow.sent]
    own = [root for root, tensor in zip(flow.roots, tensors, strict=True) if tensor not in flow.sent]
    scalars = [root for root in own if not flow.graph.tensors[flow.values[root].tensor].shape]
    return (*sent, *scalars[:1]) or flow.roots


def _idle(instructions: Sequence[Instruction], slots: Sequence[Slot], arriving: Sequence[int]) -> frozenset[int]:
    """The instructions of a backward pass that have nothing to do when gradients arrive in these slots alone.

    A gradient may come back from every result, so the program has what leads on from each of them: with a loss and its
    logits for results, a sum of the loss's gradient and one that somebody may bring for the logits. Where nobody brings one,
    what hangs on it alone is passed over: it takes no time, makes nothing and communicates nothing, and a sum hands on the
    gradient that there is. Prices and memory are those of such a step.
    """
    there, found = set(arriving), set[int]()
    passed: set[int] = set()  # nodes
    for number, one in enumerate(instructions):
        if one.phase is not Phase.BACKWARD:
            continue
        if one.kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT) or (
            one.kind is Kind.CHANGE and _gradient(slots, one.reads)
        ):
            if not there.isdisjoint(_gradient(slots, one.reads)):
                there.update(one.writes)
                passed.discard(one.node)
                continue
            passed.add(one.node)
        elif one.kind is Kind.ACCUMULATE:
            known = [slot for slot in one.reads if slot in there]
            there.update(one.writes if known else ())
            if len(known) == len(one.reads):
                continue
        elif one.kind is Kind.EXCHANGE:
            if one.node not in passed:
                continue
        elif not (one.kind is Kind.AWAIT and not one.writes and found.intersection(one.after)):
            there.update(one.writes)
            continue
        found.add(number)
    return frozenset(found)


def _gradient(slots: Sequence[Slot], reads: Sequence[int]) -> list[int]:
    return [slot for slot in reads if slots[slot].role == "gradient"]
