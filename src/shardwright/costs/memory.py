"""Memory over time: the peak of one training step, when it is reached and what makes it up.

The instructions of a program are replayed: a value's storage comes to life where it is written and dies with the last value
that lies in it. Parameters, buffers, inputs, buckets and optimizer state live throughout. On CUDA storages pass through a
model of PyTorch's caching allocator, whose rounding counts. What is predicted is what ``torch.cuda.max_memory_allocated``
reports in a steady training loop that sets gradients to ``None`` after each step; of a step that is recorded as CUDA
graphs, whose passes lie in one segment for good (``runtime/planned_allocation.py``), what
``torch.cuda.max_memory_reserved`` reports. An optimizer that is not fused takes its temporaries beside that segment, and
they are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.cluster import Device
from shardwright.costs.memory_allocator import SMALL, Allocator, MemoryBlock, rounded, segment_for
from shardwright.costs.offsets import Lives
from shardwright.costs.optimizer import optimizer
from shardwright.program import Instruction, Kind, Program
from shardwright.program.recording import can_be_recorded

PARAMETERS, OPTIMIZER, BUFFERS, INPUTS = "parameters", "optimizer state", "buffers", "inputs"
GRADIENTS, ACTIVATIONS, FLOWING = "gradients", "activations", "activation gradients"
GATHERED, COMMUNICATION = "gathered copies", "communication buffers"
TEMPORARIES, WORKSPACE = "temporaries", "library workspace"
KIND_OF = {"value": ACTIVATIONS, "saved": ACTIVATIONS, "gradient": FLOWING, "flat": COMMUNICATION}
KIND_OF |= {"gathered": GATHERED, "resting": GRADIENTS}


KiB, MiB = 1 << 10, 1 << 20
_LARGE_WORKSPACES = ("H100", "H200", "H800", "H20", "B100", "B200", "B300")


def workspace(device: Device, training: bool = True) -> int:
    """Bytes the matrix-product library holds for good once a step has run (``aten/src/ATen/cuda/CublasHandlePool.cpp``).

    Every thread that multiplies owns a handle with its workspace, and the backward pass runs in a thread of its own.
    """
    if device.kind != "cuda":
        return 0
    one = 32 * MiB if any(name in device.name for name in _LARGE_WORKSPACES) else 8 * MiB + 128 * KiB
    return 2 * one if training else one


@dataclass
class Storage:
    """Bytes that live from the start of instruction ``born`` (-1: before the step) to the end of instruction ``dies``.

    ``what`` and ``module`` say what they are for; ``handed``: results of the forward pass lie there.
    """

    bytes: int
    kind: str
    what: str
    module: str
    born: int
    dies: int
    handed: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device over one step: ``curve``, those alive during every instruction, and what makes them up.

    ``planned``: what a step that is recorded keeps for good. ``rounds``: an allocator hands out what lives, in blocks.
    """

    curve: tuple[int, ...]
    storages: tuple[Storage, ...]
    rounds: bool
    planned: int | None = None

    @property
    def peak(self) -> int:
        """What the allocator has handed out at the worst moment."""
        return self._allocated[0]

    @property
    def reserved(self) -> int:
        """What is taken from the device by then."""
        return self._allocated[1] if self.planned is None else self.planned

    @property
    def recorded(self) -> bool:
        return self.planned is not None

    @property
    def needed(self) -> int:
        """What the device must have."""
        return self.peak if self.planned is None else self.planned

    @cached_property
    def _allocated(self) -> tuple[int, int]:
        """Peaks of allocated and reserved bytes when the allocator serves the storages; of a recorded step only somebody who
        reads them asks for these."""
        return _allocated(self.storages, len(self.curve)) if self.rounds else (max(self.curve), max(self.curve))

    def told(self, shown: Callable[[float], str]) -> str:
        """In words, what the allocator does with it; ``shown`` writes bytes."""
        if self.recorded:
            return f"recorded as CUDA graphs the step keeps it for good, {shown(self.peak)} are handed out at once."
        return f"the allocator reserves {shown(self.reserved)}."


def memory(program: Program, device: Device) -> MemoryUse:
    """Bytes over time of one step.

    Example
    -------
    >>> memory(program, mesh.device).peak <= mesh.device.usable_memory                           # doctest: +SKIP
    """
    storages = lifetimes(program, device)
    count = max(len(program.instructions), 1)
    change = np.zeros(count + 1, dtype=np.int64)
    for storage in storages:
        change[max(storage.born, 0)] += storage.bytes
        change[storage.dies + 1] -= storage.bytes
    curve = np.cumsum(change[:count])
    rounds = device.kind == "cuda"
    planned = _recorded(storages, program, device) if rounds and can_be_recorded(program) else None
    return MemoryUse(tuple(curve.tolist()), tuple(storages), rounds, planned)


def lifetimes(program: Program, device: Device) -> list[Storage]:
    """Every storage of a step, in the order in which they come to life."""
    return _Replay(program, device).run()


class _Replay:
    def __init__(self, program: Program, device: Device) -> None:
        self.program, self.flow, self.device = program, program.flow, device
        self.end = max(len(program.instructions) - 1, 0)
        self.storages: list[Storage] = []
        self.lies_in: dict[int, int] = {}
        """Value → the value in whose storage it lies."""
        self.of: dict[int, Storage] = {}
        self.held: dict[int, int] = {}
        """Per storage, by the value that it was made for, how many values still need it."""

    def run(self) -> list[Storage]:
        self._rest()
        results = set(map(self.program.slot_of, self.flow.results))
        for number, instruction in enumerate(self.program.instructions):
            idle = number in self.program.idle
            for slot in instruction.writes:
                if idle:
                    self._handed_on(slot, instruction)
                else:
                    self._write(slot, number, instruction)
                if slot in results and slot in self.lies_in:
                    self.of[self.lies_in[slot]].handed = True
            if instruction.temporary and not idle:
                self._passing(instruction, number)
            if instruction.kind is Kind.DEPOSIT:
                self._deposited(instruction)
            if instruction.kind is Kind.UPDATE:
                self._update(number, instruction)
            for slot in instruction.last:
                self._let_go(slot, number, slot in instruction.early)
        self.storages.sort(key=lambda storage: storage.born)
        return self.storages

    def _make(self, size: int, kind: str, what: str, module: str, born: int) -> Storage:
        storage = Storage(size, kind, what, module, born, self.end)
        self.storages.append(storage)
        return storage

    def _rest(self) -> None:
        """What lives throughout."""
        graph = self.flow.graph
        paths = {p.tensor: (PARAMETERS, p.paths[0]) for p in graph.parameters}
        paths |= {b.tensor: (BUFFERS, b.path) for b in graph.buffers}
        paths |= {c.tensor: (BUFFERS, c.tensor) for c in graph.constants}
        kept = optimizer(self.program.optimizer)
        states = kept.states if self.program.training else 0
        for tensor, value in self.flow.rest.items():
            kind, path = paths.get(tensor, (INPUTS, tensor))
            size = self.flow.values[value].local.bytes
            self._hold(value, self._make(size, kind, tensor if kind == INPUTS else kind[:-1], path, -1))
            if kind == PARAMETERS and tensor in self.program.trained:  # without a gradient nothing is kept
                dtype = self.flow.values[value].local.dtype
                if states and (beside := kept.beside(size, dtype)):
                    self._make(beside, PARAMETERS, "float32 parameter", path, -1)
                for _ in range(states):
                    self._make(kept.kept(size, dtype), OPTIMIZER, f"{self.program.optimizer} state", path, -1)
        for bucket in self.program.buckets:
            if bucket.prepared:
                path = graph.parameter_of[bucket.tensors[-1]].paths[0]
                self._make(
                    kept.kept(bucket.bytes, bucket.dtype),
                    GRADIENTS,
                    f"bucket of {len(bucket.tensors)} gradients",
                    path,
                    -1,
                )
        if extra := workspace(self.device, self.program.training):
            self._make(extra, WORKSPACE, "workspace of matrix products", "", -1)

    def _hold(self, slot: int, storage: Storage) -> None:
        self.lies_in[slot], self.of[slot], self.held[slot] = slot, storage, 1

    def _write(self, slot: int, number: int, instruction: Instruction) -> None:
        known = self.program.slots[slot]
        if known.alias >= 0:
            root = self.lies_in.get(known.alias)
            if root is not None:  # a prepared bucket is there anyway
                self.lies_in[slot] = root
                self.held[root] += 1
            return
        what, kind = self._described(slot, instruction), KIND_OF[known.role]
        self._hold(slot, self._make(known.bytes, kind, what, instruction.module, number))

    def _handed_on(self, slot: int, instruction: Instruction) -> None:
        """A sum to which nobody brings the other gradient is the one that there is; other idle instructions make nothing."""
        given = next((read for read in instruction.reads if read in self.lies_in), None)
        if instruction.kind is Kind.ACCUMULATE and given is not None:
            root = self.lies_in[slot] = self.lies_in[given]
            self.held[root] += 1

    def _described(self, slot: int, instruction: Instruction) -> str:
        known = self.program.slots[slot]
        if instruction.kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
            name = self.program.operator_name(instruction)
            return f"gradient from {name}" if known.role == "gradient" else name
        if known.role == "flat":
            return instruction.name + " in one"
        if known.role == "gradient":
            return f"gradient of {known.tensor}" if known.tensor else "gradients"
        return f"{known.tensor} in another layout"

    def _passing(self, instruction: Instruction, number: int) -> None:
        if instruction.collective:
            what, kind = f"{instruction.collective} buffer", COMMUNICATION
        elif instruction.node >= 0 and instruction.kind in (Kind.OPERATOR, Kind.INPUT, Kind.WEIGHT):
            what, kind = f"inside {self.program.operator_name(instruction)}", TEMPORARIES
        else:
            what, kind = f"inside {instruction.kind}", TEMPORARIES
        self._make(instruction.temporary, kind, what, instruction.module, number).dies = number

    def _let_go(self, slot: int, number: int, early: bool) -> None:
        root = self.lies_in.pop(slot, None)
        if root is None:
            return
        self.held[root] -= 1
        if self.held[root] == 0:
            storage = self.of.pop(root)
            storage.dies = max(storage.born, number - 1 if early else number)

    def _deposited(self, instruction: Instruction) -> None:
        """A parameter's gradient stays for the optimizer."""
        root = self.lies_in.get(instruction.reads[0])
        if root is not None:
            storage = self.of[root]
            if storage.kind != GRADIENTS:
                dtype = self.flow.values[self.flow.rest[instruction.name]].local.dtype
                storage.bytes = optimizer(self.program.optimizer).kept(storage.bytes, dtype)
            storage.kind, storage.what = GRADIENTS, "gradient"
            storage.module = self.flow.graph.parameter_of[instruction.name].paths[0]

    def _update(self, number: int, instruction: Instruction) -> None:
        kept = optimizer(self.program.optimizer)
        resting = (
            self.flow.values[self.flow.rest[p.tensor]].local
            for p in self.flow.graph.parameters
            if p.tensor in self.program.trained
        )
        sizes = [kept.kept(local.bytes, local.dtype) for local in resting]
        if kept.states == 2 and sizes:
            # AdamW's denominator: of all parameters at once where PyTorch updates them together (CUDA), else one by one:
            # its square root, the quotient, and the one of the parameter before, which the loop still holds.
            one_by_one = max(before + 2 * here for before, here in zip([0, *sizes], sizes, strict=False))
            size = sum(sizes) if self.device.kind == "cuda" else one_by_one
            self._make(size, TEMPORARIES, f"inside {instruction.name}", "", number).dies = number


def _allocated(storages: Sequence[Storage], count: int) -> tuple[int, int]:
    """Peaks of allocated and reserved bytes when the allocator serves these storages, twice: the second step finds its
    segments there and is the one a training loop repeats."""
    births: list[list[int]] = [[] for _ in range(count)]
    deaths: list[list[int]] = [[] for _ in range(count)]
    allocator = Allocator()
    blocks: dict[int, MemoryBlock | None] = {}
    for number, storage in enumerate(storages):
        if storage.born < 0:
            allocator.take(storage.bytes)
        else:
            births[storage.born].append(number)
            deaths[storage.dies].append(number)
    for _ in range(2):
        allocator.peak_allocated = allocator.allocated
        for event in range(count):
            for number in births[event]:
                blocks[number] = allocator.take(storages[number].bytes)
            for number in deaths[event]:
                allocator.give(blocks.pop(number))
    return allocator.peak_allocated, allocator.peak_reserved


def _recorded(storages: list[Storage], program: Program, device: Device) -> int:
    """Bytes reserved by a step that is recorded: everything that rests, inputs once more where recordings read them, the
    workspace of the stream on which they are made, and of both passes one segment for what is large, others for the rest.
    Results stay where they are handed out."""
    outside, small = Allocator(), Allocator()
    large: list[Storage] = []
    events: list[tuple[int, bool, int]] = []
    outside.take(workspace(device, training=False))
    for number, storage in enumerate(storages):
        if storage.born < 0:
            for _ in range(2 if storage.kind == INPUTS else 1):
                outside.take(storage.bytes)
        elif program.instructions[storage.born].kind is Kind.UPDATE or not storage.bytes:
            continue
        elif rounded(storage.bytes) > SMALL:
            large.append(storage)
        else:
            events += [(storage.born, True, number), (storage.dies + 1, False, number)]
    blocks: dict[int, MemoryBlock | None] = {}
    for _, taken, number in sorted(events):
        if taken:
            blocks[number] = small.take(storages[number].bytes)
        else:
            small.give(blocks.pop(number))
    end = len(program.instructions)
    ends = [end if s.handed else s.dies + 1 for s in large]
    columns = ([rounded(s.bytes) for s in large], [s.born for s in large], ends)
    arena = Lives(*(np.array(column, dtype=np.int64) for column in columns)).bound()
    return outside.reserved + small.peak_reserved + (segment_for(arena) if arena else 0)
