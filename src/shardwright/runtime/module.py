"""The module that training loops see: DTensor parameters under their original names, driving one rank's program.

``forward`` takes what the original module took and gives what it gave. Eagerly it runs the program with gathers ahead of
use and gradient reductions overlapped with backward; under ``torch.compile`` it runs the same program with everything
inline, which the compiler schedules itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright._torch_compat import flatten_tree, local_of, unflatten_tree
from shardwright.costs.bundles import bundles
from shardwright.costs.replica_sums import replica_axes
from shardwright.errors import RunError
from shardwright.frontend.containers import restored_tree
from shardwright.graph import Constant, Graph
from shardwright.lowering.collectives import BoundStep, Line
from shardwright.lowering.emit import direct, emit
from shardwright.lowering.program import Change, Compute, Program, Read, Result, parameter_reads
from shardwright.lowering.randomness import draws
from shardwright.lowering.recompute import with_recomputation
from shardwright.operators.rules import largest_shard
from shardwright.runtime.agreement import agree, contents, digest
from shardwright.runtime.gradients import Gradients, Slot
from shardwright.runtime.inputs import Arguments, cut
from shardwright.runtime.leaves import Leaf
from shardwright.runtime.reading import Reader, ReadingQueue


class ParallelModule(torch.nn.Module):
    """One rank's share of a model. Made by :func:`shardwright.parallelize`, not by hand."""

    def __init__(
        self,
        program: Program,
        mesh: DeviceMesh,
        tensors: Mapping[str, torch.nn.Parameter | Tensor],
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        recompute: Sequence[str] = (),
    ) -> None:
        """``tensors`` holds parameters (as DTensors) and buffers (local) by the graph's names."""
        super().__init__()
        self.program, self.mesh = program, mesh
        self.graph: Graph = program.graph
        self.device = device_of(mesh)
        self.groups = {name: mesh.get_group(name).group_name for name, _ in program.place.axes}
        lines = [self._line(program.place.line(axis)) for axis in range(len(program.place.axes))]
        self.gradients = Gradients(program.mesh, lines, reduce_dtype=reduce_dtype)
        self.queue = ReadingQueue()
        self._read: list[str] = []
        self._own(tensors)
        readers = self._readers(compute_dtype)
        self._bundle(readers, recompute)
        # Kept out of the module tree: their state is this module's own, and names in state_dict() stay the original ones.
        eager, whole = emit(program, self.groups, self.device, readers), emit(program, self.groups, self.device)
        object.__setattr__(self, "_eager", direct(with_recomputation(eager, recompute)))
        object.__setattr__(self, "_whole", with_recomputation(whole, recompute))
        object.__setattr__(self, "_output_tree", restored_tree(self.graph.output_tree))
        self._constants = [_constant(c, program, self.device) for c in self.graph.constants]
        self._arguments = Arguments(self.graph, program.strategy.resting, program.place, self.device)
        self.draws = any(isinstance(i, Compute) and draws(i.op, i.kind) for i in program.instructions)
        self._mode_free = not self.graph.mutations and not self.draws
        self._has_loss = any(
            isinstance(r, Result) and self.graph.tensors[r.tensor].grad and self.graph.tensors[r.tensor].elements == 1
            for r in program.results
        )
        self._met = False
        self.train(self.graph.training)

    _eager: Callable[..., Any]
    _whole: torch.fx.GraphModule

    def _own(self, tensors: Mapping[str, torch.nn.Parameter | Tensor]) -> None:
        """Register everything under its original path, tied weights under all of theirs."""
        self._paths: dict[str, str] = {}
        self._home: dict[str, tuple[dict[str, Any], str]] = {}
        for parameter in self.graph.parameters:
            for path in parameter.paths:
                owner, leaf = self._owner(path)
                owner.register_parameter(leaf, tensors[parameter.tensor])  # type: ignore[arg-type]  # by its key
            self._paths[parameter.tensor] = parameter.paths[0]
            self._home[parameter.tensor] = (owner._parameters, leaf)
        for buffer in self.graph.buffers:
            owner, leaf = self._owner(buffer.path)
            owner.register_buffer(leaf, tensors[buffer.tensor], persistent=buffer.persistent)
            self._paths[buffer.tensor] = buffer.path
            self._home[buffer.tensor] = (owner._buffers, leaf)

    def _owner(self, path: str) -> tuple[torch.nn.Module, str]:
        *parents, leaf = path.split(".")
        owner: torch.nn.Module = self
        for name in parents:
            if name not in owner._modules:
                owner.add_module(name, torch.nn.Module())
            owner = owner.get_submodule(name)
        return owner, leaf

    def _held(self, tensor: str) -> Tensor:
        """The parameter or buffer behind a name of the graph, as it is now."""
        held, key = self._home[tensor]
        return held[key]

    def _readers(self, dtype: torch.dtype | None) -> dict[str, Reader]:
        """A reader for every change of layout that starts from a parameter; others are used as the leaves that they are."""
        program, parameters = self.program, self.graph.parameter_of
        used = {name for i in program.instructions if isinstance(i, Compute) for name in i.inputs}
        handed_out = {result.value for result in program.results if isinstance(result, Result)}
        reads: list[tuple[str, str, tuple[BoundStep, ...], tuple[BoundStep, ...]]] = []
        for step in program.instructions:
            if isinstance(step, Read) and step.tensor in parameters and step.result in used | handed_out:
                reads.append((step.result, step.tensor, (), ()))
            elif isinstance(step, Change) and step.source in parameters:
                reads.append((step.result, step.tensor, step.forward, step.backward))
        shares = Counter(tensor for _, tensor, _, _ in reads)
        slots = {name: self._slot(name) for name in shares}
        self._leaves = {p.tensor: Leaf(*self._home[p.tensor]) for p in self.graph.parameters}
        readers: dict[str, Reader] = {}
        for value, tensor, forward, backward in reads:
            alone = shares[tensor] == 1
            if not forward and not backward and dtype is None and value not in handed_out:
                self._leaves[tensor].give(slots[tensor], self.gradients, alone)
                continue
            readers[value] = Reader(
                slots[tensor],
                self._bound(forward),
                self._bound(backward),
                self.queue,
                self.gradients,
                again=tensor in program.strategy.regathered,
                alone=alone,
                dtype=dtype,
            )
            self._read.append(tensor)
        return readers

    def _bundle(self, readers: Mapping[str, Reader], recompute: Sequence[str]) -> None:
        """Tell the readers which of them gather together, and whose gradients are scattered together."""
        reads, whole = parameter_reads(self.program), self.program.strategy.whole_gradients
        found = bundles(self.graph, [read for _, read in reads], whole, recompute)
        order = [readers[change.result] for change, _ in reads]
        for together in (tuple(order[number] for number in numbers) for numbers in found.gathers):
            for reader in together:
                reader.bundle = together
        for together in (tuple(order[number] for number in numbers) for numbers in found.scatters):
            slots = tuple(reader.slot for reader in together)
            for reader in together:
                reader.scatters = slots

    def _slot(self, tensor: str) -> Slot:
        resting, sizes = self.program.strategy.resting[tensor], self.program.place.sizes
        largest = largest_shard(self.graph.tensors[tensor].shape, resting, sizes)
        whole = tensor in self.program.strategy.whole_gradients
        return Slot(self._parameter(tensor), replica_axes(resting, sizes), int(largest), whole)

    def _bound(self, steps: tuple[BoundStep, ...]) -> tuple[BoundStep, ...]:
        return tuple(step._replace(line=self._line(step.line)) for step in steps)

    def _line(self, line: Line) -> Line:
        return line._replace(group=self.groups[line.group])

    def _parameter(self, tensor: str) -> torch.nn.Parameter:
        parameter = self._held(tensor)
        assert isinstance(parameter, torch.nn.Parameter)
        return parameter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            results, changed = self._whole(*self._compiled_sources(args, kwargs))
        else:
            self._check_mode()
            inputs = self._arguments.matched(args, kwargs)
            if not self._met:
                self._meet(inputs)
            sources = self._sources(inputs)
            with self.queue.hooks():
                results, changed = self._eager(*sources)
        for (name, _), value in zip(self.program.mutations, changed, strict=True):
            self._store(name, value)
        leaves = [
            self._handed_out(value, result) if isinstance(result, Result) else value
            for value, result in zip(results, self.program.results, strict=True)
        ]
        return unflatten_tree(leaves, self._output_tree)

    def _meet(self, inputs: Mapping[str, Tensor]) -> None:
        """Before the first step: do all ranks bring the same batch and, where random numbers are drawn, the same state?"""
        whole = (name.encode() + contents(x) for name, x in inputs.items() if not isinstance(x, DTensor))
        about = {"batch": digest(whole)}
        if self.draws:
            about["random state"] = digest([contents(torch.get_rng_state())])
        agree(about)
        self._met = True

    def _sources(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's part of every source, in the order of the program's placeholders; readers are told theirs."""
        leaves = {tensor: leaf.tensor() for tensor, leaf in self._leaves.items()}
        self.queue.begin([leaves[tensor] for tensor in self._read])
        sources = list(leaves.values())
        sources += [local_of(self._held(b.tensor)) for b in self.graph.buffers]
        sources += self._constants
        sources += self._arguments.local(inputs)
        return sources

    def _compiled_sources(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """As :meth:`_sources`, with parameters read by their public, traceable way and inputs matched by order."""
        resting, place = self.program.strategy.resting, self.program.place
        leaves = flatten_tree((args, dict(kwargs)))[0]
        sources = []
        for entry in self.graph.parameters:
            parameter = self._parameter(entry.tensor)
            assert isinstance(parameter, DTensor)
            sources.append(parameter.to_local(grad_placements=parameter.placements))
        sources += [self._held(b.tensor) for b in self.graph.buffers]
        sources += self._constants
        for given, leaf in zip(self.graph.inputs, leaves, strict=True):
            if given.tensor is not None:
                sources.append(cut(leaf, resting[given.tensor], place))
        return sources

    def _store(self, tensor: str, value: Tensor) -> None:
        """Replace a buffer: writing into it would spoil what autograd saved of the old value."""
        held, key = self._home[tensor]
        before, value = held[key], value.detach()
        if isinstance(before, DTensor):
            value = distributed(value, before.device_mesh, tuple(before.placements), before.shape)
        held[key] = value

    def _handed_out(self, value: Tensor, result: Result) -> Tensor:
        """Whole results as plain tensors, cut ones as DTensors."""
        if all(isinstance(placement, Replicate) for placement in result.layout):
            return value
        if torch.compiler.is_compiling() and self._has_loss:
            # The compiler wants a gradient for every DTensor that it hands out, and a loss alone brings none.
            value = value.detach()
        return distributed(value, self.mesh, result.layout, self.graph.tensors[result.tensor].shape)

    def _check_mode(self) -> None:
        if self.training != self.graph.training and not self._mode_free:
            mode = "training" if self.graph.training else "evaluation"
            raise RunError(
                f"The plan was made for {mode} mode and the model behaves otherwise in the other one.",
                f"Call model.{'train' if self.graph.training else 'eval'}(), or plan the model in the other mode too.",
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back: backward passes inside add up locally, the next one outside reduces the total."""
        self.gradients.hold, before = True, self.gradients.hold
        try:
            yield
        finally:
            self.gradients.hold = before


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def distributed(local: Tensor, mesh: DeviceMesh, layout: Any, shape: Sequence[int]) -> DTensor:
    """A local shard as a DTensor of the whole shape (contiguous strides)."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    size = torch.Size(shape)
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=size, stride=tuple(reversed(stride)))


def _constant(constant: Constant, program: Program, device: torch.device) -> Tensor:
    meta = program.graph.tensors[constant.tensor]
    whole = torch.frombuffer(bytearray(constant.data), dtype=getattr(torch, meta.dtype)).reshape(meta.shape)
    return cut(whole, program.strategy.resting[constant.tensor], program.place).to(device)
