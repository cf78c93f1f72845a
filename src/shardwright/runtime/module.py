"""The module that training loops see: DTensor parameters under their original names, driving one rank's programs.

``forward`` takes what the original module took and gives what it gave. Eagerly it executes the program, instruction by
instruction; under ``torch.compile`` what it computes is emitted with everything inline, which the compiler schedules itself.
A call that differs from the planned one has a program of its own under the same strategy, made when it first comes
(:mod:`~shardwright.runtime.programs`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright._torch_compat import flatten_tree
from shardwright.cluster import Device
from shardwright.errors import RunError
from shardwright.frontend.containers import hand_back
from shardwright.graph import Graph
from shardwright.operators.rules import Layout
from shardwright.operators.strategy import Strategy
from shardwright.program import Decisions, Program
from shardwright.program.border import whole_layout
from shardwright.runtime.agreement import agree, contents, digest
from shardwright.runtime.border import Inputs, Outputs
from shardwright.runtime.calling import Calling, refuse_autocast, refuse_compiler_options
from shardwright.runtime.execution import Execution, Gradients, Rank
from shardwright.runtime.generation import generate
from shardwright.runtime.meeting import NEW_CALL, WITH_GRADIENTS, WITHOUT_GRADIENTS, Meeting, kind
from shardwright.runtime.parts import Owning, original_of
from shardwright.runtime.pretrained import save_pretrained
from shardwright.runtime.programs import Prepared, Programs, Surroundings, built
from shardwright.runtime.recut import Moving, resting
from shardwright.runtime.rows import Rows
from shardwright.runtime.same_rows import SameRows
from shardwright.runtime.shards import constant, device_of
from shardwright.runtime.template import Template

_PUBLIC = ("program", "graph", "mesh", "device", "groups", "gradients", "draws", "decisions")
"""What may be asked of a parallelized module where the original has nothing of that name."""

_OUR_WAY = {"generate": generate, "save_pretrained": save_pretrained}
"""Methods of originals that need every rank, or the model itself, and are done in a way of our own."""


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
        template: Template | None = None,
        judged_on: Device | None = None,
        expected: tuple[Graph, ...] = (),
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
            "template": template,
            "judged_on": judged_on,
            "expected": expected,
        }
        self._calling = calling
        self._program, self._decisions, self._mesh = program, decisions, mesh
        self._graph: Graph = program.graph
        self._device = device_of(mesh)
        self._groups = groups = {name: mesh.get_group(name).group_name for name, _ in program.strategy.axes}
        lines = [program.flow.place.line(axis) for axis in range(len(program.strategy.axes))]
        lines = [line._replace(group=groups[line.group]) for line in lines]
        self._gradients = Gradients()
        self._resemble(original)
        self._own(self._graph.parameters, self._graph.buffers, tensors)
        self._rows = Rows(mesh, lines, self._graph, program.strategy, calling) if inputs == "rows" else None
        inputs = "whole" if inputs == "rows" else inputs
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
        apart = mesh.size() > 1 and dist.get_backend() != "fake"

        self._meeting = meeting = Meeting(lines, mesh.mesh, self._device)

        def watch(graph: Graph, resting: Mapping[str, Layout]) -> SameRows:
            given = {i.tensor: resting[i.tensor] for i in graph.inputs if i.tensor is not None}
            layouts = {name: layout if inputs == "local" else whole_layout(layout) for name, layout in given.items()}
            return SameRows(meeting, layouts, mesh.mesh, compare_batches if apart else 0)

        # Kept out of the module tree: their state is this module's own, and names in state_dict() stay the original ones.
        self._planned = Execution(program, decisions, rank)
        self._draws = self._planned.draws
        self._met, self._last_kind = False, 0
        self._take_modes(original)
        around = Surroundings(
            calling=calling,
            template=template,
            homes={path: self._home[p.tensor] for p in self._graph.parameters for path in p.paths}
            | {buffer.path: self._home[buffer.tensor] for buffer in self._graph.buffers},
            watch=watch,
            judged_on=judged_on,
            expected=expected,
            modules=tuple(self.named_modules(remove_duplicate=False)),
            new_call=self._meet_for_new_call if apart and compare_batches else None,
        )
        self._programs = Programs(Prepared(decisions, watch, self._planned), around)

    def __getattr__(self, name: str) -> Any:
        if name in _OUR_WAY and hasattr(original_of(self)[0], name):
            return functools.partial(_OUR_WAY[name], self)
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

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what this rank computes, region by region (:mod:`~shardwright.runtime.regions`).

        Communication, memory and CUDA graphs stay as they are. In contrast to ``torch.compile(model)``, which takes the
        whole program, the time it takes does not grow with the number of equal blocks.
        """
        refuse_compiler_options(args, kwargs)
        self._gradients.compiled = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not ParallelModule:  # a hook of this very call has gone over to a plan with stages
            return type(self).forward(self, *args, **kwargs)
        refuse_autocast(self._device)
        if torch.compiler.is_compiling():
            if self._calling is not None:
                args, kwargs = self._calling.arranged(args, kwargs)
            leaves = flatten_tree((args, kwargs))[0]
            if self._rows is not None:
                raise RunError("A compiled module takes no rows.", "Give it whole batches, or run it eagerly.")
            if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                raise RunError("A compiled module gives no gradients of its inputs.", "Run it eagerly, or detach them.")
            if self._programs.planned.returns_arguments:
                raise RunError("A compiled module does not change the objects it is given.", "Run it eagerly.")
            return self._planned.compiled(leaves)
        if self._rows is not None:
            args, kwargs = self._rows.batch(args, kwargs)
        prepared, inputs = self._programs.find(args, kwargs)
        if not self._met:
            self._meet(inputs)
        same = kind(WITH_GRADIENTS if torch.is_grad_enabled() else WITHOUT_GRADIENTS, prepared.number)
        # Going over from training to evaluation is where ranks part: there the host waits until it knows.
        prepared.same_rows(inputs, same, torch.get_rng_state() if prepared.draws else None, same != self._last_kind)
        self._last_kind = same
        output = self._programs.execution(prepared, inputs)(inputs)
        if prepared.returns_arguments and self._calling is not None:
            hand_back(output, self._calling.by_name(args, kwargs))
        return output

    def _under(self, strategy: Strategy) -> Execution:
        """The same model in other shares, ready to be run; parameters and buffers stay as they are."""
        place = self._program.flow.place.coordinate
        program = built(self._graph, strategy, self._decisions, place, self._device)
        constants = [constant(c, program.flow, self._device) for c in self._graph.constants]
        return Execution(program, self._decisions, replace(self._planned.rank, constants=constants))

    def _adopt(self, execution: Execution, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Run this from the next call on; passes under way end as they began. Parameters that rest otherwise there move,
        with their state in the optimizer."""
        if self._gradients.holding:
            raise RunError(
                "Gradients are held back by no_sync(), summed for the shares of the batch as they are now.",
                "Change the shares after the pass that reduces them.",
            )
        before, after = (
            resting(p.graph, p.strategy, self._mesh.mesh.flatten().tolist(), self._mesh, p.flow.place.coordinate)
            for p in (self._program, execution.program)
        )
        if moves := before != after:
            held = {name: place[key] for name, (place, key) in self._home.items()}
            Moving(self._graph, held, optimizer, before, after, self._device).perform()
        self._program, self._planned = execution.program, execution
        self._programs.adopt(execution, alone=moves)

    def _meet_for_new_call(self) -> None:
        """Before a capture of some seconds, which others would wait for in a call of their own."""
        if self._met:
            self._meeting.tell(kind(NEW_CALL), at_once=True)

    def _meet(self, inputs: Mapping[str, Tensor]) -> None:
        """Before the first step: are all ranks there, with the same whole batch, byte by byte?"""
        whole = self._planned.rank.inputs == "whole"
        given = (name.encode() + contents(x) for name, x in inputs.items() if whole and not isinstance(x, DTensor))
        agree({"batch": digest(given)})
        self._met = True

    def _twin(self, tensors: Mapping[str, torch.nn.Parameter | Tensor]) -> ParallelModule:
        return ParallelModule(self._program, self._decisions, self._mesh, tensors, original=self, **self._options)

    def _take_modes(self, original: torch.nn.Module | None) -> None:
        """Every module is in the mode that it was captured in."""
        self.train(self._graph.training)
        if original is not None and original.training == self._graph.training:
            modes = {path: module.training for path, module in original.named_modules(remove_duplicate=False)}
            for path, module in self.named_modules(remove_duplicate=False):
                module.training = modes.get(path, module.training)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back: backward passes inside add up locally, the next one outside reduces the total."""
        self._gradients.hold, before = True, self._gradients.hold
        try:
            yield
        finally:
            self._gradients.hold = before
