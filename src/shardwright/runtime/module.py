"""The module that training loops see: DTensor parameters under their original names, driving one rank's programs.

``forward`` takes what the original module took and gives what it gave. Eagerly it executes the program, instruction by
instruction; under ``torch.compile`` what it computes is emitted with everything inline, which the compiler schedules itself.
A call whose inputs require gradients, or whose parameters were thawed, has a program of its own, built from the same graph
under the same strategy when it is first made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import flatten_tree
from shardwright.errors import LoweringError, RunError
from shardwright.graph import Graph
from shardwright.graph.gradients import with_input_gradients
from shardwright.lowering.randomness import draws
from shardwright.operators.strategy import Strategy
from shardwright.program import Decisions, Program, build
from shardwright.program.border import whole_layout
from shardwright.program.dataflow import Compute
from shardwright.program.validate import validate_dataflow, validate_program
from shardwright.runtime.agreement import agree, contents, digest
from shardwright.runtime.border import Inputs, Outputs
from shardwright.runtime.calling import Calling, refuse_autocast, refuse_other_mode
from shardwright.runtime.execution import Execution, Gradients, Rank
from shardwright.runtime.parts import Owning
from shardwright.runtime.same_rows import SameRows
from shardwright.runtime.shards import constant, device_of

_PUBLIC = ("program", "graph", "mesh", "device", "groups", "gradients", "draws", "decisions")
"""What may be asked of a parallelized module where the original has nothing of that name."""


class ParallelModule(Owning):
    """One rank's share of a model. Made by :func:`shardwright.parallelize`, not by hand.

    ``program``, ``graph``, ``mesh``, ``device``, ``groups``, ``gradients``, ``draws`` and ``decisions`` say how it
    runs; where the model has something of that name itself, that is what is found.
    """

    def __init__(
        self,
        program: Program,
        decisions: Decisions,
        mesh: DeviceMesh,
        tensors: Mapping[str, torch.nn.Parameter | Tensor],
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        inputs: Inputs = "whole",
        outputs: Outputs = "whole",
        compare_batches: int = 1,
        calling: Calling | None = None,
        original: torch.nn.Module | None = None,
    ) -> None:
        """``tensors`` holds parameters (as DTensors) and buffers (local) by the graph's names.

        ``original`` is the model that this stands for, or another module that does; nothing of it is kept but its shape.
        """
        super().__init__()
        self._options: dict[str, Any] = {
            "compute_dtype": compute_dtype,
            "reduce_dtype": reduce_dtype,
            "inputs": inputs,
            "outputs": outputs,
            "compare_batches": compare_batches,
            "calling": calling,
        }
        self._program, self._decisions, self._mesh = program, decisions, mesh
        self._graph: Graph = program.graph
        self._device = device_of(mesh)
        self._groups = groups = {name: mesh.get_group(name).group_name for name, _ in program.strategy.axes}
        lines = [program.flow.place.line(axis) for axis in range(len(program.strategy.axes))]
        lines = [line._replace(group=groups[line.group]) for line in lines]
        self._gradients = Gradients()
        self._resemble(original)
        self._own(self._graph.parameters, self._graph.buffers, tensors)
        rank = Rank(
            mesh=mesh,
            device=self._device,
            groups=groups,
            gradients=self._gradients,
            home=self._home,
            constants=[constant(c, program.flow, self._device) for c in self._graph.constants],
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            inputs=inputs,
            outputs=outputs,
        )
        # Kept out of the module tree: their state is this module's own, and names in state_dict() stay the original ones.
        self._planned = self._current = Execution(program, decisions, rank, compiles=True)
        self._executions = {frozenset[str](): self._planned}
        self._frozen = [p.tensor for p in self._graph.parameters if not p.trainable]
        self._draws = any(isinstance(n, Compute) and draws(n.op, n.rules.kind) for n in program.flow.nodes)
        self._mode_free = not self._graph.mutations and not self._draws
        self._met = False
        self._calling = calling
        given = {i.tensor: program.strategy.resting[i.tensor] for i in self._graph.inputs if i.tensor is not None}
        layouts = {name: layout if inputs == "local" else whole_layout(layout) for name, layout in given.items()}
        apart = mesh.size() > 1 and dist.get_backend() != "fake"
        self._same_rows = SameRows(lines, layouts, mesh.mesh, self._device, compare_batches if apart else 0)
        self.train(self._graph.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _PUBLIC:
                raise
            return self.__dict__[f"_{name}"]

    if TYPE_CHECKING:
        program: Program
        graph: Graph
        mesh: DeviceMesh
        device: torch.device
        groups: Mapping[str, str]
        gradients: Gradients
        draws: bool
        decisions: Decisions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_autocast(self._device)
        if self._calling is not None:
            args, kwargs = self._calling.arranged(args, kwargs)
        if torch.compiler.is_compiling():
            leaves = flatten_tree((args, kwargs))[0]
            if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                raise RunError("A compiled module gives no gradients of its inputs.", "Run it eagerly, or detach them.")
            return self._planned.compiled(leaves)
        if not self._mode_free:
            refuse_other_mode(self.training, self._graph.training)
        inputs = self._planned.arguments.matched(args, kwargs)
        if not self._met:
            self._meet(inputs)
        self._same_rows(inputs, torch.get_rng_state() if self._draws else None)
        return self._execution_for(inputs)(inputs)

    def _execution_for(self, inputs: Mapping[str, Tensor]) -> Execution:
        """The program for a call with these inputs."""
        if not torch.is_grad_enabled():
            return self._planned
        thawed = (name for name in self._frozen if self._planned.rank.held(name).requires_grad)
        wanted = frozenset([*(name for name, leaf in inputs.items() if leaf.requires_grad), *thawed])
        found = self._executions.get(wanted)
        if found is None:
            program = self._differentiated(wanted)
            found = self._executions[wanted] = Execution(program, self._decisions, self._planned.rank)
        if found is not self._current:
            if self._current.holds_back:
                raise RunError(
                    "Gradients are held back by no_sync() from calls whose inputs did (or did not) require gradients, "
                    "and now that changes.",
                    "Let inputs require gradients in all passes of one accumulation, or in none.",
                )
            self._current = found
        return found

    def _differentiated(self, sources: frozenset[str]) -> Program:
        """The program in which gradients flow back to these inputs and parameters too, under the same strategy."""
        program, graph = self._program, with_input_gradients(self._graph, sources)
        try:
            return built(graph, program.strategy, self._decisions, program.flow.place.coordinate, self._device)
        except LoweringError as error:
            raise RunError(
                f"The plan has no way for the gradient of {', '.join(sorted(sources))}: {error.message}",
                "Detach the input, or split that operator otherwise (shardwright plan --forbid).",
            ) from error

    def _under(self, strategy: Strategy) -> Execution:
        """The same model in other shares, ready to be run; parameters and buffers stay as they are."""
        place = self._program.flow.place.coordinate
        program = built(self._graph, strategy, self._decisions, place, self._device)
        constants = [constant(c, program.flow, self._device) for c in self._graph.constants]
        return Execution(program, self._decisions, replace(self._planned.rank, constants=constants))

    def _adopt(self, execution: Execution) -> None:
        """Run this from the next call on; passes under way end as they began."""
        if any(known.holds_back for known in self._executions.values()):
            raise RunError(
                "Gradients are held back by no_sync(), summed for the shares of the batch as they are now.",
                "Change the shares after the pass that reduces them.",
            )
        self._program, self._planned, self._current = execution.program, execution, execution
        self._executions = {frozenset[str](): execution}

    def _meet(self, inputs: Mapping[str, Tensor]) -> None:
        """Before the first step: are all ranks there, with the same whole batch, byte by byte?"""
        whole = self._planned.rank.inputs == "whole"
        given = (name.encode() + contents(x) for name, x in inputs.items() if whole and not isinstance(x, DTensor))
        agree({"batch": digest(given)})
        self._met = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy with parameters and buffers of its own, on the same mesh (``AveragedModel`` makes one)."""
        tensors: dict[str, torch.nn.Parameter | Tensor] = {}
        for name, (held, key) in self._home.items():
            old = held[key]
            new = old.detach().clone()
            tensors[name] = torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
            memo[id(old)] = tensors[name]
        twin = ParallelModule(self._program, self._decisions, self._mesh, tensors, original=self, **self._options)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if name not in vars(twin):  # what the loop hung on the module
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin.train(self.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RunError(
            "A parallelized module belongs to the processes of its mesh and cannot be pickled.",
            "Store its weights: shardwright.runtime.checkpoint.save_checkpoint(), or its state_dict() with "
            "torch.distributed.checkpoint.",
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back: backward passes inside add up locally, the next one outside reduces the total."""
        self._gradients.hold, before = True, self._gradients.hold
        try:
            yield
        finally:
            self._gradients.hold = before


def built(
    graph: Graph, strategy: Strategy, decisions: Decisions, coordinate: Sequence[int], device: torch.device
) -> Program:
    """The program of one rank, proved to be sound, which gradients of any of its results may come back through."""
    program = build(graph, strategy, decisions, coordinate, device=device.type, training=True, every_result=True)
    validate_dataflow(program.flow)
    validate_program(program)
    return program
