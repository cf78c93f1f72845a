"""Which bytes live from when to when in one training step of one rank.

The walk's events are replayed with the reference counts PyTorch would keep: a value lives until its last reader has run,
what autograd saved until the backward event that reads it, a gradient until it is consumed, added in place where nobody
else holds it. Views share the storage they look at. Parameters, buffers, inputs and optimiser state live throughout.
The clock is the number of the event; a storage lives from the start of event ``born`` to the end of event ``dies``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwright.costs.memory_kernels import workspace
from shardwright.costs.memory_probe import Strided, backward
from shardwright.costs.optimizer import optimizer
from shardwright.costs.redistribute import Step
from shardwright.costs.walk import Walk
from shardwright.costs.walk_nodes import Change, Compute

PARAMETERS, OPTIMISER, BUFFERS, INPUTS = "parameters", "optimiser state", "buffers", "inputs"
GRADIENTS, ACTIVATIONS, FLOWING = "gradients", "activations", "activation gradients"
COMMUNICATION, TEMPORARIES, WORKSPACE = "communication buffers", "temporaries", "library workspace"


@dataclass
class Storage:
    """Bytes with a beginning and an end. ``what`` and ``module`` say what they are for."""

    bytes: int
    kind: str
    what: str
    module: str
    born: int
    dies: int = -1
    holders: int = 0


def lifetimes(walk: Walk) -> list[Storage]:
    """Every storage of a step, in the order in which they come to life.

    >>> sum(s.bytes for s in lifetimes(walk) if s.kind == "parameters")
    """
    return _Replay(walk).run()


class _Replay:
    def __init__(self, walk: Walk) -> None:
        self.walk, self.nodes, self.device = walk, walk.nodes, walk.nodes.mesh.device.kind
        self.end = max(len(walk.events) - 1, 0)
        self.clock = -1
        self.storages: list[Storage] = []
        self.owner: dict[int, Storage] = {}
        self.saved: dict[int, list[Storage]] = {}
        self.gradient: dict[int, tuple[Storage, Strided]] = {}
        self.again: dict[int, Storage] = {}

    def run(self) -> list[Storage]:
        self._rest()
        readers = self._last_readers()
        for number, node in enumerate(self.nodes.nodes):
            before = len(self.storages)
            if isinstance(node, Compute):
                self._forward(number, node)
            else:
                self._change(number, node)
            for value in readers.get(number, ()):
                self._drop(self.owner[value])
            self._settle(before)
        if self.walk.backward_of:
            self._backward()
        for storage in self.storages:
            if storage.dies < 0:
                storage.dies = self.end
        return sorted(self.storages, key=lambda s: s.born)

    def _make(self, size: int, kind: str, what: str, module: str) -> Storage:
        self.storages.append(Storage(size, kind, what, module, self.clock))
        return self.storages[-1]

    def _passing(self, size: int, kind: str, what: str, module: str) -> None:
        """Something that lives within the current event only."""
        if size:
            self._make(size, kind, what, module).dies = self.clock

    def _hold(self, storage: Storage) -> Storage:
        storage.holders += 1
        return storage

    def _drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            storage.dies = max(storage.born, self.clock)

    def _settle(self, first: int) -> None:
        """What nobody took hold of dies where it was made."""
        for storage in self.storages[first:]:
            if storage.holders == 0 and storage.dies < 0:
                storage.dies = self.clock

    def _rest(self) -> None:
        """What lives throughout. Its holders never reach zero."""
        graph, rest = self.nodes.graph, self.nodes.rest
        paths = {p.tensor: (PARAMETERS, p.paths[0]) for p in graph.parameters}
        paths |= {b.tensor: (BUFFERS, b.path) for b in graph.buffers}
        paths |= {c.tensor: (BUFFERS, c.tensor) for c in graph.constants}
        states = optimizer(self.walk.optimiser).states if self.nodes.training else 0
        for tensor, value in rest.items():
            kind, path = paths.get(tensor, (INPUTS, tensor))
            size = self.nodes.values[value].local.bytes
            self.owner[value] = self._hold(self._make(size, kind, tensor if kind == INPUTS else kind[:-1], path))
            if kind == PARAMETERS and states and graph.parameter_of[tensor].trainable:
                self._hold(self._make(states * size, OPTIMISER, self.walk.optimiser + " state", path))
        if extra := workspace(self.device):
            self._hold(self._make(extra, WORKSPACE, "workspace of matrix products", ""))

    def _last_readers(self) -> dict[int, list[int]]:
        """Per node, the values whose last reader it is (or that nobody reads); results are never let go of."""
        last: dict[int, int] = {}
        for number, node in enumerate(self.nodes.nodes):
            made = (node.result,) if isinstance(node, Change) else node.outputs
            read = (node.source,) if isinstance(node, Change) else node.inputs
            for value in (*made, *read):
                if value is not None:
                    last[value] = number
        keep = set(self.nodes.results) | set(self.nodes.rest.values())
        table: dict[int, list[int]] = {}
        for value, number in last.items():
            if value not in keep:
                table.setdefault(number, []).append(value)
        return table

    def _forward(self, number: int, node: Compute) -> None:
        events, footprint, op = self.walk.forward_of[number], node.footprint, node.op
        self.clock = events[0]
        what = op.target.split(".")[1]
        fresh = [self._make(size, ACTIVATIONS, what, op.module) for size in footprint.fresh]
        self._passing(footprint.temporary, TEMPORARIES, f"inside {what}", op.module)
        for value, result in zip(node.outputs, footprint.results, strict=False):
            if value is not None and result is not None:
                source = fresh[result.owner] if result.owner >= 0 else self.owner[node.inputs[-1 - result.owner]]
                self.owner[value] = self._hold(source)
        for value in node.outputs:
            if value is not None and value not in self.owner:
                self.owner[value] = self._hold(
                    self._make(self.nodes.values[value].local.bytes, ACTIVATIONS, what, op.module)
                )
        if number in self.walk.backward_of:
            inputs = [node.inputs[i] for i in footprint.saved_inputs if node.inputs[i] not in self._gathered_again]
            kept = [self.owner[value] for value in inputs] + [fresh[i] for i in footprint.saved_fresh]
            self.saved[number] = [self._hold(storage) for storage in kept]
        self.clock = events[-1]

    @property
    def _gathered_again(self) -> set[int]:
        found = getattr(self, "_gathered", None)
        if found is None:
            found = {n.result for n in self.nodes.nodes if isinstance(n, Change) and n.again}
            self._gathered = found
        return found

    def _change(self, number: int, node: Change) -> None:
        what = f"{self.nodes.values[node.result].tensor} in another layout"
        kind = COMMUNICATION if node.gathers else ACTIVATIONS
        events = self.walk.forward_of[number]
        current = self._steps(node.steps.forward, events, self.owner[node.source], kind, what, node.module)
        self.owner[node.result] = self._hold(current)

    def _steps(
        self, steps: tuple[Step, ...], events: tuple[int, ...], current: Storage, kind: str, what: str, module: str
    ) -> Storage:
        """The storage a sequence of steps ends in; those on the way live for the step after them."""
        for step, event in zip(steps, events, strict=True):
            self.clock = event
            if step.kind in ("slice", "mask") and step.window is None:
                continue
            self._passing(_buffers(step), COMMUNICATION, f"{step.kind} buffer", module)
            made = self._make(step.bytes_out, kind, what, module)
            if current.holders == 0:  # a result of the step before, which only this step reads
                current.dies = self.clock
            current = made
        return current

    def _backward(self) -> None:
        waiting = self._contributions()
        for root in self.nodes.roots:
            self._deposit(root, self._make(4, FLOWING, "gradient of the loss", ""), self.nodes.values[root].local)
        buckets = {name: (names, events) for names, events in self.walk.buckets for name in names}
        for number in sorted(self.walk.backward_of, reverse=True):
            node = self.nodes.nodes[number]
            before = len(self.storages)
            if isinstance(node, Compute):
                self._backward_operator(number, node)
            else:
                self._backward_change(number, node)
            self._settle(before)
            for value in dict.fromkeys((node.source,) if isinstance(node, Change) else node.inputs):
                waiting[value] -= 1
                if waiting[value] == 0 and value in self.gradient:
                    self._complete(value, buckets)
        self._update()

    def _contributions(self) -> dict[int, int]:
        count: dict[int, int] = {}
        for number in self.walk.backward_of:
            node = self.nodes.nodes[number]
            for value in dict.fromkeys((node.source,) if isinstance(node, Change) else node.inputs):
                count[value] = count.get(value, 0) + 1
        return count

    def _backward_operator(self, number: int, node: Compute) -> None:
        events, op = self.walk.backward_of[number], node.op
        self._gather_again(node, events[0])
        self.clock = events[0]
        given = tuple(self.nodes.values[i].local for i in node.inputs)
        arrived = [None if o is None else self.gradient.pop(o, None) for o in node.outputs]
        gradients = [None if a is None else replace(a[1], grad=False) for a in arrived]
        gradients += [None] * (len(node.footprint.results) - len(gradients))
        result = backward(node.call, given, tuple(gradients[: len(node.footprint.results)]), self.device, node.kernel)
        what = op.target.split(".")[1]
        fresh = [self._make(size, FLOWING, f"gradient from {what}", op.module) for size in result.fresh]
        self._passing(result.temporary, TEMPORARIES, f"inside {what}, backward", op.module)
        self.clock = events[-1]
        given_to: set[int] = set()
        for value, gradient in zip(node.inputs, result.gradients, strict=True):
            if gradient is None or value in given_to or not self.nodes.values[value].local.grad:
                continue
            given_to.add(value)
            view = arrived[-1 - gradient.owner] if gradient.owner < 0 else None
            self._deposit(value, view[0] if view is not None else fresh[max(gradient.owner, 0)], gradient.tensor)
        self._let_go(a[0] for a in arrived if a is not None)
        self._let_go(self.saved.pop(number, ()))
        self._let_go(self.again.pop(n) for n in self._done_with(number))

    def _gather_again(self, node: Compute, until: int) -> None:
        """Parameters freed after their forward use are gathered once more, and live until their last backward reader."""
        for number, events in self.walk.regather_of.items():
            change = self.nodes.nodes[number]
            assert isinstance(change, Change)
            if change.result in node.inputs and number not in self.again and events and events[-1] < until:
                what = f"{self.nodes.values[change.result].tensor} gathered again"
                source = self.owner[change.source]
                made = self._steps(change.steps.forward, events, source, COMMUNICATION, what, change.module)
                self.again[number] = self._hold(made)

    def _done_with(self, number: int) -> list[int]:
        """The gathers that no earlier node reads, so that backward needs them no more once ``number`` is through."""
        found = []
        for gather in self.again:
            change = self.nodes.nodes[gather]
            assert isinstance(change, Change)
            first = min(i for i in self._readers_of(change.result))
            if first >= number:
                found.append(gather)
        return found

    def _readers_of(self, value: int) -> list[int]:
        table = getattr(self, "_reader_table", None)
        if table is None:
            table = {}
            for number in self.walk.backward_of:
                node = self.nodes.nodes[number]
                for read in (node.source,) if isinstance(node, Change) else node.inputs:
                    table.setdefault(read, []).append(number)
            self._reader_table = table
        return table.get(value, [0])

    def _backward_change(self, number: int, node: Change) -> None:
        events = self.walk.backward_of[number]
        found = self.gradient.pop(node.result, None)
        if found is None:
            return
        current, local = found
        what = f"gradient of {self.nodes.values[node.source].tensor}"
        made = self._steps(node.steps.backward, events, current, FLOWING, what, node.module)
        if events:
            self.clock = events[-1]
            local = Strided.contiguous(self.nodes.values[node.source].local.shape, local.dtype)
        self._deposit(node.source, made, local)
        self._drop(current)

    def _deposit(self, value: int, storage: Storage, local: Strided) -> None:
        """A gradient arrives: kept if it is the first, else added, in place if nobody else holds the first one."""
        known = self.gradient.get(value)
        if known is None:
            self.gradient[value] = (self._hold(storage), local)
        elif known[0].holders > 1:
            size = self.nodes.values[value].local.bytes
            total = self._make(size, FLOWING, "sum of gradients", storage.module)
            self._drop(known[0])
            self.gradient[value] = (self._hold(total), known[1])

    def _complete(self, value: int, buckets: dict[str, tuple[tuple[str, ...], tuple[int, ...]]]) -> None:
        """The gradient of a parameter is complete: it stays for the optimiser, alone or in a bucket."""
        tensor = self.nodes.values[value].tensor
        parameter = self.nodes.graph.parameter_of.get(tensor)
        if parameter is None or self.nodes.rest[tensor] != value:
            if tensor in self.nodes.rest and self.nodes.rest[tensor] == value:
                self._drop(self.gradient.pop(value)[0])
            return
        storage, local = self.gradient[value]
        if storage.holders > 1:
            copy = self._make(self.nodes.values[value].local.bytes, GRADIENTS, "gradient", parameter.paths[0])
            self._drop(storage)
            storage = self._hold(copy)
            self.gradient[value] = (storage, local)
        storage.kind, storage.what, storage.module = GRADIENTS, "gradient", parameter.paths[0]
        if tensor not in buckets or tensor != buckets[tensor][0][-1]:
            return
        names, events = buckets[tensor]  # the last of its bucket: one flat tensor takes the place of all of them
        members = [self.nodes.rest[name] for name in names]
        self.clock = max(self.clock, events[0])
        size = sum(self.nodes.values[member].local.bytes for member in members)
        flat = self._make(size, GRADIENTS, f"bucket of {len(names)} gradients", parameter.paths[0])
        for member in members:
            self._drop(self.gradient[member][0])
            self.gradient[member] = (self._hold(flat), self.gradient[member][1])

    def _update(self) -> None:
        self.clock = self.end
        sizes = [
            self.nodes.values[value].local.bytes
            for tensor, value in self.nodes.rest.items()
            if value in self.gradient and tensor in self.nodes.graph.parameter_of
        ]
        if optimizer(self.walk.optimiser).states == 2 and sizes:
            # AdamW's denominator: for all parameters at once where PyTorch updates them together, else one by one, twice.
            size = sum(sizes) if self.device == "cuda" else 2 * max(sizes)
            self._passing(size, TEMPORARIES, f"inside {self.walk.optimiser}", "")

    def _let_go(self, storages: Iterable[Storage]) -> None:
        for storage in list(storages):
            self._drop(storage)


def _buffers(step: Step) -> int:
    """Bytes a collective needs beside its input and its result: pieces put in order before or after it."""
    inner = bool(step.dim) or bool(step.to_dim)
    if step.kind == "all_gather" and inner:
        return step.bytes_out
    if step.kind == "reduce_scatter" and inner:
        return step.bytes_in
    if step.kind == "all_to_all":
        return step.bytes_in + step.bytes_out
    return abs(step.bytes_out - step.bytes_in) if step.kind in ("halo", "halo_reduce") else 0
