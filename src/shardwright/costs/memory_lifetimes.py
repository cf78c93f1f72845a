"""Which bytes live from when to when in one training step of one rank.

The walk's events are replayed with the reference counts PyTorch would keep: a value lives until its last reader has run,
what autograd saved until the backward event that reads it, a gradient until it is consumed, added in place where nobody
else holds it. Views share the storage they look at. Parameters, buffers, inputs and optimiser state live throughout. Of a
recomputed block only the inputs are kept; what it saves lives from its second forward pass on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from shardwright.costs.memory_kernels import workspace
from shardwright.costs.memory_ledger import (
    ACTIVATIONS,
    BUFFERS,
    COMMUNICATION,
    FLOWING,
    GRADIENTS,
    INPUTS,
    OPTIMISER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
    Ledger,
    Storage,
)
from shardwright.costs.memory_probe import Strided, backward
from shardwright.costs.optimizer import optimizer
from shardwright.costs.redistribute import Step, first_gather
from shardwright.costs.walk import Walk
from shardwright.costs.walk_blocks import Block, made, read, saves
from shardwright.costs.walk_gradients import Bucket
from shardwright.costs.walk_nodes import Change, Compute


def lifetimes(walk: Walk) -> list[Storage]:
    """Every storage of a step, in the order in which they come to life.

    >>> sum(s.bytes for s in lifetimes(walk) if s.kind == "parameters")
    """
    return _Replay(walk).run()


class _Replay:
    def __init__(self, walk: Walk) -> None:
        self.walk, self.nodes, self.device = walk, walk.nodes, walk.nodes.mesh.device.kind
        self.end = max(len(walk.events) - 1, 0)
        self.ledger = Ledger()
        self.owner: dict[int, Storage] = {}
        self.saved: dict[int, list[Storage]] = {}
        self.fresh: dict[int, list[Storage]] = {}
        self.gradient: dict[int, tuple[Storage, Strided]] = {}
        self.passed_on: set[int] = set()
        """Values whose gradient is the very tensor that arrived at their reader, not a new one."""
        self.again: dict[int, Storage] = {}
        self.entered: dict[Block, list[Storage]] = {}
        self.recomputed: set[Block] = set()

    def run(self) -> list[Storage]:
        self._rest()
        done = self._last_readers(range(len(self.nodes.nodes)), {*self.nodes.results, *self.nodes.rest.values()})
        for number in range(len(self.nodes.nodes)):
            block = self.walk.blocks.get(number)
            if block is not None and number == block.nodes.start:
                self._enter(block)
            self._run(number, self.walk.forward_of[number], done, keeps=block is None)
        if self.walk.backward_of:
            self._backward()
        return self.ledger.close(self.end)

    def _rest(self) -> None:
        """What lives throughout. Its holders never reach zero."""
        graph, ledger = self.nodes.graph, self.ledger
        paths = {p.tensor: (PARAMETERS, p.paths[0]) for p in graph.parameters}
        paths |= {b.tensor: (BUFFERS, b.path) for b in graph.buffers}
        paths |= {c.tensor: (BUFFERS, c.tensor) for c in graph.constants}
        states = optimizer(self.walk.optimiser).states if self.nodes.training else 0
        for tensor, value in self.nodes.rest.items():
            kind, path = paths.get(tensor, (INPUTS, tensor))
            size = self.nodes.values[value].local.bytes
            self.owner[value] = ledger.hold(ledger.make(size, kind, tensor if kind == INPUTS else kind[:-1], path))
            if kind == PARAMETERS and graph.parameter_of[tensor].trainable:
                for _ in range(states):
                    ledger.hold(ledger.make(size, OPTIMISER, f"{self.walk.optimiser} state", path))
        for flat in self.walk.flats:
            ledger.clock = flat.born
            ledger.passing(flat.bytes, COMMUNICATION, "parameters or gradients in one", "", flat.dies)
        ledger.clock = -1
        if extra := workspace(self.nodes.mesh.device, self.nodes.training):
            ledger.hold(ledger.make(extra, WORKSPACE, "workspace of matrix products", ""))

    def _run(self, number: int, events: tuple[int, ...], done: Mapping[int, list[int]], keeps: bool) -> None:
        """A node of a forward pass; ``keeps``: what autograd saves is held until its backward."""
        node, before = self.nodes.nodes[number], len(self.ledger.storages)
        if isinstance(node, Compute):
            self._forward(number, node, events, keeps)
        else:
            self._change(number, node, events)
        self.ledger.drop(*(self.owner[value] for value in done.get(number, ())))
        self.ledger.settle(before)

    def _enter(self, block: Block) -> None:
        """The inputs of a recomputed block are kept; a parameter gathered for an earlier reader is gathered again."""
        inputs = [self.owner[v] for v in block.inputs if self.nodes.roots_of[v] not in self._freed]
        self.entered[block] = [self.ledger.hold(storage) for storage in inputs]

    def _recompute(self, block: Block) -> None:
        """The forward pass of a block once more; what it saves is held until the backward of the node that saved it."""
        self.recomputed.add(block)
        nodes, span = self.nodes.nodes, range(block.nodes.start, block.last + 1)
        inside = {value for number in block.again for value in made(nodes[number])}
        seen = {value for number in span for value in (*made(nodes[number]), *read(nodes[number]))}
        done = self._last_readers(span, keep=seen - inside)
        for number in block.again:
            self._run(number, self.walk.recomputed_of[number], done, keeps=True)
        if block.last not in block.again:  # it only had its inputs to save
            node = nodes[block.last]
            assert isinstance(node, Compute)
            self._save(block.last, node, [])
            self.ledger.drop(*(self.owner[value] for value in done.get(block.last, ())))

    def _last_readers(self, numbers: range, keep: set[int]) -> dict[int, list[int]]:
        """Per node, the values whose last reader it is (or that nobody reads), except those to ``keep``."""
        last: dict[int, int] = {}
        for number in numbers:
            node = self.nodes.nodes[number]
            last.update(dict.fromkeys((*made(node), *read(node)), number))
        table: dict[int, list[int]] = {}
        for value, number in last.items():
            if value not in keep:
                table.setdefault(number, []).append(value)
        return table

    @cached_property
    def _freed(self) -> dict[int, int]:
        """Values that are gathered again for the backward pass → the node that gathers them."""
        return {n.result: i for i, n in enumerate(self.nodes.nodes) if isinstance(n, Change) and n.again}

    def _forward(self, number: int, node: Compute, events: tuple[int, ...], keeps: bool) -> None:
        footprint, op, ledger = node.footprint, node.op, self.ledger
        ledger.clock = events[0]
        what = op.target.split(".")[1]
        fresh = [ledger.make(size, ACTIVATIONS, what, op.module) for size in footprint.fresh]
        ledger.passing(footprint.temporary, TEMPORARIES, f"inside {what}", op.module)
        for value, result in zip(node.outputs, footprint.results, strict=False):
            if value is not None and result is not None:
                source = fresh[result.owner] if result.owner >= 0 else self.owner[node.inputs[-1 - result.owner]]
                self.owner[value] = ledger.hold(source)
        if keeps:
            self._save(number, node, fresh)
        ledger.clock = events[-1]

    def _save(self, number: int, node: Compute, fresh: list[Storage]) -> None:
        """What autograd saves; parameters to be gathered again are noted only, unless a recomputed block just did so."""
        if number not in self.walk.backward_of:
            return
        inputs = [node.inputs[i] for i in node.footprint.saved_inputs]
        kept = [self.owner[v] for v in inputs if not self._noted(v, number)]
        kept += [fresh[i] for i in node.footprint.saved_fresh]
        self.saved[number], self.fresh[number] = [self.ledger.hold(storage) for storage in kept], fresh

    def _noted(self, value: int, reader: int) -> bool:
        gather, block = self._freed.get(self.nodes.roots_of[value]), self.walk.blocks.get(reader)
        return gather is not None and (block is None or gather not in block.nodes)

    def _change(self, number: int, node: Change, events: tuple[int, ...]) -> None:
        what = f"{self.nodes.values[node.result].tensor} in another layout"
        kind = COMMUNICATION if node.reads else ACTIVATIONS
        used = self.walk.gathered.get(number) if events == self.walk.forward_of[number] else None
        result = self._steps(node.steps.forward, events, self.owner[node.source], kind, what, node.module, used)
        self.owner[node.result] = self.ledger.hold(result)

    def _steps(
        self,
        steps: tuple[Step, ...],
        events: tuple[int, ...],
        current: Storage,
        kind: str,
        what: str,
        module: str,
        awaited: int | None = None,
    ) -> Storage:
        """The storage a sequence of steps ends in; those on the way live until the step after them has run.

        ``awaited``: the first gather was started ahead and is awaited right before this event. What is gathered in a bundle
        has a storage of its own from its unpacking on.
        """
        ahead = first_gather(step.kind for step in steps)
        for place, (step, event) in enumerate(zip(steps, events, strict=True)):
            event = self.walk.landed.get(event, event)
            self.ledger.clock = event
            if step.kind in ("slice", "mask"):
                continue
            until = max(event, min(awaited, self.end) - 1) if awaited is not None and place == ahead else event
            self.ledger.passing(_buffers(step), COMMUNICATION, f"{step.kind} buffer", module, until)
            if until > event and step.dim:
                self.ledger.clock = until  # the pieces are put in order when they are awaited
            made = self.ledger.make(step.bytes_out, kind, what, module)
            if current.holders == 0:  # a result of the step before, which only this step reads
                current.dies = self.ledger.clock
            current = made
        return current

    def _backward(self) -> None:
        waiting = Counter(value for number in self.walk.backward_of for value in set(read(self.nodes.nodes[number])))
        for root in self.nodes.roots:
            loss = self.ledger.make(4, FLOWING, "gradient of the loss", "")
            self._deposit(root, loss, self.nodes.values[root].local)
        for number in sorted(self.walk.backward_of, reverse=True):
            node = self.nodes.nodes[number]
            before = len(self.ledger.storages)
            if isinstance(node, Compute):
                self._backward_operator(number, node)
            else:
                self._backward_change(number, node)
            self.ledger.settle(before)
            block = self.walk.blocks.get(number)
            if block is not None and number == block.first:
                self.ledger.drop(*self.entered.pop(block))
            for value in set(read(node)):
                waiting[value] -= 1
                if waiting[value] == 0 and value in self.gradient:
                    self._complete(value)
        for bucket in self.walk.buckets:
            self._pack(bucket)
        self._update()

    def _backward_operator(self, number: int, node: Compute) -> None:
        events, op, ledger = self.walk.backward_of[number], node.op, self.ledger
        block = self.walk.blocks.get(number)
        if block is not None and saves(node) and block not in self.recomputed:
            self._recompute(block)
        self._gather_again(number, node)
        ledger.clock = events[0]
        given = tuple(self.nodes.values[i].local for i in node.inputs)
        count = len(node.footprint.results)
        arrived = [None if o is None else self.gradient.pop(o, None) for o in node.outputs]
        arrived = (arrived + [None] * count)[:count]
        gradients = tuple(None if a is None else a[1].without_gradient for a in arrived)
        result = backward(node.call, given, gradients, self.device, node.kernel)
        saved = self.fresh.pop(number, ())
        freed = [saved[i] for i in result.early if i < len(saved) and saved[i].holders == 1]
        what = op.target.split(".")[1]
        fresh = [ledger.make(size, FLOWING, f"gradient from {what}", op.module) for size in result.fresh]
        ledger.passing(result.temporary, TEMPORARIES, f"inside {what}, backward", op.module)
        ledger.clock = events[-1]
        for place, (value, gradient) in enumerate(zip(node.inputs, result.gradients, strict=True)):
            if gradient is None or value in node.inputs[:place] or not self.nodes.values[value].local.grad:
                continue
            view = arrived[-1 - gradient.owner] if gradient.owner < 0 else None
            storage = view[0] if view is not None else fresh[gradient.owner]
            if view is not None and value not in self.gradient:
                self.passed_on.add(value)
            self._deposit(value, storage, gradient.tensor)
        ledger.drop(*(a[0] for a in arrived if a is not None), *self.saved.pop(number, ()))
        for storage in freed:  # gone before the most was alive inside this event
            storage.dies = max(storage.born, events[0] - 1)

    def _gather_again(self, reader: int, node: Compute) -> None:
        """Parameters freed after their forward use are gathered once more, until their gradient is known."""
        for place in node.footprint.saved_inputs:
            number = self._freed.get(self.nodes.roots_of[node.inputs[place]])
            if number is None or number in self.again or not self._noted(node.inputs[place], reader):
                continue
            change = self.nodes.nodes[number]
            assert isinstance(change, Change)
            events, used = self.walk.again[number]
            what = f"{self.nodes.values[change.result].tensor} gathered again"
            source = self.owner[change.source]
            made = self._steps(change.steps.forward, events, source, COMMUNICATION, what, change.module, used)
            self.again[number] = self.ledger.hold(made)

    def _backward_change(self, number: int, node: Change) -> None:
        found = self.gradient.pop(node.result, None)
        if found is None:
            return
        (current, local), events = found, self.walk.backward_of[number]
        if number in self.again:
            self.ledger.drop(self.again.pop(number))
        source = self.nodes.values[node.source]
        what = f"gradient of {source.tensor}"
        before, whole = self.ledger.clock, source.tensor in self.nodes.strategy.whole_gradients
        if whole:
            current.kind, current.what, current.module = GRADIENTS, "whole gradient", node.module
        made = self._steps(node.steps.backward, events, current, FLOWING, what, node.module)
        packed = self.walk.packed.get(number)
        if packed is not None:  # the bundle has it from here on
            self.ledger.clock = packed
            self.ledger.drop(current)
        if events:
            self.ledger.clock = max(self.ledger.clock, min(self.walk.awaited.get(number, 0), self.end))
            local = Strided.contiguous(source.local.shape, local.dtype)
        self._deposit(node.source, made, local)
        if packed is None:
            self.ledger.drop(current)
        self.ledger.clock = before  # that was later; the backward pass goes on where it was

    def _deposit(self, value: int, storage: Storage, local: Strided) -> None:
        """A gradient arrives: kept if it is the first, else added, in place if nobody else holds the first one."""
        known = self.gradient.get(value)
        if known is None:
            self.gradient[value] = (self.ledger.hold(storage), local)
        elif known[0].holders > 1:
            size = self.nodes.values[value].local.bytes
            added = self.ledger.make(size, FLOWING, "sum of gradients", storage.module)
            self.ledger.drop(known[0])
            self.passed_on.discard(value)
            self.gradient[value] = (self.ledger.hold(added), known[1])

    def _complete(self, value: int) -> None:
        """A parameter's gradient stays for the optimiser; if it is somebody else's tensor too, a copy of it does."""
        tensor = self.nodes.values[value].tensor
        if self.nodes.rest.get(tensor) != value:
            return
        parameter = self.nodes.graph.parameter_of.get(tensor)
        if parameter is None:  # an input that asks for a gradient
            return
        storage, local = self.gradient[value]
        if storage.holders > 1 and value in self.passed_on:
            size = self.nodes.values[value].local.bytes
            copy = self.ledger.hold(self.ledger.make(size, GRADIENTS, "gradient", parameter.paths[0]))
            self.ledger.drop(storage)
            storage = copy
        storage.kind, storage.what, storage.module = GRADIENTS, "gradient", parameter.paths[0]
        self.gradient[value] = (storage, local)

    def _pack(self, bucket: Bucket) -> None:
        """One flat tensor takes the place of the gradients of a bucket; a prepared one was there all along."""
        rest = self.nodes.rest
        members = [(rest[t], event) for t, event in zip(bucket.tensors, bucket.packed, strict=True)]
        members = [(value, event) for value, event in members if value in self.gradient]
        if not members:
            return
        path = self.nodes.graph.parameter_of[bucket.tensors[-1]].paths[0]
        self.ledger.clock = -1 if bucket.prepared else bucket.packed[0]
        flat = self.ledger.make(bucket.bytes, GRADIENTS, f"bucket of {len(members)} gradients", path)
        for value, event in members:
            self.ledger.clock = event
            self.ledger.drop(self.gradient[value][0])
            self.gradient[value] = (self.ledger.hold(flat), self.gradient[value][1])

    def _update(self) -> None:
        self.ledger.clock = self.end
        sizes = [
            self.nodes.values[self.nodes.rest[p.tensor]].local.bytes
            for p in self.nodes.graph.parameters
            if self.nodes.rest[p.tensor] in self.gradient
        ]
        if optimizer(self.walk.optimiser).states == 2 and sizes:
            # AdamW's denominator: of all parameters at once where PyTorch updates them together (CUDA), else one by one:
            # its square root, the quotient, and the one of the parameter before, which the loop still holds.
            one_by_one = max(before + 2 * here for before, here in zip([0, *sizes], sizes, strict=False))
            size = sum(sizes) if self.device == "cuda" else one_by_one
            self.ledger.passing(size, TEMPORARIES, f"inside {self.walk.optimiser}", "")


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
